// Inputs that are chunks: how they lie in an input, and the mutator that keeps them whole.
//
//   input: u8 bucket, u8 round, u8 slicing, then (u32 bytes, chunk)...; the last chunk may be cut short
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/bytes.h"
#include "tests/fuzz/target.h"

namespace gradwire::fuzz {

struct ChunkInput {
  uint8_t bucket = 0;   // modulo the number of buckets (buckets.h)
  uint8_t round = 0;    // modulo the number of rounds there
  uint8_t slicing = 0;  // how chunks are cut into slices, and the target's own choices
  std::vector<std::vector<uint8_t>> chunks;
};

// Any bytes are an input.
ChunkInput ParseInput(Input input);
std::vector<uint8_t> ToBytes(const ChunkInput& input);
std::vector<uint8_t> MakeInput(uint8_t bucket, uint8_t round, uint8_t slicing, std::span<const Bytes> chunks);

// Cuts `chunk` into slices at places chosen by `slicing`, empty ones among them; 0: one slice. Each is an allocation of
// its own, so that a sanitizer sees what is read behind it, at an address that is aligned to nothing.
std::vector<Bytes> Slices(std::span<const uint8_t> chunk, uint8_t slicing);

// The first bytes of a chunk and its segments made consistent: magic, version, sizes, counts, padding, checksums. What
// segments and identity say is left as it is.
void Repair(std::vector<uint8_t>* chunk);

// A mutator of bytes: libFuzzer's LLVMFuzzerMutate.
using MutateBytes = size_t (*)(uint8_t* data, size_t size, size_t max_size);

// Mutates bytes, fields, segments or chunks, and mostly repairs the result. Returns the new size.
size_t MutateChunks(uint8_t* data, size_t size, size_t max_size, uint32_t seed, MutateBytes mutate_bytes);

}  // namespace gradwire::fuzz
