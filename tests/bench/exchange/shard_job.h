// A job on a real shard server, driven step by step so that each leg can be timed by itself: the frames of one worker
// are pushed and acknowledged while the round stays open (a second worker, which abstains later, holds it), then the
// round is closed, and the update and the parameters are pulled.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "client/cpp/internal/gradients.h"
#include "client/cpp/internal/shard_link.h"
#include "common/codec/codec.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "kernels/backend.h"

namespace gradwire::bench {

struct ShardJobSpec {
  std::string address;
  std::string name;
  std::string codec;
  size_t bucket_bytes = 0;  // float32 bytes of one bucket
  size_t total_bytes = 0;   // of all buckets
};

// Counts what comes back on the streams of one link.
class LinkCounter final : public client::LinkEvents {
 public:
  // Waits for so many acknowledgements since the last wait; exits the program when a frame was not taken.
  void WaitAcks(size_t count);
  // The next `count` answers, in order of arrival.
  std::vector<client::PullAnswer> WaitAnswers(size_t count);

  void OnAck(uint32_t shard, const v1::PushAck& ack) override;
  void OnAnswer(uint32_t shard, client::PullAnswer answer) override;
  void OnMustInitialize(uint32_t) override {}
  void OnLost(uint32_t shard, const absl::Status& status) override;

 private:
  absl::Mutex mu_;
  size_t acks_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<client::PullAnswer> answers_ ABSL_GUARDED_BY(mu_);
};

// Not thread-safe. Any failure ends the program with a message. A round is Encode, Push, Close, PullUpdate and, if
// wanted, PullParameters, in this order.
class ShardJob {
 public:
  explicit ShardJob(const ShardJobSpec& spec);
  ~ShardJob();
  ShardJob(const ShardJob&) = delete;
  ShardJob& operator=(const ShardJob&) = delete;

  // Encodes the round's frames; nothing is sent.
  void Encode();
  // Sends all of them and waits until every one is merged and acknowledged.
  void Push();
  // Ends the round: every update exists when this returns.
  void Close();
  // Pulls the update frames; they are decoded by FinishRound.
  void PullUpdate();
  // Pulls the parameters of the new version in float32.
  void PullParameters();
  // Takes the plans of the next round out of the updates. Nothing is sent.
  void FinishRound();

  size_t dense_bytes() const { return gradient_.size() * sizeof(float); }
  size_t frame_bytes() const { return frame_bytes_; }          // of the round's push
  size_t update_bytes() const { return update_bytes_; }        // of PullUpdate
  size_t parameter_bytes() const { return parameter_bytes_; }  // of PullParameters

 private:
  struct Worker {
    std::unique_ptr<client::ShardLink> link;
    LinkCounter counter;
  };
  void Join(const ShardJobSpec& spec, Worker* worker, const std::string& name, uint64_t incarnation);
  void Initialize();
  const BucketLayout& LayoutOf(uint32_t bucket) const { return layout_->at(bucket, 0); }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::vector<float> gradient_;
  std::vector<std::unique_ptr<Codec>> codecs_;  // per bucket, as what follows
  std::vector<std::unique_ptr<Encoder>> encoders_;
  std::vector<RoundPlan> plans_;
  std::vector<EncodedFrame> frames_;
  std::vector<client::PullAnswer> updates_;
  std::unique_ptr<client::GradientStore> store_;
  uint64_t round_ = 0;
  size_t frame_bytes_ = 0;
  size_t update_bytes_ = 0;
  size_t parameter_bytes_ = 0;
  Worker pusher_;
  Worker holder_;  // keeps rounds open by being waited for
};

// The JobSpec of one tensor per bucket; the optimizer subtracts the mean, so that what is measured is the exchange.
v1::JobSpec BenchJob(const std::string& name, const std::string& codec, size_t bucket_bytes, size_t total_bytes);
// Normally distributed, the same for every call.
std::vector<float> BenchGradient(size_t elements);

}  // namespace gradwire::bench
