// The memory that the jobs of a server may hold together (--memory-limit-bytes): taken before it is used, and given
// back when its user is destroyed.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace gradwire {

// Thread-safe.
class MemoryAccount {
 public:
  // A part of the account's memory, given back when the share is destroyed.
  class Share {
   public:
    Share() = default;
    Share(Share&& other) noexcept { *this = std::move(other); }
    Share& operator=(Share&& other) noexcept {
      std::swap(account_, other.account_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Share() {
      if (account_ != nullptr) account_->Return(bytes_);
    }
    uint64_t bytes() const { return bytes_; }

   private:
    friend class MemoryAccount;
    std::shared_ptr<MemoryAccount> account_;
    uint64_t bytes_ = 0;
  };

  explicit MemoryAccount(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Grows or shrinks `share` to `bytes`. False, with `share` as it was: there is not that much left.
  static bool Resize(const std::shared_ptr<MemoryAccount>& account, uint64_t bytes, Share* share) {
    absl::MutexLock lock(&account->mu_);
    const uint64_t others = account->used_ - share->bytes_;
    if (bytes > share->bytes_ && (others > account->limit_bytes_ || bytes > account->limit_bytes_ - others))
      return false;
    account->used_ = others + bytes;
    share->account_ = account;
    share->bytes_ = bytes;
    return true;
  }

  uint64_t used() const {
    absl::MutexLock lock(&mu_);
    return used_;
  }
  // All bytes that were ever given back: when this grows, the allocator may have something for the system.
  uint64_t returned() const {
    absl::MutexLock lock(&mu_);
    return returned_;
  }
  uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  void Return(uint64_t bytes) {
    absl::MutexLock lock(&mu_);
    used_ -= bytes;
    returned_ += bytes;
  }

  const uint64_t limit_bytes_;
  mutable absl::Mutex mu_;  // innermost
  uint64_t used_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t returned_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace gradwire
