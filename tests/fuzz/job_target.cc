// Job specs as they come over the network: a job that is made can be made again from its own spec, cut into shards,
// and given codecs.
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "common/codec/codec.h"
#include "common/codec/plan/plan_check.h"
#include "common/job/layout.h"
#include "kernels/backend.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

constexpr uint32_t kMaxShards = 8;
constexpr uint64_t kMaxElements = 1 << 16;
constexpr uint64_t kMaxPieces = 1 << 12;  // runs, buckets

kernels::Backend& Cpu() {
  static kernels::Backend* const backend = kernels::MakeBackend("cpu")->release();
  return *backend;
}

// A server refuses what does not fit its memory before it cuts anything; so does this target.
bool Small(const Job& job) {
  const uint64_t runs = job.elements() / job.spec().run_elements() + job.tensors().size();
  const uint64_t buckets = job.elements() * 4 / job.spec().bucket_bytes() + job.tensors().size();
  return job.elements() <= kMaxElements && runs <= kMaxPieces && buckets <= kMaxPieces;
}

void TryCodec(const Job& job, const BucketLayout& layout) {
  const absl::StatusOr<std::unique_ptr<Codec>> codec = MakeCodec({&job, &layout, &Cpu()});
  if (!codec.ok()) return;
  const RoundPlan plan = (*codec)->InitialPlan();
  Require(CheckPlan(job, layout, 0, plan).ok(), "a codec's first plan is a good one");
  const std::unique_ptr<Accumulator> accumulator = (*codec)->NewAccumulator();
  Require(accumulator->memory_bytes() <= (*codec)->accumulator_bytes(), "an accumulator keeps to what was announced");
  accumulator->Open(0, plan);
  const std::vector<float> rates(static_cast<size_t>(job.spec().optimizer().groups_size()), 0.5f);
  const FrameIdentity id{static_cast<uint16_t>(layout.shard), layout.bucket, 0, 0, rates};
  Require(accumulator->Finish(id, 1).ok(), "the first round can be closed");
}

}  // namespace

// u8 shards - 1, JobSpec.
void RunJob(Input input) {
  Reader reader(input);
  const uint32_t shards = reader.Take<uint8_t>() % kMaxShards + 1;
  const google::protobuf::LogSilencer silent;
  v1::JobSpec spec;
  if (!spec.ParseFromArray(reader.rest().data(), static_cast<int>(reader.rest().size()))) return;
  const absl::StatusOr<Job> job = Job::Make(spec);
  if (!job.ok()) return;
  const absl::StatusOr<Job> again = Job::Make(job->spec());
  Require(again.ok() && again->digest() == job->digest(), "a job's own spec makes the same job");
  Require(again->codecs() == job->codecs(), "a job's own spec makes the same codecs");
  if (!Small(*job)) return;
  const absl::StatusOr<Layout> layout = Layout::Make(*job, shards);
  Require(layout.ok(), "a job can be cut");
  Require(Layout::Make(*again, shards)->digest() == layout->digest(), "and is cut in one way");
  uint64_t elements = 0;
  for (uint32_t s = 0; s < shards; ++s) elements += layout->shard_elements(s);
  Require(elements == job->elements(), "every element lies on one shard");
  std::vector<bool> has(layout->slices().size());
  for (uint32_t s = 0; s < shards; ++s)
    for (uint32_t b = 0; b < layout->bucket_count(s); ++b) {
      const uint32_t slice = layout->slice_of(b, s);
      const BucketLayout& at = layout->at(b, s);
      Require(!has[slice] && at.bucket == b && at.shard == s, "every slice is one shard's");
      Require(layout->find(at.job_bucket, s) == &at, "and found by the job's bucket");
      has[slice] = true;
    }
  Require(std::count(has.begin(), has.end(), false) == 0, "all slices are the shards'");
  for (size_t i = 0; i < has.size() && i < 4; ++i) TryCodec(*job, layout->slices()[i]);
}

Seeds JobSeeds() {
  Seeds seeds;
  const auto add = [&seeds](const v1::JobSpec& spec) {
    const std::string bytes = spec.SerializeAsString();
    seeds.push_back({static_cast<uint8_t>(seeds.size())});
    seeds.back().insert(seeds.back().end(), bytes.begin(), bytes.end());
  };
  v1::JobSpec spec;
  spec.set_name("job");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  auto* tensor = spec.add_tensors();
  tensor->set_name("layer.weight");
  tensor->add_shape(40);
  tensor->add_shape(50);
  add(spec);
  tensor = spec.add_tensors();
  tensor->set_name("layer.bias");
  tensor->add_shape(40);
  spec.set_codec("tagc:density=0.05,cells=16");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
  spec.mutable_optimizer()->add_groups()->set_weight_decay(0.01f);
  auto* rule = spec.add_rules();
  rule->set_pattern("*.bias");
  rule->set_codec("dense:fixed16");
  rule->add_roles(v1::ROLE_BIAS);
  spec.set_max_workers(4);
  spec.set_run_elements(64);
  spec.set_bucket_bytes(1024);
  spec.set_seed(7);
  add(spec);
  spec.set_push(v1::PUSH_STEP);
  spec.mutable_step()->set_residual_decay(0.5f);
  add(Job::Make(spec)->spec());
  return seeds;
}

}  // namespace gradwire::fuzz
