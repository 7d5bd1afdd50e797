// The safetensors format (https://github.com/huggingface/safetensors, "Format"): u64 length, a JSON header, the bytes
// of the tensors. Only what snapshots need: names, shapes, little-endian float32, int8 and uint32.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace gradwire {

enum class TensorType { kF32, kI8, kU32 };

struct TensorEntry {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // bytes from the end of the header; filled in by MakeSafetensorsHeader
  uint64_t bytes = 0;
};

// Whether metadata may have this text: JSON keeps nothing else.
bool IsUtf8(const std::string& text);

// The bytes before the tensors, which follow in order without gaps. Sets begin and bytes of every entry. The result has
// a multiple of 8 bytes.
std::vector<uint8_t> MakeSafetensorsHeader(std::vector<TensorEntry>* entries,
                                           const std::map<std::string, std::string>& metadata);

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> entries;
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  // in the file
};
// `file`: all of it, or at least the header with `file_bytes` telling its length. InvalidArgument: not such a file, a
// type that is not known here, tensors that overlap, leave gaps or lie outside.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::span<const uint8_t> file, uint64_t file_bytes);

}  // namespace gradwire
