// What one bucket of a job has on a device: its stream, memory of the job, the way up through the receive ring and the
// way down into pinned memory. Its accumulator and its parameters share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/async_backend.h"
#include "kernels/cuda/device_share.h"
#include "kernels/cuda/job_memory.h"
#include "kernels/cuda/receive_ring.h"

namespace gradwire::kernels::cuda {

// Not thread-safe: the owner of the bucket serialises calls, and so the order of what is launched.
class DeviceBucket {
 public:
  // `share` and `memory` outlive the bucket. means: how many floats of it are for the means of a round; pinned_bytes:
  // host memory for results. Errors: ResourceExhausted where so much is not left, or cannot be pinned.
  static absl::StatusOr<std::unique_ptr<DeviceBucket>> Make(DeviceShare* share, JobMemory* memory, size_t means,
                                                            size_t pinned_bytes);
  // Waits for what was launched.
  ~DeviceBucket();
  DeviceBucket(const DeviceBucket&) = delete;
  DeviceBucket& operator=(const DeviceBucket&) = delete;

  AsyncBackend& backend() const { return backend_; }
  DeviceRuntime& runtime() const { return backend_.runtime(); }
  JobMemory& memory() const { return memory_; }
  Stream* stream() const { return stream_; }
  float* means() const { return means_; }  // in device memory

  // Copies `bytes`, which may be reused on return, to device memory that stays until what `launch` launches on the
  // bucket's stream is done. In pieces, one call each: launch(device memory; offset of the piece, a multiple of 16; its
  // size). Waits only where the ring has no slot free.
  void Send(std::span<const uint8_t> bytes,
            absl::FunctionRef<void(const uint8_t* piece, size_t offset, size_t size)> launch);
  // Copies to an array in device memory, in stream order; `from` may be reused on return.
  void Upload(void* to, const void* from, size_t bytes);

  // Copies into the pinned memory at `offset`, in stream order: it is there after Wait.
  // Precondition: offset + bytes <= pinned_bytes.
  void Download(size_t offset, const void* from, size_t bytes);
  const uint8_t* pinned() const { return pinned_; }
  size_t pinned_bytes() const { return pinned_bytes_; }

  // Waits, and gives bytes of device memory: in the pinned memory where they fit it, else in `spill`. Valid until
  // either is used again.
  const uint8_t* Fetch(const void* from, size_t bytes, std::vector<uint8_t>* spill);

  // Until everything launched so far is done.
  void Wait();

 private:
  DeviceBucket(DeviceShare* share, JobMemory* memory, float* means, uint8_t* pinned, size_t pinned_bytes);
  // Calls fn(slot of the ring that holds the piece, offset, size) for each piece.
  void ForEachPiece(std::span<const uint8_t> bytes, absl::FunctionRef<void(uint8_t*, size_t, size_t)> fn);

  AsyncBackend& backend_;
  ReceiveRing& ring_;
  JobMemory& memory_;
  float* const means_;
  uint8_t* const pinned_;
  const size_t pinned_bytes_;
  Stream* const stream_;
  Event* const event_;
};

// Device memory beside the budget for what a round needs now and then, freed in stream order. Thread-compatible.
class RoundMemory {
 public:
  // Errors: ResourceExhausted where the device has not so much left.
  static absl::StatusOr<RoundMemory> Make(DeviceBucket* bucket, size_t bytes);
  RoundMemory(RoundMemory&& other) noexcept : bucket_(other.bucket_), data_(std::exchange(other.data_, nullptr)) {}
  RoundMemory& operator=(RoundMemory&&) = delete;
  ~RoundMemory();

  uint8_t* data() const { return data_; }

 private:
  RoundMemory(DeviceBucket* bucket, uint8_t* data) : bucket_(bucket), data_(data) {}

  DeviceBucket* bucket_;
  uint8_t* data_;
};

}  // namespace gradwire::kernels::cuda
