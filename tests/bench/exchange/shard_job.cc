// See shard_job.h.
#include "tests/bench/exchange/shard_job.h"

#include <algorithm>
#include <random>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/codec/frame/parameters.h"
#include "common/codec/update/update.h"
#include "common/wire/frame.h"
#include "tests/bench/exchange/measure.h"

namespace gradwire::bench {
namespace {

constexpr int64_t kTimeoutMs = 20'000;
constexpr uint32_t kLeaseMs = 600'000;  // no heartbeat disturbs a measurement
constexpr uint64_t kPusher = 0x1001;    // incarnations
constexpr uint64_t kHolder = 0x2001;
constexpr float kRate = 1e-4f;

template <typename T>
T Take(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}

size_t BytesOf(const client::PullAnswer& answer) {
  size_t bytes = 0;
  for (const wire::Chunk& chunk : answer.chunks) bytes += chunk.bytes.size();
  return bytes;
}

}  // namespace

v1::JobSpec BenchJob(const std::string& name, const std::string& codec, size_t bucket_bytes, size_t total_bytes) {
  v1::JobSpec spec;
  spec.set_name(name);
  spec.set_codec(codec);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_STEP);
  spec.mutable_optimizer()->add_groups();
  spec.set_bucket_bytes(std::max<size_t>(bucket_bytes, 16384));
  spec.set_lease_ms(kLeaseMs);
  for (size_t begin = 0; begin < total_bytes; begin += bucket_bytes) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("layer", begin / bucket_bytes, ".weight"));
    tensor->add_shape(bucket_bytes / sizeof(float));
  }
  return spec;
}

std::vector<float> BenchGradient(size_t elements) {
  std::minstd_rand random(7);
  std::normal_distribution<float> normal(0.0f, 0.01f);
  std::vector<float> gradient(elements);
  for (float& x : gradient) x = normal(random);
  return gradient;
}

void LinkCounter::OnAck(uint32_t, const v1::PushAck& ack) {
  if (ack.outcome() != v1::PUSH_INCLUDED)
    Check(absl::InternalError(absl::StrCat("a frame was not merged: outcome ", static_cast<int>(ack.outcome()), " ",
                                           std::string(ack.message()))));
  absl::MutexLock lock(&mu_);
  ++acks_;
}

void LinkCounter::OnAnswer(uint32_t, client::PullAnswer answer) {
  Check(answer.status);
  absl::MutexLock lock(&mu_);
  answers_.push_back(std::move(answer));
}

void LinkCounter::OnLost(uint32_t, const absl::Status& status) { Check(status); }

void LinkCounter::WaitAcks(size_t count) {
  absl::MutexLock lock(&mu_);
  const auto done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return acks_ >= count; };
  mu_.Await(absl::Condition(&done));
  acks_ -= count;
}

std::vector<client::PullAnswer> LinkCounter::WaitAnswers(size_t count) {
  absl::MutexLock lock(&mu_);
  const auto done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return answers_.size() >= count; };
  mu_.Await(absl::Condition(&done));
  return std::exchange(answers_, {});
}

ShardJob::ShardJob(const ShardJobSpec& spec)
    : backend_(Take(kernels::MakeBackend("cpu"))), gradient_(BenchGradient(spec.total_bytes / sizeof(float))) {
  v1::JobSpec job = BenchJob(spec.name, spec.codec, spec.bucket_bytes, spec.total_bytes);
  job.set_min_workers(2);
  job_ = std::make_unique<Job>(Take(Job::Make(job)));
  layout_ = std::make_unique<Layout>(Take(Layout::Make(*job_, 1)));
  std::vector<const Codec*> of_tensor(job_->tensors().size());
  for (uint32_t b = 0; b < layout_->bucket_count(); ++b) {
    CodecContext context;
    context.job = job_.get();
    context.layout = &LayoutOf(b);
    context.backend = backend_.get();
    codecs_.push_back(Take(MakeCodec(context)));
    encoders_.push_back(codecs_[b]->NewEncoder());
    plans_.push_back(codecs_[b]->InitialPlan());
    for (const BucketPart& part : layout_->parts(b)) of_tensor[part.tensor] = codecs_[b].get();
  }
  frames_.resize(codecs_.size());
  store_ =
      std::make_unique<client::GradientStore>(job_.get(), std::move(of_tensor), client::MakeHostMemory(backend_.get()));
  Join(spec, &pusher_, "pusher", kPusher);
  Join(spec, &holder_, "holder", kHolder);
  Initialize();
}

ShardJob::~ShardJob() {
  Check(pusher_.link->Close(true));
  Check(holder_.link->Close(true));
}

void ShardJob::Join(const ShardJobSpec& spec, Worker* worker, const std::string& name, uint64_t incarnation) {
  v1::JoinRequest request;
  request.mutable_identity()->set_job(spec.name);
  request.mutable_identity()->set_worker(name);
  request.mutable_identity()->set_incarnation(incarnation);
  *request.mutable_spec() = job_->spec();
  request.set_shard_count(1);
  request.set_layout_digest(layout_->digest());
  client::LinkOptions options;
  options.address = spec.address;
  options.identity = request.identity();
  options.connect_timeout_ms = kTimeoutMs;
  options.rpc_timeout_ms = kTimeoutMs;
  worker->link = std::make_unique<client::ShardLink>(std::move(options));
  Check(worker->link->Join(request).status());
  Check(worker->link->Start(kLeaseMs, &worker->counter));
}

void ShardJob::Initialize() {
  const std::vector<float> zeros(LayoutOf(0).elements);
  for (uint32_t b = 0; b < layout_->bucket_count(); ++b)
    Check(pusher_.link->SendFrame({.chunks = EncodeInitialize(LayoutOf(b), kPusher, zeros.data())}));
  pusher_.counter.WaitAcks(codecs_.size());
}

void ShardJob::Encode() {
  const float* gradient = gradient_.data();
  for (uint32_t t = 0; t < job_->tensors().size(); ++t) {
    // The gradients of round 0 are pushed again in round 1.
    if (round_ != 1) Check(store_->Ingest(t, gradient, round_));
    if (round_ > 0) store_->Select(t, round_);
    gradient += job_->tensors()[t].elements;
  }
  frame_bytes_ = 0;
  for (uint32_t b = 0; b < codecs_.size(); ++b) {
    FrameIdentity id;
    id.bucket = b;
    id.round = round_;
    id.incarnation = kPusher;
    id.learning_rates = std::span<const float>(&kRate, 1);
    frames_[b] = Take(encoders_[b]->Encode(id, plans_[b], store_->InputsOf(LayoutOf(b))));
    frame_bytes_ += frames_[b].bytes;
  }
}

void ShardJob::Push() {
  for (const EncodedFrame& frame : frames_) Check(pusher_.link->SendFrame({.chunks = frame.chunks}));
  pusher_.counter.WaitAcks(frames_.size());
}

void ShardJob::Close() {
  for (uint32_t b = 0; b < codecs_.size(); ++b) {
    wire::FrameHeader header;
    header.kind = wire::FrameKind::kPush;
    header.flags = wire::kAbstain;
    header.bucket = b;
    header.round = round_;
    header.shape_digest = LayoutOf(b).shape_digest;
    header.incarnation = kHolder;
    header.plan_digest = plans_[b].Digest();
    Check(holder_.link->SendFrame({.chunks = wire::FrameWriter(header).Finish()}));
  }
  holder_.counter.WaitAcks(codecs_.size());
}

void ShardJob::PullUpdate() {
  const uint32_t buckets = static_cast<uint32_t>(codecs_.size());
  Check(pusher_.link->RequestPull(v1::PULL_UPDATE, round_ + 1, 0, buckets));
  updates_ = pusher_.counter.WaitAnswers(buckets);
  update_bytes_ = 0;
  for (const client::PullAnswer& answer : updates_) update_bytes_ += BytesOf(answer);
}

void ShardJob::PullParameters() {
  const uint32_t buckets = static_cast<uint32_t>(codecs_.size());
  Check(pusher_.link->RequestPull(v1::PULL_PARAMS_F32, round_ + 1, 0, buckets));
  parameter_bytes_ = 0;
  for (const client::PullAnswer& answer : pusher_.counter.WaitAnswers(buckets)) parameter_bytes_ += BytesOf(answer);
}

void ShardJob::FinishRound() {
  for (const client::PullAnswer& answer : updates_) {
    const uint32_t b = answer.bucket;
    Update update = Take(DecodeUpdate(answer.chunks, *job_, LayoutOf(b), plans_[b]));
    if (round_ > 0) {
      store_->Encoded(LayoutOf(b));
      Check(store_->Deferred(LayoutOf(b), *codecs_[b], frames_[b], update.deferred));
    }
    plans_[b] = std::move(update.next);
    frames_[b] = EncodedFrame();
  }
  updates_.clear();
  if (round_ > 0) store_->EndRound();
  ++round_;
}

}  // namespace gradwire::bench
