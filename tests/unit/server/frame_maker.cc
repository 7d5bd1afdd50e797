// See frame_maker.h.
#include "tests/unit/server/frame_maker.h"

#include "common/base/status_macros.h"
#include "common/codec/frame/parameters.h"
#include "common/codec/select/select.h"

namespace gradwire::testing_support {

v1::JobSpec SmallSpec(const std::string& name, uint32_t min_workers, const std::string& codec, uint32_t lease_ms) {
  v1::JobSpec spec;
  spec.set_name(name);
  for (const char* tensor : {"first.weight", "second.weight"}) {
    v1::TensorSpec& t = *spec.add_tensors();
    t.set_name(tensor);
    t.add_shape(16);
    t.add_shape(64);
    t.set_role(v1::ROLE_MLP);
  }
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.mutable_optimizer()->add_groups();
  spec.set_push(v1::PUSH_GRADIENT);
  spec.set_codec(codec);
  spec.set_min_workers(min_workers);
  spec.set_max_workers(8);
  spec.set_lease_ms(lease_ms);
  spec.set_bucket_bytes(4096);
  spec.set_run_elements(256);
  return spec;
}

v1::WorkerIdentity IdentityOf(const std::string& job, const std::string& worker, uint64_t incarnation) {
  v1::WorkerIdentity identity;
  identity.set_job(job);
  identity.set_worker(worker);
  identity.set_incarnation(incarnation);
  return identity;
}

FrameMaker::FrameMaker(const v1::JobSpec& spec, uint32_t shard, uint32_t shards, uint64_t incarnation)
    : shard_(shard), incarnation_(incarnation), backend_(std::move(*kernels::MakeBackend("cpu"))) {
  job_ = std::make_unique<Job>(*Job::Make(spec));
  layout_ = std::make_unique<Layout>(*Layout::Make(*job_, shards));
  for (uint32_t b = 0; b < layout_->bucket_count(); ++b) {
    codecs_.push_back(std::move(*MakeCodec({job_.get(), &at(b), backend_.get()})));
    encoders_.push_back(codecs_.back()->NewEncoder());
    plans_.push_back(codecs_.back()->InitialPlan());
  }
}

std::vector<Bytes> FrameMaker::Initialize(uint32_t bucket, float value) const {
  const std::vector<float> values(at(bucket).elements, value);
  return EncodeInitialize(at(bucket), incarnation_, values.data());
}

std::vector<Bytes> FrameMaker::Push(uint32_t bucket, uint64_t round, float value, float learning_rate) {
  const BucketLayout& layout = at(bucket);
  std::vector<float> gradient(layout.elements, value);
  std::vector<float> pending = gradient;
  const Selection selection = SelectThreshold(*codecs_[bucket], round, pending, *backend_);
  std::vector<RunInput> runs;
  for (size_t r = 0; r < layout.runs.size(); ++r) {
    runs.push_back({gradient.data() + layout.run_begin[r], pending.data() + layout.run_begin[r], selection});
  }
  const std::vector<float> rates(job_->spec().optimizer().groups_size(), learning_rate);
  FrameIdentity id;
  id.shard = static_cast<uint16_t>(shard_);
  id.bucket = bucket;
  id.round = round;
  id.incarnation = incarnation_;
  id.learning_rates = rates;
  return encoders_[bucket]->Encode(id, plans_[bucket], runs)->chunks;
}

std::vector<Bytes> FrameMaker::Abstain(uint32_t bucket, uint64_t round, bool nonfinite) const {
  wire::FrameHeader header;
  header.flags = static_cast<uint16_t>(wire::kAbstain | (nonfinite ? wire::kNonFinite : 0));
  header.bucket = bucket;
  header.shard = static_cast<uint16_t>(shard_);
  header.round = round;
  header.shape_digest = at(bucket).shape_digest;
  header.incarnation = incarnation_;
  return wire::FrameWriter(header).Finish();
}

std::vector<Bytes> FrameMaker::Replace(uint32_t bucket, uint64_t round, float value) const {
  const std::vector<float> values(at(bucket).elements, value);
  return EncodeReplacement(at(bucket), round, incarnation_, values.data());
}

absl::StatusOr<Update> FrameMaker::Follow(uint32_t bucket, const std::vector<Bytes>& chunks) {
  GW_ASSIGN_OR_RETURN(Update update, DecodeUpdate(chunks, *job_, at(bucket), plans_[bucket]));
  plans_[bucket] = update.next;
  return update;
}

Bytes FlipBit(const Bytes& bytes, size_t bit) {
  std::vector<uint8_t> copy(bytes.data(), bytes.data() + bytes.size());
  copy[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
  return Bytes::FromVector(std::move(copy));
}

}  // namespace gradwire::testing_support
