// See device_share.h.
#include "kernels/cuda/device_share.h"

#include "absl/strings/str_format.h"

namespace gradwire::kernels::cuda {

absl::StatusOr<std::unique_ptr<DeviceShare>> DeviceShare::Make(AsyncBackend* backend, const Options& options) {
  auto ring = ReceiveRing::Make(&backend->runtime(), options.ring_slots, options.ring_slot_bytes);
  if (!ring.ok()) return ring.status();
  const uint64_t left = backend->runtime().FreeBytes();
  uint64_t limit = options.memory_limit_bytes;
  // What is not given to jobs is for the scratch memory of kernels and rounds.
  if (limit == 0) limit = left / 10 * 8;
  if (limit > left) {
    return absl::InvalidArgumentError(
        absl::StrFormat("device_memory_limit_bytes is %d; the device has %d bytes left", limit, left));
  }
  return std::unique_ptr<DeviceShare>(new DeviceShare(backend, *std::move(ring), limit));
}

}  // namespace gradwire::kernels::cuda
