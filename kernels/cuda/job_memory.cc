// See job_memory.h.
#include "kernels/cuda/job_memory.h"

#include "absl/strings/str_format.h"

namespace gradwire::kernels::cuda {
namespace {

constexpr size_t kAlignment = 256;

}  // namespace

absl::StatusOr<std::unique_ptr<JobMemory>> MemoryBudget::Admit(size_t bytes) {
  {
    absl::MutexLock lock(&mutex_);
    if (bytes > bytes_ - used_) {
      return absl::ResourceExhaustedError(absl::StrFormat(
          "a job needs %d bytes of device memory; %d of %d are left for all jobs", bytes, bytes_ - used_, bytes_));
    }
    used_ += bytes;
  }
  void* memory = bytes == 0 ? nullptr : runtime_.Allocate(bytes, nullptr);
  if (bytes > 0 && memory == nullptr) {
    Return(bytes);
    return absl::ResourceExhaustedError(absl::StrFormat(
        "a job needs %d bytes of device memory, which the budget of %d allows, but the device has not so much", bytes,
        bytes_));
  }
  // The job's streams are not the one that allocated.
  runtime_.Synchronize(nullptr);
  return std::unique_ptr<JobMemory>(new JobMemory(this, static_cast<char*>(memory), bytes));
}

size_t MemoryBudget::used() const {
  absl::MutexLock lock(&mutex_);
  return used_;
}

void MemoryBudget::Return(size_t bytes) {
  absl::MutexLock lock(&mutex_);
  used_ -= bytes;
}

JobMemory::~JobMemory() {
  if (base_ != nullptr) budget_.runtime_.Free(base_, nullptr);
  budget_.Return(size_);
}

size_t JobMemory::Rounded(size_t n, size_t element_bytes) {
  return (n * element_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

absl::StatusOr<void*> JobMemory::TakeBytes(size_t n, size_t element_bytes) {
  if (n > size_ / element_bytes || Rounded(n, element_bytes) > left()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d elements of %d bytes; %d of the job's %d bytes are left", n, element_bytes, left(), size_));
  }
  void* at = base_ + taken_;
  taken_ += Rounded(n, element_bytes);
  return at;
}

}  // namespace gradwire::kernels::cuda
