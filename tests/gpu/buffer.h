// An array in device memory at a chosen misalignment, between guard bytes that no kernel may touch.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cuda/async_backend.h"

namespace gradwire::kernels::cuda {

template <class T>
class Buffer {
 public:
  // `offset_bytes` past 256-byte alignment, plus the guard.
  Buffer(DeviceRuntime& runtime, const std::vector<T>& values, size_t offset_bytes)
      : runtime_(runtime), n_(values.size()), begin_(kGuard + offset_bytes), image_(begin_ + Bytes() + kGuard, kByte) {
    if (n_ > 0) std::memcpy(image_.data() + begin_, values.data(), Bytes());
    memory_ = static_cast<uint8_t*>(runtime.Allocate(image_.size(), nullptr));
    runtime.ToDevice(memory_, image_.data(), image_.size(), nullptr);
  }
  ~Buffer() { runtime_.Free(memory_, nullptr); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* get() const { return reinterpret_cast<T*>(memory_ + begin_); }

  // The values now; a test failure if a guard byte changed.
  std::vector<T> Read() {
    std::vector<uint8_t> now(image_.size());
    runtime_.ToHost(now.data(), memory_, now.size(), nullptr);
    const auto intact = [](uint8_t byte) { return byte == kByte; };
    EXPECT_TRUE(std::all_of(now.begin(), now.begin() + static_cast<ptrdiff_t>(begin_), intact)) << "written before";
    EXPECT_TRUE(std::all_of(now.end() - kGuard, now.end(), intact)) << "written behind";
    std::vector<T> values(n_);
    if (n_ > 0) std::memcpy(values.data(), now.data() + begin_, Bytes());
    return values;
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr uint8_t kByte = 0x5A;

  size_t Bytes() const { return n_ * sizeof(T); }

  DeviceRuntime& runtime_;
  const size_t n_;
  const size_t begin_;
  std::vector<uint8_t> image_;
  uint8_t* memory_ = nullptr;
};

}  // namespace gradwire::kernels::cuda
