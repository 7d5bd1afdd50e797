// See buckets.h.
#include "tests/fuzz/buckets.h"

#include <cmath>
#include <utility>

#include "tests/fuzz/target.h"

namespace gradwire::fuzz {
namespace {

constexpr uint64_t kElements = 300;
constexpr int kRounds = 3;

Bucket MakeBucket(const char* codec, uint64_t elements, const char* update_codec = "") {
  testing::ClusterOptions options;
  options.codec = codec;
  options.update_codec = update_codec;
  options.workers = kWorkers;
  options.max_workers = kWorkers + 1;
  options.elements = elements;
  options.run_elements = 64;
  options.seed = 42;
  Bucket bucket;
  bucket.cluster = std::make_unique<testing::Cluster>(options);
  const testing::GradientFn gradient = testing::DyadicGradient(7, elements, 0.5, false);
  for (int i = 0; i < kRounds; ++i) {
    Round round;
    round.round = bucket.cluster->round();
    round.plan = bucket.cluster->plan();
    testing::RoundResult result = bucket.cluster->Round(gradient);
    round.frames = std::move(result.frames);
    round.update = std::move(result.update_frame.chunks);
    round.next = result.update.next;
    bucket.rounds.push_back(std::move(round));
  }
  return bucket;
}

std::vector<Bucket> MakeBuckets() {
  std::vector<Bucket> buckets;
  for (const char* codec :
       {"dense:fp32", "dense:bf16", "dense:fixed32", "dense:fixed16", "tagc:density=0.1,cells=8,form=sketch",
        "tagc:density=0.1,cells=16", "tagc:density=0.1,bits=2", "tagc:density=0.3,cells=32,form=sketch,slack=0.1",
        "onebit", "terngrad", "natural:bits=3", "topk:density=0.1,values=int4", "randomk:density=0.1,values=fp16",
        "dgc:density=0.1", "uniform:bits=3", "thc:bits=4", "zen:index=coo,run=16",
        "zen:index=bitmap,values=bf16,run=16", "adaptive"}) {
    buckets.push_back(MakeBucket(codec, kElements));
  }
  buckets.push_back(MakeBucket("tagc", 0));
  for (const char* update_codec : {"dense:bf16", "efsignsgd", "qsgd:bits=3", "topk:density=0.1,values=int4"}) {
    buckets.push_back(MakeBucket("tagc:density=0.1,cells=8", kElements, update_codec));
  }
  buckets.push_back(MakeBucket("powersgd:rank=2", kElements));
  buckets.push_back(MakeBucket("topk:density=0.1,values=int8", kElements, "union:values=int6"));
  return buckets;
}

template <typename T>
uint8_t CountInByte(const std::vector<T>& items) {
  Require(items.size() <= UINT8_MAX, "a byte names each of them");
  return static_cast<uint8_t>(items.size());
}

}  // namespace

const std::vector<Bucket>& Buckets() {
  static const std::vector<Bucket>* const buckets = new std::vector<Bucket>(MakeBuckets());
  return *buckets;
}

const Bucket& BucketOf(uint8_t bucket) { return Buckets()[bucket % Buckets().size()]; }

const Round& RoundOf(const Bucket& bucket, uint8_t round) { return bucket.rounds[round % bucket.rounds.size()]; }

uint8_t BucketCount() { return CountInByte(Buckets()); }

uint8_t RoundCount(const Bucket& bucket) { return CountInByte(bucket.rounds); }

FrameIdentity IdentityOf(const Bucket& bucket, uint64_t round, uint64_t incarnation) {
  const BucketLayout& layout = bucket.cluster->layout();
  return {static_cast<uint16_t>(layout.shard), layout.bucket, round, incarnation, {&kLearningRate, 1}};
}

namespace {

absl::StatusOr<EncodedFrame> Encode(const Bucket& bucket, uint64_t round, const RoundPlan& plan,
                                    std::vector<float> pending) {
  const BucketLayout& layout = bucket.cluster->layout();
  std::vector<float> velocity(pending.size());
  std::vector<RunInput> runs;
  for (size_t i = 0; i < layout.runs.size(); ++i) {
    float* at = pending.data() + layout.run_begin[i];
    runs.push_back({at, at, {}});
    runs.back().velocity = velocity.data() + layout.run_begin[i];
  }
  return bucket.cluster->codec().NewEncoder()->Encode(IdentityOf(bucket, round, 1), plan, runs);
}

}  // namespace

absl::StatusOr<EncodedFrame> EncodeBy(const Bucket& bucket, uint64_t round, const RoundPlan& plan) {
  std::vector<float> pending(bucket.cluster->layout().elements);
  for (size_t i = 0; i < pending.size(); ++i) {
    pending[i] = std::ldexp(i % 2 == 0 ? 1.0f : -1.5f, static_cast<int>(i % 80) - 64);
  }
  return Encode(bucket, round, plan, std::move(pending));
}

absl::StatusOr<EncodedFrame> EncodeValue(const Bucket& bucket, const Round& round, float value) {
  return Encode(bucket, round.round, round.plan, std::vector<float>(bucket.cluster->layout().elements, value));
}

}  // namespace gradwire::fuzz
