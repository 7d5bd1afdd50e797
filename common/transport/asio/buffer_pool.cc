// See buffer_pool.h.
#include "common/transport/asio/buffer_pool.h"

#include <new>

namespace gradwire::transport::tcp {
namespace {

uint8_t* Allocate(size_t bytes) {
  return static_cast<uint8_t*>(::operator new(bytes, std::align_val_t(BufferPool::kAlignment)));
}
void Free(uint8_t* buffer) { ::operator delete(buffer, std::align_val_t(BufferPool::kAlignment)); }

}  // namespace

BufferPool::~BufferPool() {
  for (std::vector<uint8_t*>& list : free_)
    for (uint8_t* buffer : list) Free(buffer);
}

std::shared_ptr<uint8_t> BufferPool::Take(size_t bytes) {
  const size_t step = (bytes + kStepBytes - 1) / kStepBytes;
  if (bytes < kSmallBytes || step >= kSteps) return std::shared_ptr<uint8_t>(Allocate(bytes), &Free);
  uint8_t* buffer = nullptr;
  {
    absl::MutexLock lock(&mu_);
    if (!free_[step].empty()) {
      buffer = free_[step].back();
      free_[step].pop_back();
      free_bytes_ -= step * kStepBytes;
    }
  }
  if (buffer == nullptr) buffer = Allocate(step * kStepBytes);
  return std::shared_ptr<uint8_t>(buffer, [pool = shared_from_this(), step](uint8_t* p) { pool->Give(p, step); });
}

void BufferPool::Give(uint8_t* buffer, size_t step) {
  {
    absl::MutexLock lock(&mu_);
    if (free_bytes_ + step * kStepBytes <= kKeptBytes) {
      free_[step].push_back(buffer);
      free_bytes_ += step * kStepBytes;
      return;
    }
  }
  Free(buffer);
}

}  // namespace gradwire::transport::tcp
