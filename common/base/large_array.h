// Arrays that are swept from end to end, like accumulators and parameters, in large pages where the kernel gives them
// (transparent huge pages): with small ones, finding the pages takes as long as the stores.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace gradwire {

inline constexpr size_t kLargePageBytes = 2u << 20;

// As std::allocator; what is shorter than a large page is not treated specially, nor is the rest behind the last one.
template <typename T>
class LargePageAllocator {
 public:
  using value_type = T;
  LargePageAllocator() = default;
  template <typename U>
  LargePageAllocator(const LargePageAllocator<U>&) {}  // NOLINT: as allocators do

  T* allocate(size_t n) {
    const size_t bytes = n * sizeof(T);
    if (bytes < kLargePageBytes) return static_cast<T*>(::operator new(bytes));
    void* memory = ::operator new(bytes, std::align_val_t(kLargePageBytes));
#ifdef __linux__
    (void)madvise(memory, bytes / kLargePageBytes * kLargePageBytes, MADV_HUGEPAGE);  // without it, small pages
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t n) {
    if (n * sizeof(T) < kLargePageBytes) return ::operator delete(memory);
    ::operator delete(memory, std::align_val_t(kLargePageBytes));
  }
  bool operator==(const LargePageAllocator&) const { return true; }
};

template <typename T>
using LargeArray = std::vector<T, LargePageAllocator<T>>;

}  // namespace gradwire
