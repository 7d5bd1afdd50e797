// See receive_ring.h.
#include "kernels/cuda/receive_ring.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace gradwire::kernels::cuda {

absl::StatusOr<std::unique_ptr<ReceiveRing>> ReceiveRing::Make(DeviceRuntime* runtime, size_t slots,
                                                               size_t slot_bytes) {
  if (slots == 0 || slot_bytes == 0 || slots > SIZE_MAX / slot_bytes) {
    return absl::InvalidArgumentError(absl::StrFormat("a receive ring of %d slots of %d bytes", slots, slot_bytes));
  }
  const size_t bytes = slots * slot_bytes;
  auto* memory = static_cast<uint8_t*>(runtime->AllocatePinned(bytes));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%d bytes of pinned memory for the receive ring are not to be had; give it fewer slots", bytes));
  }
  auto* device_memory = static_cast<uint8_t*>(runtime->Allocate(bytes, nullptr));
  if (device_memory == nullptr) {
    runtime->FreePinned(memory);
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%d bytes of device memory for the receive ring are not to be had; give it fewer slots", bytes));
  }
  runtime->Synchronize(nullptr);  // the streams that use it are not the one that allocated
  return std::unique_ptr<ReceiveRing>(new ReceiveRing(runtime, slots, slot_bytes, memory, device_memory));
}

ReceiveRing::ReceiveRing(DeviceRuntime* runtime, size_t slots, size_t slot_bytes, uint8_t* memory,
                         uint8_t* device_memory)
    : runtime_(*runtime), slot_bytes_(slot_bytes), memory_(memory), device_memory_(device_memory) {
  for (size_t i = 0; i < slots; ++i) {
    done_.push_back(runtime_.NewEvent());
    free_.push_back(slots - 1 - i);
  }
}

ReceiveRing::~ReceiveRing() {
  absl::MutexLock lock(&mutex_);
  for (size_t slot : in_use_) runtime_.WaitOnHost(done_[slot]);
  for (Event* event : done_) runtime_.DeleteEvent(event);
  runtime_.Free(device_memory_, nullptr);
  runtime_.FreePinned(memory_);
}

uint8_t* ReceiveRing::TakeFree() {
  if (free_.empty()) {
    const auto in_use = [this](size_t slot) { return !runtime_.Done(done_[slot]); };
    const auto first_done = std::stable_partition(in_use_.begin(), in_use_.end(), in_use);
    free_.assign(first_done, in_use_.end());
    in_use_.erase(first_done, in_use_.end());
    if (free_.empty()) return nullptr;
  }
  const size_t slot = free_.back();
  free_.pop_back();
  return memory_ + slot * slot_bytes_;
}

uint8_t* ReceiveRing::Acquire() {
  absl::MutexLock lock(&mutex_);
  return TakeFree();
}

uint8_t* ReceiveRing::AcquireWaiting() {
  for (;;) {
    Event* oldest = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      if (uint8_t* slot = TakeFree()) return slot;
      const auto given_back = [this]()
                                  ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !free_.empty() || !in_use_.empty(); };
      mutex_.Await(absl::Condition(&given_back));
      if (!free_.empty()) continue;
      oldest = done_[in_use_.front()];
    }
    // Others may take the slot, and record the event anew, meanwhile: then this waits a little longer.
    runtime_.WaitOnHost(oldest);
  }
}

void ReceiveRing::CopyToDevice(uint8_t* slot, void* to, size_t bytes, Stream* stream) {
  runtime_.ToDevice(to, slot, bytes, stream);
}

void ReceiveRing::ReleaseAfter(uint8_t* slot, Stream* stream) {
  const size_t index = IndexOf(slot);
  runtime_.Record(done_[index], stream);
  absl::MutexLock lock(&mutex_);
  in_use_.push_back(index);
}

void ReceiveRing::Release(uint8_t* slot) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(IndexOf(slot));
}

}  // namespace gradwire::kernels::cuda
