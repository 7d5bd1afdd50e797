// What a shard is told by another one of its squares, and what an update frame says of norms.
#include <google/protobuf/stubs/logging.h>

#include <algorithm>

#include "common/codec/update/update.h"
#include "common/job/norms.h"
#include "common/optimizer/norm_sums.h"
#include "tests/fuzz/chunk_input.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

constexpr uint32_t kNormShards = 3;
constexpr size_t kNorms = 3;

class Fixture {
 public:
  Fixture() : job(MakeJob()), layout(*Layout::Make(job, kNormShards)), sums(&layout, job.tensors().size()) {}

  const Job job;
  const Layout layout;
  const NormSums sums;

 private:
  // Several tensors, one of them over all shards, one smaller than a run, one empty.
  static Job MakeJob() {
    v1::JobSpec spec;
    spec.set_name("norms");
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_LANS);
    spec.set_clip_norm(1);
    spec.set_run_elements(64);
    spec.set_bucket_bytes(1024);
    for (const uint64_t elements : {900, 0, 10, 64}) {
      v1::TensorSpec* tensor = spec.add_tensors();
      tensor->set_name("t" + std::to_string(elements));
      tensor->add_shape(elements);
    }
    return *Job::Make(spec);
  }
};

const Fixture& Shared() {
  static const Fixture* const fixture = new Fixture();
  return *fixture;
}

ShardSquares SquaresOf(uint32_t shard, bool totals) {
  ShardSquares squares;
  for (size_t i = 0; i < kNorms * Shared().sums.runs(shard); ++i) squares.runs.push_back(static_cast<double>(i));
  for (uint32_t b = 0; totals && b < Shared().layout.bucket_count(shard); ++b) {
    for (const uint32_t tensor : TensorsOf(Shared().layout.at(b, shard))) squares.totals[tensor].assign(kNorms, 2.0);
  }
  return squares;
}

void CheckSums(uint32_t shard, Input bytes) {
  v1::NormSums message;
  {
    const google::protobuf::LogSilencer silent;
    if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  }
  const NormSums& sums = Shared().sums;
  const absl::StatusOr<ShardSquares> squares = sums.Decode(shard, message, kNorms);
  if (!squares.ok()) return;
  std::vector<ShardSquares> all;
  for (uint32_t s = 0; s < kNormShards; ++s) all.push_back(s == shard ? *squares : SquaresOf(s, false));
  Require(sums.Add(all, kNorms).size() == kNorms * Shared().job.tensors().size(), "what is accepted is added up");
  const v1::NormSums again = sums.Encode(shard, *squares, kNorms);
  Require(std::equal(again.totalled().begin(), again.totalled().end(), message.totalled().begin(),
                     message.totalled().end()) &&
              again.runs_size() == message.runs_size() && again.totals_size() == message.totals_size() &&
              sums.Decode(shard, again, kNorms).ok(),
          "encode(decode(x)) is x");
}

void CheckFrame(Input bytes) {
  const BucketLayout& layout = Shared().layout.at(0, 0);
  Update update;
  const Bytes chunk = Bytes::Copy(bytes);
  if (!DecodeNorms({&chunk, 1}, Shared().job, layout, &update).ok()) return;
  Require(update.norms.size() <= NormsOf(Shared().job).size() * TensorsOf(layout).size(),
          "norms of the slice's tensors");
}

}  // namespace

// u8 which: a shard, or above those an update frame; its bytes.
void RunNorms(Input input) {
  Reader reader(input);
  const uint8_t which = reader.Take<uint8_t>() % (kNormShards + 1);
  if (which < kNormShards) return CheckSums(which, reader.rest());
  CheckFrame(reader.rest());
}

Seeds NormSeeds() {
  Seeds seeds;
  for (uint32_t shard = 0; shard < kNormShards; ++shard) {
    for (const bool totals : {false, true}) {
      const std::string bytes = Shared().sums.Encode(shard, SquaresOf(shard, totals), kNorms).SerializeAsString();
      seeds.push_back({static_cast<uint8_t>(shard)});
      seeds.back().insert(seeds.back().end(), bytes.begin(), bytes.end());
    }
  }
  const BucketLayout& layout = Shared().layout.at(0, 0);
  wire::FrameHeader header;
  header.kind = wire::FrameKind::kUpdate;
  header.round = 1;
  header.shape_digest = layout.shape_digest;
  std::vector<Bytes> chunks = wire::FrameWriter(header).Finish();
  Update update;
  update.norms.assign(NormsOf(Shared().job).size() * TensorsOf(layout).size(), 3.0);
  update.mean_square = 4;
  AppendNorms(Shared().job, update, &chunks);
  seeds.push_back({kNormShards});
  seeds.back().insert(seeds.back().end(), chunks.back().data(), chunks.back().data() + chunks.back().size());
  return seeds;
}

}  // namespace gradwire::fuzz
