// See malloc_tuning.h. The malloc figures bound memory that is kept, not memory that is used.
#include "common/transport/malloc_tuning.h"

#include "absl/synchronization/mutex.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace gradwire::transport {

void TuneMalloc() {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#ifdef __GLIBC__
  mallopt(M_ARENA_MAX, 1);              // one heap for all threads: what one frees, any other reuses
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // chunk-sized buffers come from the heap, not from a fresh mapping
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);  // grows in few large steps
#endif
}

uint64_t FreeHeapBytes() {
#ifdef __GLIBC__
  return mallinfo2().fordblks;
#else
  return 0;
#endif
}

void ReturnFreeMemory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace gradwire::transport
