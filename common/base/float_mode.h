// How a thread computes with floats. All parties of a job have to round to nearest and keep subnormal numbers, or their
// replicas drift apart. A caller's thread may do otherwise (torch.set_flush_denormal), and threads begin as the one
// that starts them.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace gradwire {

// The thread computes as all parties do for as long as this lives.
class AgreedFloatMode {
 public:
#if defined(__SSE2__)
  AgreedFloatMode() : before_(_mm_getcsr()) {
    constexpr uint32_t kFlushToZero = 0x8000, kRounding = 0x6000, kDenormalsAreZero = 0x0040;
    Set(before_ & ~(kFlushToZero | kRounding | kDenormalsAreZero));
  }
  ~AgreedFloatMode() { Set(before_); }

 private:
  static void Set(uint32_t mode) {
    if (mode != _mm_getcsr()) _mm_setcsr(mode);
  }
  const uint32_t before_;
#elif defined(__aarch64__)
  AgreedFloatMode() : before_(Get()) {
    constexpr uint64_t kFlushToZero = 1u << 24, kRounding = 3u << 22;
    Set(before_ & ~(kFlushToZero | kRounding));
  }
  ~AgreedFloatMode() { Set(before_); }

 private:
  static uint64_t Get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(uint64_t mode) {
    if (mode != Get()) asm volatile("msr fpcr, %0" : : "r"(mode));
  }
  const uint64_t before_;
#else
  AgreedFloatMode() {}
  ~AgreedFloatMode() {}

 private:
#endif
  AgreedFloatMode(const AgreedFloatMode&) = delete;
  AgreedFloatMode& operator=(const AgreedFloatMode&) = delete;
};

}  // namespace gradwire
