// FrameAssembler over an accumulator of every codec: any sequence of chunks merges as a whole or leaves no trace, what
// a round with an accepted frame publishes can be decoded, and it is the exact sum of its frames, however large they
// are.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <variant>

#include "common/codec/frame/frame_assembler.h"
#include "common/codec/update/update.h"
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

// Merges the chunks of an input into an accumulator: true where they are a whole frame that is accepted.
bool Merge(const ChunkInput& input, FrameAssembler* assembler) {
  std::vector<uint8_t> scratch;
  for (const std::vector<uint8_t>& chunk : input.chunks) {
    const std::vector<Bytes> slices = Slices(chunk, input.slicing);
    const absl::StatusOr<wire::Chunk> parsed = wire::ParseReceived(slices, &scratch);
    if (!parsed.ok()) break;
    (void)assembler->Add(*parsed, slices);  // a refused chunk has taken its frame along; those behind it are refused
  }
  return assembler->complete() && !assembler->abstained();
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

// Where the update of several frames is the sum of what each of them stands for alone. A sketch that contradicts its
// own index stands for nothing; PowerSGD's shards make factors orthonormal.
bool SumsAreKnown(const Bucket& bucket) {
  const Job& job = bucket.cluster->job();
  return !job.two_phase() && !std::holds_alternative<TagcSpec>(job.codecs()[bucket.cluster->layout().codec]);
}

// What a round of `first` (or none) honest frames and `copies` of an accepted one sums up to.
std::vector<double> SumOf(const Bucket& bucket, const Round& round, const ChunkInput& input, uint32_t first,
                          uint32_t copies) {
  const testing::Cluster& cluster = *bucket.cluster;
  const std::unique_ptr<Accumulator> accumulator = cluster.codec().NewAccumulator();
  if (first != 0) {
    OpenWithFirst(round, accumulator.get());
  } else {
    accumulator->Open(round.round, round.plan);
  }
  for (uint32_t copy = 0; copy < copies; ++copy) {
    FrameAssembler assembler(&cluster.codec(), &cluster.layout(), accumulator.get(), &round.plan, round.round,
                             kFrameLimitBytes);
    Require(Merge(input, &assembler), "a frame that was accepted is accepted again");
    assembler.Commit();
  }
  const std::vector<Bytes> update = FinishOver(bucket, round, first + copies, accumulator.get());
  const absl::StatusOr<Update> mean = DecodeMean(update, cluster.job(), cluster.layout(), round.plan);
  Require(mean.ok(), "what a round ends with can be decoded");
  return testing::SumsOf(*mean, cluster.layout());
}

// As many frames as the job has workers: an honest one, all others copies of the input.
void CheckSum(const Bucket& bucket, const Round& round, const ChunkInput& input) {
  const uint32_t copies = bucket.cluster->job().spec().max_workers() - 1;
  const std::vector<double> honest = SumOf(bucket, round, input, 1, 0);
  const std::vector<double> alone = SumOf(bucket, round, input, 0, 1);
  const std::vector<double> all = SumOf(bucket, round, input, 1, copies);
  double largest = 0;
  for (size_t i = 0; i < all.size(); ++i) largest = std::max({largest, std::abs(honest[i]), std::abs(alone[i])});
  for (size_t i = 0; i < all.size(); ++i) {
    Require(std::abs(all[i] - (honest[i] + copies * alone[i])) <= 1e-4 * largest + 1e-12,
            "a sum is that of its frames");
  }
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
  if (Merge(input, &assembler) && input.slicing % 4 != 0) {
    assembler.Commit();
    const std::vector<Bytes> update = FinishOver(bucket, round, 2, open.accumulator.get());
    Require(DecodeMean(update, cluster.job(), cluster.layout(), round.plan).ok(),
            "what a round ends with can be decoded");
    if (SumsAreKnown(bucket)) CheckSum(bucket, round, input);
    return;
  }
  assembler.Abandon();
  Require(!assembler.spoiled(), "what was merged can be taken out");
  Require(testing::Joined(FinishOver(bucket, round, 1, open.accumulator.get())) == open.alone,
          "an abandoned frame leaves no trace");
}

// Frames of the largest values there are, and of the largest that a sum of two has room for.
void AddLargeSeeds(Seeds* seeds) {
  for (uint8_t b = 0; b < BucketCount(); ++b) {
    const Bucket& bucket = Buckets()[b];
    if (!SumsAreKnown(bucket)) continue;
    for (const float value : {std::nextafter(262'144.0f, 0.0f), 170'000.0f, std::numeric_limits<float>::max()}) {
      const absl::StatusOr<EncodedFrame> frame = EncodeValue(bucket, bucket.rounds[1], value);
      if (frame.ok()) seeds->push_back(MakeInput(b, 1, 1, frame->chunks));
    }
  }
}

Seeds AssemblerSeeds() {
  Seeds seeds;
  AddLargeSeeds(&seeds);
  for (uint8_t b = 0; b < BucketCount(); ++b) {
    for (uint8_t r = 0; r < RoundCount(Buckets()[b]); ++r) {
      for (uint8_t slicing : {0, 1}) {
        seeds.push_back(MakeInput(b, r, slicing, Buckets()[b].rounds[r].frames[1].chunks));
      }
    }
  }
  return seeds;
}

}  // namespace gradwire::fuzz
