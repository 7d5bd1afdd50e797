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
  auto* memory = static_cast<uint8_t*>(runtime->AllocatePinned(slots * slot_bytes));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%d bytes of pinned memory for the receive ring are not to be had; give it fewer slots", slots * slot_bytes));
  }
  return std::unique_ptr<ReceiveRing>(new ReceiveRing(runtime, slots, slot_bytes, memory));
}

ReceiveRing::ReceiveRing(DeviceRuntime* runtime, size_t slots, size_t slot_bytes, uint8_t* memory)
    : runtime_(*runtime), slot_bytes_(slot_bytes), memory_(memory) {
  for (size_t i = 0; i < slots; ++i) {
    copied_.push_back(runtime_.NewEvent());
    free_.push_back(slots - 1 - i);
  }
}

ReceiveRing::~ReceiveRing() {
  absl::MutexLock lock(&mutex_);
  for (size_t slot : copying_) runtime_.WaitOnHost(copied_[slot]);
  for (Event* event : copied_) runtime_.DeleteEvent(event);
  runtime_.FreePinned(memory_);
}

uint8_t* ReceiveRing::Acquire() {
  absl::MutexLock lock(&mutex_);
  if (free_.empty()) {
    const auto done = [this](size_t slot) { return runtime_.Done(copied_[slot]); };
    const auto first_done = std::stable_partition(copying_.begin(), copying_.end(), [&](size_t s) { return !done(s); });
    free_.assign(first_done, copying_.end());
    copying_.erase(first_done, copying_.end());
    if (free_.empty()) return nullptr;
  }
  const size_t slot = free_.back();
  free_.pop_back();
  return memory_ + slot * slot_bytes_;
}

void ReceiveRing::CopyToDevice(uint8_t* slot, void* to, size_t bytes, Stream* stream) {
  const size_t index = IndexOf(slot);
  runtime_.ToDevice(to, slot, bytes, stream);
  runtime_.Record(copied_[index], stream);
  absl::MutexLock lock(&mutex_);
  copying_.push_back(index);
}

void ReceiveRing::Release(uint8_t* slot) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(IndexOf(slot));
}

}  // namespace gradwire::kernels::cuda
