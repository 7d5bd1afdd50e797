// What the training loop gives to a round: learning rates, and gradients as they get ready.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/internal/tensor_elements.h"
#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire::client {

// One for each parameter group, from one for each or one for all. InvalidArgument.
absl::StatusOr<std::vector<float>> RatesOf(const Job& job, std::span<const float> learning_rates);

// That there is one for each tensor; and that none is a null pointer. InvalidArgument.
absl::Status CheckCount(const Job& job, std::span<const float* const> gradients);
absl::Status CheckGradients(const Job& job, std::span<const float* const> gradients);

// The tensors of a job that are ready in a round. Not thread-safe.
class ReadyTensors {
 public:
  explicit ReadyTensors(const Job* job) : job_(*job), ready_(job->tensors().size()) { Open(); }

  // A round opens, in which none is ready, or all are because it has no gradients.
  void Open(bool all = false);
  // InvalidArgument (no such tensor, a null pointer, no rows of it), FailedPrecondition (it is ready already).
  absl::Status Note(uint32_t tensor, const GivenGradient& gradient);
  // FailedPrecondition names a tensor with elements that is not ready.
  absl::Status CheckAll() const;
  bool Has(uint32_t tensor) const { return tensor < ready_.size() && ready_[tensor]; }
  // CheckAll would be OK.
  bool All() const { return missing_bytes_ == 0; }
  uint64_t missing_bytes() const { return missing_bytes_; }  // of those that are not ready
  uint64_t bytes(uint32_t tensor) const { return job_.tensors()[tensor].elements * sizeof(float); }
  // In the order in which they got ready.
  const std::vector<uint32_t>& order() const { return order_; }

 private:
  const Job& job_;
  std::vector<bool> ready_;
  uint64_t missing_bytes_ = 0;
  std::vector<uint32_t> order_;
};

// In which order tensors are taken in, and buckets leave, where several are ready; the lowest turn first. Small tensors
// go before the others, so that a wide head or embedding does not hold them; all else in the order in which backward
// makes it, which is the same on every worker whenever each of them is ready: a shard gets a bucket from all of them at
// about the same time, and answers it while they send the next ones.
struct Turns {
  Turns(const Job& job, const Layout& layout);
  std::vector<uint32_t> of_tensor;
  std::vector<uint32_t> of_bucket;
};

// Which buckets are complete with a tensor. Not thread-safe.
class BucketCountdown {
 public:
  BucketCountdown(const Job& job, const Layout& layout);

  // A round opens.
  void Reset() { remaining_ = tensors_; }
  // The tensor is ready: buckets of which it was the last, ascending.
  std::vector<uint32_t> Complete(uint32_t tensor);

 private:
  std::vector<std::vector<uint32_t>> buckets_of_tensor_;
  std::vector<uint32_t> tensors_;    // by bucket
  std::vector<uint32_t> remaining_;  // by bucket: those that are not ready yet
};

}  // namespace gradwire::client
