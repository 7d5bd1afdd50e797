// Frames as a worker would make them, without a client library: for tests of the server.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/crc32c.h"
#include "common/codec/codec.h"
#include "common/codec/update/update.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "gradwire/v1/job.pb.h"
#include "gradwire/v1/worker.pb.h"
#include "kernels/backend.h"

namespace gradwire::testing_support {

// A job of two tensors in two buckets, SGD, float32 gradients, min_workers as given.
v1::JobSpec SmallSpec(const std::string& name, uint32_t min_workers, const std::string& codec = "dense:values=fp32",
                      uint32_t lease_ms = 10'000);

v1::WorkerIdentity IdentityOf(const std::string& job, const std::string& worker, uint64_t incarnation = 1);

// One worker's view of one shard. Not thread-safe.
class FrameMaker {
 public:
  FrameMaker(const v1::JobSpec& spec, uint32_t shard, uint32_t shards, uint64_t incarnation);

  const Job& job() const { return *job_; }
  const Layout& layout() const { return *layout_; }
  uint32_t buckets() const { return layout_->bucket_count(); }
  const BucketLayout& at(uint32_t bucket) const { return layout_->at(bucket, shard_); }

  // The initial parameters of a bucket, all equal to `value`.
  std::vector<Bytes> Initialize(uint32_t bucket, float value) const;
  // This worker's frame: every gradient element is `value`.
  std::vector<Bytes> Push(uint32_t bucket, uint64_t round, float value, float learning_rate = 0.5f);
  std::vector<Bytes> Abstain(uint32_t bucket, uint64_t round, bool nonfinite = false) const;
  // The frame by which this worker replaces the parameters of a bucket, all by `value`.
  std::vector<Bytes> Replace(uint32_t bucket, uint64_t round, float value) const;
  // Follows an update frame: the plan of the next round. Returns it decoded.
  absl::StatusOr<Update> Follow(uint32_t bucket, const std::vector<Bytes>& chunks);

 private:
  const uint32_t shard_;
  const uint64_t incarnation_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::vector<std::unique_ptr<Codec>> codecs_;
  std::vector<std::unique_ptr<Encoder>> encoders_;
  std::vector<RoundPlan> plans_;
};

// A copy of `bytes` with one bit flipped.
Bytes FlipBit(const Bytes& bytes, size_t bit);

// A copy of a chunk whose header says `value` at `offset` (proto/WIRE.md), with the checksum that belongs to it.
template <typename T>
Bytes WithHeader(const Bytes& chunk, size_t offset, T value) {
  std::vector<uint8_t> copy(chunk.data(), chunk.data() + chunk.size());
  std::memcpy(copy.data() + offset, &value, sizeof(value));
  constexpr size_t kCrcOffset = 60;  // it is over what comes before
  const uint32_t crc = Crc32c({copy.data(), kCrcOffset});
  std::memcpy(copy.data() + kCrcOffset, &crc, sizeof(crc));
  return Bytes::FromVector(std::move(copy));
}

}  // namespace gradwire::testing_support
