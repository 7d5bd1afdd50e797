// An array that answers borrow while they travel. It is copied only where it changes before they are gone.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "common/base/large_array.h"

namespace gradwire {

// One thread at a time but for what is lent, which any thread may drop.
class LentArray {
 public:
  explicit LentArray(size_t elements) : values_(std::make_shared<Values>()) { values_->array.resize(elements); }

  size_t size() const { return values_->array.size(); }
  const float* data() const { return values_->array.data(); }

  // data() stays as it is until this is dropped. Takes the room for a copy, so std::bad_alloc is thrown here and not
  // by Own.
  std::shared_ptr<const void> Lend() {
    if (spare_ == nullptr) {
      const auto spare = std::make_shared<Values>();
      spare->array.reserve(size());
      spare_ = spare;
    }
    return std::make_shared<Loan>(values_);
  }

  // For whoever changes the values. They lie elsewhere from then on if somebody reads what was lent.
  float* Own() {
    const std::shared_ptr<Values> spare = std::move(spare_);
    if (values_->loans.load(std::memory_order_acquire) != 0) {
      spare->array.assign(values_->array.begin(), values_->array.end());
      values_ = spare;
    }
    return values_->array.data();
  }

 private:
  struct Values {
    LargeArray<float> array;
    std::atomic<int> loans = 0;
  };
  struct Loan {
    explicit Loan(std::shared_ptr<Values> from) : values(std::move(from)) {
      values->loans.fetch_add(1, std::memory_order_relaxed);
    }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    ~Loan() { values->loans.fetch_sub(1, std::memory_order_release); }
    const std::shared_ptr<Values> values;
  };

  std::shared_ptr<Values> values_;
  std::shared_ptr<Values> spare_;  // without elements; there as long as anything may be lent
};

}  // namespace gradwire
