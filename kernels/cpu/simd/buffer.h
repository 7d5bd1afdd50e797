// Scratch memory of one call. Out of line, so that no template of the standard library is instantiated for a target
// that the machine may not have.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::kernels::simd {

// Uninitialised, aligned to 64 bytes, with 64 bytes of room behind it. Freed with the object.
class Buffer {
 public:
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint32_t* u32() { return static_cast<uint32_t*>(data_); }
  const uint32_t* u32() const { return static_cast<const uint32_t*>(data_); }
  uint64_t* u64() { return static_cast<uint64_t*>(data_); }

 private:
  void* data_;
};

}  // namespace gradwire::kernels::simd
