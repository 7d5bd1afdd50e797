// The worker's copy of the job's state: the caller's tensors, and the optimizer's moments where the worker applies
// updates itself.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/internal/tensor_memory.h"
#include "common/codec/codec.h"
#include "common/codec/plan/plan_window.h"
#include "common/codec/update/update.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/optimizer/optimizer.h"

namespace gradwire::client {

// Not thread-safe. Borrows what it is given; `tensors` lie in `memory`.
class Replica {
 public:
  Replica(const Job* job, const Layout* layout, std::shared_ptr<TensorMemory> memory,
          std::vector<std::span<float>> tensors, bool with_moments);

  // The caller gave memory for a tensor of the slice, or there is none in it.
  bool Wants(const BucketLayout& slice) const;
  // One step of the optimizer over a slice.
  absl::Status Apply(const BucketLayout& slice, const Update& update);
  // The mean of a slice into those of the caller's tensors that have memory.
  absl::Status WriteMean(const BucketLayout& slice, const Update& update);
  // Decodes a kParameters frame into a slice (and its moments, if this replica has them); returns the frame's plans.
  absl::StatusOr<PlanWindow> Load(const BucketLayout& slice, std::span<const wire::Chunk> chunks, uint64_t version);
  // The parameters of a slice in position order; 0 for those without memory.
  std::vector<float> Gather(const BucketLayout& slice) const;

  // Of a tensor, all its elements; a moment that this replica does not have is empty.
  std::span<float> parameter(uint32_t tensor) const { return tensors_[tensor]; }
  std::span<float> first_moment(uint32_t tensor) { return first_moment_[tensor]; }
  std::span<float> second_moment(uint32_t tensor) { return second_moment_[tensor]; }
  std::span<const float> first_moment(uint32_t tensor) const { return first_moment_[tensor]; }
  std::span<const float> second_moment(uint32_t tensor) const { return second_moment_[tensor]; }

  TensorMemory& memory() const { return *memory_; }

  std::string Digest() const;
  uint32_t Checksum() const;
  std::string ShardDigest(uint32_t shard) const;
  std::vector<std::string> ShardDigests() const;  // of all

 private:
  std::vector<RunState> RunsOf(const BucketLayout& slice);
  SliceSteps& StepsOf(const BucketLayout& slice) { return *steps_[layout_->slice_of(slice.bucket, slice.shard)]; }

  const Job* const job_;
  const Layout* const layout_;
  const std::shared_ptr<TensorMemory> memory_;
  const std::vector<std::span<float>> tensors_;
  std::vector<std::span<float>> first_moment_;  // empty where there is none
  std::vector<std::span<float>> second_moment_;
  std::vector<std::unique_ptr<SliceSteps>> steps_;  // of Layout::slices()
};

}  // namespace gradwire::client
