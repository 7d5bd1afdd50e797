// DecodeUpdate: what it accepts can be applied, its deferred positions returned, and its plan encoded by.
#include <cmath>

#include "common/codec/update/update.h"
#include "tests/fuzz/buckets.h"
#include "tests/fuzz/chunk_input.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

void Apply(const Update& update, const BucketLayout& layout) {
  for (uint32_t run = 0; run < layout.runs.size(); ++run) {
    std::vector<float> means(layout.runs[run].length);
    update.MeanOfRun(layout, run, means.data());
  }
  if (update.body != Update::Body::kDenseFloat && update.body != Update::Body::kDenseInt) return;
  std::vector<int32_t> all(layout.elements);
  update.CopyDense(0, all.size(), all.data());
}

void ReturnDeferred(const Update& update, const Bucket& bucket, const Round& round) {
  const BucketLayout& layout = bucket.cluster->layout();
  std::vector<float> residual(layout.elements);
  std::vector<float*> runs;
  for (size_t i = 0; i < layout.runs.size(); ++i) runs.push_back(residual.data() + layout.run_begin[i]);
  Require(bucket.cluster->codec().Return(round.frames[0], &update.deferred, runs).ok(), "deferred elements come back");
}

}  // namespace

void RunUpdate(Input bytes) {
  const ChunkInput input = ParseInput(bytes);
  const Bucket& bucket = BucketOf(input.bucket);
  const Round& round = RoundOf(bucket, input.round);
  const testing::Cluster& cluster = *bucket.cluster;
  std::vector<Bytes> chunks;
  for (const std::vector<uint8_t>& chunk : input.chunks) chunks.push_back(Slices(chunk, 0)[0]);
  const absl::StatusOr<Update> update = DecodeUpdate(chunks, cluster.job(), cluster.layout(), round.plan);
  if (!update.ok()) return;
  for (float rate : update->learning_rates) Require(std::isfinite(rate), "learning rates are finite");
  Apply(*update, cluster.layout());
  ReturnDeferred(*update, bucket, round);
  (void)EncodeBy(bucket, update->round + 1, update->next);  // may be refused: a plan without exponents
}

Seeds UpdateSeeds() {
  Seeds seeds;
  for (uint8_t b = 0; b < BucketCount(); ++b) {
    for (uint8_t r = 0; r < RoundCount(Buckets()[b]); ++r) {
      seeds.push_back(MakeInput(b, r, 0, Buckets()[b].rounds[r].update));
    }
  }
  return seeds;
}

}  // namespace gradwire::fuzz
