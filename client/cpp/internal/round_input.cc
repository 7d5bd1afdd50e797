// See round_input.h.
#include "client/cpp/internal/round_input.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace gradwire::client {

absl::StatusOr<std::vector<float>> RatesOf(const Job& job, std::span<const float> learning_rates) {
  const size_t groups = static_cast<size_t>(job.spec().optimizer().groups_size());
  if (learning_rates.size() != groups && learning_rates.size() != 1)
    return absl::InvalidArgumentError(absl::StrCat(learning_rates.size(), " learning rates were given; the job has ",
                                                   groups, " parameter groups: give one for each, or one for all"));
  for (float rate : learning_rates)
    if (!std::isfinite(rate)) return absl::InvalidArgumentError(absl::StrCat("learning rate ", rate, " is not finite"));
  std::vector<float> rates(learning_rates.begin(), learning_rates.end());
  rates.resize(groups, learning_rates[0]);
  return rates;
}

absl::Status CheckCount(const Job& job, std::span<const float* const> gradients) {
  if (gradients.size() == job.tensors().size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(gradients.size(), " gradients were given; the job has ", job.tensors().size(), " tensors"));
}

absl::Status CheckGradients(const Job& job, std::span<const float* const> gradients) {
  GW_RETURN_IF_ERROR(CheckCount(job, gradients));
  for (size_t t = 0; t < gradients.size(); ++t) {
    const Tensor& tensor = job.tensors()[t];
    if (gradients[t] == nullptr && tensor.elements != 0)
      return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor.name, "': the gradient is a null pointer"));
  }
  return absl::OkStatus();
}

void ReadyTensors::Open(bool all) {
  ready_.assign(ready_.size(), all);
  missing_bytes_ = all ? 0 : job_.elements() * sizeof(float);
  order_.clear();
}

absl::Status ReadyTensors::Note(uint32_t tensor, const GivenGradient& gradient) {
  if (tensor >= ready_.size())
    return absl::InvalidArgumentError(
        absl::StrCat("tensor index ", tensor, "; the job has ", ready_.size(), " tensors"));
  const Tensor& info = job_.tensors()[tensor];
  if (gradient.rows) {
    GW_RETURN_IF_ERROR(CheckRows(info, *gradient.rows));
  } else if (gradient.values == nullptr && info.elements > 0) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", info.name, "': the gradient is a null pointer"));
  }
  if (ready_[tensor])
    return absl::FailedPreconditionError(absl::StrCat("tensor '", info.name, "' was reported ready twice in a round"));
  ready_[tensor] = true;
  missing_bytes_ -= bytes(tensor);
  order_.push_back(tensor);
  return absl::OkStatus();
}

absl::Status ReadyTensors::CheckAll() const {
  for (size_t t = 0; t < ready_.size(); ++t) {
    const Tensor& info = job_.tensors()[t];
    if (!ready_[t] && info.elements > 0)
      return absl::FailedPreconditionError(
          absl::StrCat("the round cannot end: the gradient of tensor '", info.name, "' was not reported ready"));
  }
  return absl::OkStatus();
}

namespace {

constexpr uint64_t kSmallElements = 1 << 14;  // of a tensor that takes the network next to no time

}  // namespace

Turns::Turns(const Job& job, const Layout& layout) {
  const auto small = [&job](uint32_t tensor) { return job.tensors()[tensor].elements <= kSmallElements; };
  for (uint32_t t = 0; t < job.tensors().size(); ++t) of_tensor.push_back(small(t) ? 0 : 1);
  const uint32_t buckets = layout.bucket_count();
  for (uint32_t b = 0; b < buckets; ++b) {  // in backward order
    const bool all_small =
        std::ranges::all_of(layout.parts(b), [&](const BucketPart& part) { return small(part.tensor); });
    of_bucket.push_back(all_small ? b : buckets + b);
  }
}

BucketCountdown::BucketCountdown(const Job& job, const Layout& layout)
    : buckets_of_tensor_(job.tensors().size()), tensors_(layout.bucket_count()), remaining_(layout.bucket_count()) {
  for (uint32_t b = 0; b < layout.bucket_count(); ++b)
    for (const BucketPart& part : layout.parts(b)) {
      std::vector<uint32_t>& buckets = buckets_of_tensor_[part.tensor];
      if (!buckets.empty() && buckets.back() == b) continue;
      buckets.push_back(b);
      ++tensors_[b];
    }
}

std::vector<uint32_t> BucketCountdown::Complete(uint32_t tensor) {
  std::vector<uint32_t> complete;
  for (uint32_t bucket : buckets_of_tensor_[tensor])
    if (--remaining_[bucket] == 0) complete.push_back(bucket);
  return complete;
}

}  // namespace gradwire::client
