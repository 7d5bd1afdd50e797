// See device_bucket.h.
#include "kernels/cuda/device_bucket.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"

namespace gradwire::kernels::cuda {

absl::StatusOr<std::unique_ptr<DeviceBucket>> DeviceBucket::Make(DeviceShare* share, JobMemory* memory, size_t means,
                                                                 size_t pinned_bytes) {
  const absl::StatusOr<float*> taken = memory->Take<float>(means);
  if (!taken.ok()) return taken.status();
  auto* pinned = static_cast<uint8_t*>(share->backend().runtime().AllocatePinned(pinned_bytes));
  if (pinned == nullptr && pinned_bytes != 0) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d bytes of pinned memory for a bucket's results are not to be had", pinned_bytes));
  }
  return std::unique_ptr<DeviceBucket>(new DeviceBucket(share, memory, *taken, pinned, pinned_bytes));
}

DeviceBucket::DeviceBucket(DeviceShare* share, JobMemory* memory, float* means, uint8_t* pinned, size_t pinned_bytes)
    : backend_(share->backend()),
      ring_(share->ring()),
      memory_(*memory),
      means_(means),
      pinned_(pinned),
      pinned_bytes_(pinned_bytes),
      stream_(runtime().NewStream()),
      event_(runtime().NewEvent()) {}

DeviceBucket::~DeviceBucket() {
  runtime().Synchronize(stream_);
  runtime().DeleteEvent(event_);
  runtime().DeleteStream(stream_);
  if (pinned_ != nullptr) runtime().FreePinned(pinned_);
}

void DeviceBucket::ForEachPiece(std::span<const uint8_t> bytes, absl::FunctionRef<void(uint8_t*, size_t, size_t)> fn) {
  constexpr size_t kAlignment = 16;  // so that no piece but the last ends within a value or a vector of them
  const size_t most = ring_.slot_bytes() & ~(kAlignment - 1);
  for (size_t offset = 0; offset < bytes.size(); offset += most) {
    const size_t size = std::min(most, bytes.size() - offset);
    uint8_t* const slot = ring_.AcquireWaiting();
    std::memcpy(slot, bytes.data() + offset, size);
    fn(slot, offset, size);
    ring_.ReleaseAfter(slot, stream_);
  }
}

void DeviceBucket::Send(std::span<const uint8_t> bytes,
                        absl::FunctionRef<void(const uint8_t* piece, size_t offset, size_t size)> launch) {
  ForEachPiece(bytes, [&](uint8_t* slot, size_t offset, size_t size) {
    uint8_t* const piece = ring_.TwinOf(slot);
    ring_.CopyToDevice(slot, piece, size, stream_);
    launch(piece, offset, size);
  });
}

void DeviceBucket::Upload(void* to, const void* from, size_t bytes) {
  ForEachPiece({static_cast<const uint8_t*>(from), bytes}, [&](uint8_t* slot, size_t offset, size_t size) {
    ring_.CopyToDevice(slot, static_cast<uint8_t*>(to) + offset, size, stream_);
  });
}

void DeviceBucket::Download(size_t offset, const void* from, size_t bytes) {
  runtime().ToHost(pinned_ + offset, from, bytes, stream_);
}

const uint8_t* DeviceBucket::Fetch(const void* from, size_t bytes, std::vector<uint8_t>* spill) {
  if (bytes <= pinned_bytes_) {
    Download(0, from, bytes);
    Wait();
    return pinned_;
  }
  spill->resize(bytes);
  runtime().ToHost(spill->data(), from, bytes, stream_);  // is there on return
  return spill->data();
}

void DeviceBucket::Wait() {
  runtime().Record(event_, stream_);
  runtime().WaitOnHost(event_);
}

absl::StatusOr<RoundMemory> RoundMemory::Make(DeviceBucket* bucket, size_t bytes) {
  if (bytes == 0) return RoundMemory(bucket, nullptr);
  auto* data = static_cast<uint8_t*>(bucket->runtime().Allocate(bytes, bucket->stream()));
  if (data == nullptr) {
    return absl::ResourceExhaustedError(absl::StrFormat("the device has no %d bytes left for a round", bytes));
  }
  return RoundMemory(bucket, data);
}

RoundMemory::~RoundMemory() {
  if (data_ != nullptr) bucket_->runtime().Free(data_, bucket_->stream());
}

}  // namespace gradwire::kernels::cuda
