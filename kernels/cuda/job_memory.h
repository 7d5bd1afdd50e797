// Device memory of jobs that share a GPU: a budget that is never exceeded, and one allocation per job in which its
// arrays lie for as long as it lives (parameters, optimizer state, accumulators, scratch of its rounds).
#pragma once

#include <cstddef>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/async_backend.h"

namespace gradwire::kernels::cuda {

class JobMemory;

// What all jobs together may take. Thread-safe; outlives its JobMemory objects.
class MemoryBudget {
 public:
  // `runtime` outlives the budget.
  MemoryBudget(DeviceRuntime* runtime, size_t bytes) : runtime_(*runtime), bytes_(bytes) {}

  // All the memory of one job, at once: a job that is admitted never runs out of it. Errors: ResourceExhausted where
  // the budget or the device has not so much left, with the figures.
  absl::StatusOr<std::unique_ptr<JobMemory>> Admit(size_t bytes);

  size_t bytes() const { return bytes_; }
  size_t used() const;

 private:
  friend class JobMemory;
  void Return(size_t bytes);

  DeviceRuntime& runtime_;
  const size_t bytes_;
  mutable absl::Mutex mutex_;
  size_t used_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The memory of one job. Thread-compatible. Precondition of its end: nothing that was launched on it still runs.
class JobMemory {
 public:
  ~JobMemory();
  JobMemory(const JobMemory&) = delete;
  JobMemory& operator=(const JobMemory&) = delete;

  // n elements of T that live as long as the job, uninitialised, 256-byte aligned. Errors: ResourceExhausted where the
  // job's memory has not so much left.
  template <class T>
  absl::StatusOr<T*> Take(size_t n) {
    auto bytes = TakeBytes(n, sizeof(T));
    if (!bytes.ok()) return bytes.status();
    return static_cast<T*>(*bytes);
  }

  // What Take(n) of elements of that size uses up; for adding up what to ask Admit for.
  static size_t Rounded(size_t n, size_t element_bytes);

  size_t left() const { return size_ - taken_; }

 private:
  friend class MemoryBudget;
  JobMemory(MemoryBudget* budget, char* base, size_t size) : budget_(*budget), base_(base), size_(size) {}
  absl::StatusOr<void*> TakeBytes(size_t n, size_t element_bytes);

  MemoryBudget& budget_;
  char* const base_;
  const size_t size_;
  size_t taken_ = 0;
};

}  // namespace gradwire::kernels::cuda
