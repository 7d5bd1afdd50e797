// One bucket on a device, here the host layer of tests/gpu, which does everything as late as it may.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "kernels/cuda/device_bucket.h"
#include "tests/gpu/host/queued_device.h"

namespace gradwire::testing {

// Exactly the memory that is asked for, and a ring so small that most segments take several pieces and wait for a slot.
class DeviceSide {
 public:
  DeviceSide(uint64_t device_bytes, uint64_t means, uint64_t pinned_bytes, kernels::cuda::Lag lag,
             size_t memory_bytes = size_t{1} << 30)
      : backend_("queued", kernels::cuda::HostDeviceOptions{.memory_bytes = memory_bytes}, lag),
        share_(*kernels::cuda::DeviceShare::Make(&backend_, {.ring_slots = 3, .ring_slot_bytes = 4096})),
        memory_(*share_->budget().Admit(device_bytes + kernels::cuda::JobMemory::Rounded(means, sizeof(float)))),
        bucket_(*kernels::cuda::DeviceBucket::Make(share_.get(), memory_.get(), means, pinned_bytes)) {}
  ~DeviceSide() {
    EXPECT_EQ(memory_->left(), 0u) << "more memory was asked for than taken";
    bucket_.reset();
    memory_.reset();
    share_.reset();
    EXPECT_EQ(backend_.device().allocated(), 0) << "device or pinned memory was not freed";
  }
  DeviceSide(const DeviceSide&) = delete;
  DeviceSide& operator=(const DeviceSide&) = delete;

  kernels::cuda::DeviceBucket* bucket() { return bucket_.get(); }
  kernels::cuda::DeviceRuntime& runtime() { return backend_.runtime(); }

 private:
  kernels::cuda::QueuedBackend backend_;
  std::unique_ptr<kernels::cuda::DeviceShare> share_;
  std::unique_ptr<kernels::cuda::JobMemory> memory_;
  std::unique_ptr<kernels::cuda::DeviceBucket> bucket_;
};

}  // namespace gradwire::testing
