// Pinned host memory in which chunks are received and from which they are copied to the device as they arrive.
// A chunk costs one asynchronous copy and one event: nobody waits for it. Where it lands, and what is launched behind
// it on the same stream, is the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/async_backend.h"

namespace gradwire::kernels::cuda {

// Thread-safe. Bound: slots * slot_bytes of pinned memory, whatever the number of workers and jobs.
class ReceiveRing {
 public:
  // `runtime` outlives the ring. Errors: InvalidArgument for a ring of nothing, ResourceExhausted where so much memory
  // cannot be pinned.
  static absl::StatusOr<std::unique_ptr<ReceiveRing>> Make(DeviceRuntime* runtime, size_t slots, size_t slot_bytes);

  // Waits for the copies under way. Precondition: no slot is held.
  ~ReceiveRing();
  ReceiveRing(const ReceiveRing&) = delete;
  ReceiveRing& operator=(const ReceiveRing&) = delete;

  // A free slot to receive into, or null while none is: every slot is held or still being copied, so the caller stops
  // reading from its peer and asks again. Never waits.
  uint8_t* Acquire();

  // Copies the first `bytes` of a slot that Acquire gave out to the device, in stream order, and gives the slot back:
  // it is free again when the copy is done. Precondition: bytes <= slot_bytes.
  void CopyToDevice(uint8_t* slot, void* to, size_t bytes, Stream* stream);

  // Gives back a slot whose content is not wanted.
  void Release(uint8_t* slot);

  size_t slot_bytes() const { return slot_bytes_; }

 private:
  ReceiveRing(DeviceRuntime* runtime, size_t slots, size_t slot_bytes, uint8_t* memory);
  size_t IndexOf(const uint8_t* slot) const { return static_cast<size_t>(slot - memory_) / slot_bytes_; }

  DeviceRuntime& runtime_;
  const size_t slot_bytes_;
  uint8_t* const memory_;
  std::vector<Event*> copied_;  // one per slot

  absl::Mutex mutex_;
  std::vector<size_t> free_ ABSL_GUARDED_BY(mutex_);
  std::deque<size_t> copying_ ABSL_GUARDED_BY(mutex_);  // oldest first; streams may finish in another order
};

}  // namespace gradwire::kernels::cuda
