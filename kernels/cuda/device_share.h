// What the jobs of a server share of one device: its backend, the receive ring and the budget of its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/cuda/async_backend.h"
#include "kernels/cuda/job_memory.h"
#include "kernels/cuda/receive_ring.h"

namespace gradwire::kernels::cuda {

// Thread-safe. Outlives the jobs.
class DeviceShare {
 public:
  struct Options {
    uint64_t memory_limit_bytes = 0;  // of all jobs; 0: 80 % of what the device has left
    size_t ring_slots = 64;
    size_t ring_slot_bytes = 1u << 20;  // a multiple of 256
  };
  // `backend` outlives the share. Errors: InvalidArgument for a limit that is more than the device has left, with the
  // figures; those of ReceiveRing::Make.
  static absl::StatusOr<std::unique_ptr<DeviceShare>> Make(AsyncBackend* backend, const Options& options);

  AsyncBackend& backend() const { return backend_; }
  ReceiveRing& ring() const { return *ring_; }
  MemoryBudget& budget() { return budget_; }
  uint64_t memory_limit_bytes() const { return budget_.bytes(); }

 private:
  DeviceShare(AsyncBackend* backend, std::unique_ptr<ReceiveRing> ring, uint64_t memory_limit_bytes)
      : backend_(*backend), ring_(std::move(ring)), budget_(&backend->runtime(), memory_limit_bytes) {}

  AsyncBackend& backend_;
  const std::unique_ptr<ReceiveRing> ring_;
  MemoryBudget budget_;
};

}  // namespace gradwire::kernels::cuda
