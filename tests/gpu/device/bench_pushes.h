// What a shard server on a GPU does with the chunks that it receives, next to the bus alone.
#pragma once

#include "kernels/cuda/async_backend.h"
#include "tests/bench/lib/report.h"

namespace gradwire::bench {

struct PushOptions {
  uint32_t buckets = 64;
  uint64_t bucket_elements = 1u << 20;
  uint32_t threads = 8;  // that bring chunks, as a transport's do
  int rounds = 15;
};

// Chunks of dense:fp32 frames from host memory into the accumulators (parsed, CRCs checked, through the receive ring,
// added and checked on the device; one verdict per frame) against copies of as many bytes from pinned memory by as many
// threads; whole rounds: pushes, update frames, AdamW; and both on the CPU.
void MeasurePushes(kernels::cuda::AsyncBackend& backend, const PushOptions& options, Report& report);

}  // namespace gradwire::bench
