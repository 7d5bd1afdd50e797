// FrameAssembler over an accumulator of every codec: any sequence of chunks merges as a whole or leaves no trace, and
// what a round with an accepted frame publishes can be decoded.
#include <map>

#include "common/codec/frame_assembler.h"
#include "common/codec/update.h"
#include "tests/fuzz/buckets.h"
#include "tests/fuzz/chunk_input.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

constexpr uint64_t kFrameLimitBytes = 1 << 16;

// An accumulator of one round that already holds the frame of worker 0; opened again for every input, as a server does.
struct Open {
  std::unique_ptr<Accumulator> accumulator;
  std::vector<uint8_t> alone;  // the update frame of worker 0 alone
};

void OpenWithFirst(const Round& round, Accumulator* accumulator) {
  accumulator->Open(round.round, round.plan);
  const testing::ParsedFrame first = testing::ParseAll(round.frames[0]);
  for (const wire::Segment& s : first.segments) {
    if (s.type == wire::SegmentType::kLearningRates) continue;
    Require(accumulator->Add(s).ok(), "an honest frame is merged");
  }
}

std::vector<Bytes> FinishOver(const Bucket& bucket, const Round& round, uint32_t contributors,
                              Accumulator* accumulator) {
  absl::StatusOr<UpdateFrame> update = accumulator->Finish(IdentityOf(bucket, round.round, 0), contributors);
  Require(update.ok(), "a round of accepted frames is closed");
  return std::move(update->chunks);
}

Open& OpenOf(const Bucket& bucket, const Round& round) {
  static auto* const opens = new std::map<const Round*, Open>;
  Open& open = (*opens)[&round];
  if (open.accumulator == nullptr) {
    open.accumulator = bucket.cluster->codec().NewAccumulator();
    OpenWithFirst(round, open.accumulator.get());
    open.alone = testing::Joined(FinishOver(bucket, round, 1, open.accumulator.get()));
  }
  return open;
}

}  // namespace

void RunAssembler(Input bytes) {
  const ChunkInput input = ParseInput(bytes);
  const Bucket& bucket = BucketOf(input.bucket);
  const Round& round = RoundOf(bucket, input.round);
  const testing::Cluster& cluster = *bucket.cluster;
  Open& open = OpenOf(bucket, round);
  OpenWithFirst(round, open.accumulator.get());
  FrameAssembler assembler(&cluster.codec(), &cluster.layout(), open.accumulator.get(), &round.plan, round.round,
                           kFrameLimitBytes);
  std::vector<uint8_t> scratch;
  for (const std::vector<uint8_t>& chunk : input.chunks) {
    const std::vector<Bytes> slices = Slices(chunk, input.slicing);
    const absl::StatusOr<wire::Chunk> parsed = wire::ParseReceived(slices, &scratch);
    if (!parsed.ok()) break;
    (void)assembler.Add(*parsed, slices);  // a refused chunk has taken its frame along; those behind it are refused
  }
  const bool keep = assembler.complete() && !assembler.abstained() && input.slicing % 4 != 0;
  if (keep) {
    assembler.Commit();
    const std::vector<Bytes> update = FinishOver(bucket, round, 2, open.accumulator.get());
    Require(DecodeMean(update, cluster.job(), cluster.layout(), round.plan).ok(),
            "what a round ends with can be decoded");
    return;
  }
  assembler.Abandon();
  Require(!assembler.spoiled(), "what was merged can be taken out");
  Require(testing::Joined(FinishOver(bucket, round, 1, open.accumulator.get())) == open.alone,
          "an abandoned frame leaves no trace");
}

Seeds AssemblerSeeds() {
  Seeds seeds;
  for (uint8_t b = 0; b < Buckets().size(); ++b) {
    for (uint8_t r = 0; r < Buckets()[b].rounds.size(); ++r) {
      for (uint8_t slicing : {0, 1}) {
        seeds.push_back(MakeInput(b, r, slicing, Buckets()[b].rounds[r].frames[1].chunks));
      }
    }
  }
  return seeds;
}

}  // namespace gradwire::fuzz
