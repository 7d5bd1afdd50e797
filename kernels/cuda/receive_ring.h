// Pinned host memory through which what arrives is copied to the device, and as much device memory in which it may stay
// until the kernels that read it are done. A piece costs one asynchronous copy and one event: nobody waits for it.
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

// Thread-safe. Bound: slots * slot_bytes of pinned and as much of device memory, whatever the number of workers and
// jobs.
class ReceiveRing {
 public:
  // `runtime` outlives the ring. Errors: InvalidArgument for a ring of nothing, ResourceExhausted where so much memory
  // cannot be pinned or had on the device.
  static absl::StatusOr<std::unique_ptr<ReceiveRing>> Make(DeviceRuntime* runtime, size_t slots, size_t slot_bytes);

  // Waits for the copies under way. Precondition: no slot is held.
  ~ReceiveRing();
  ReceiveRing(const ReceiveRing&) = delete;
  ReceiveRing& operator=(const ReceiveRing&) = delete;

  // A free slot to receive into, or null while none is: every slot is held or still read by the device. Never waits.
  uint8_t* Acquire();
  // The same, but waits for the device to be done with one: the back-pressure on who sends. Slots are held for the
  // length of a copy on the host, so a thread that holds none always gets one.
  uint8_t* AcquireWaiting();

  // Copies the first `bytes` of a slot that was acquired to device memory, in stream order: `to` may be TwinOf(slot).
  // Precondition: bytes <= slot_bytes.
  void CopyToDevice(uint8_t* slot, void* to, size_t bytes, Stream* stream);
  // The slot's own device memory, 256-byte aligned where slot_bytes is a multiple of that.
  uint8_t* TwinOf(const uint8_t* slot) const { return device_memory_ + IndexOf(slot) * slot_bytes_; }

  // Gives a slot back: it is free again when what was launched on `stream` until now is done.
  void ReleaseAfter(uint8_t* slot, Stream* stream);
  // Gives back a slot whose content is not wanted.
  void Release(uint8_t* slot);

  size_t slot_bytes() const { return slot_bytes_; }

 private:
  ReceiveRing(DeviceRuntime* runtime, size_t slots, size_t slot_bytes, uint8_t* memory, uint8_t* device_memory);
  uint8_t* TakeFree() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t IndexOf(const uint8_t* slot) const { return static_cast<size_t>(slot - memory_) / slot_bytes_; }

  DeviceRuntime& runtime_;
  const size_t slot_bytes_;
  uint8_t* const memory_;
  uint8_t* const device_memory_;
  std::vector<Event*> done_;  // one per slot

  absl::Mutex mutex_;
  std::vector<size_t> free_ ABSL_GUARDED_BY(mutex_);
  std::deque<size_t> in_use_ ABSL_GUARDED_BY(mutex_);  // by the device, oldest first; streams may finish in any order
};

}  // namespace gradwire::kernels::cuda
