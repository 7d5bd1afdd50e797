// See sharded_round.h.
#include "tests/conformance/codec/sharded_round.h"

#include <algorithm>
#include <numeric>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/codec/frame/frame_assembler.h"
#include "common/codec/update/update.h"
#include "tests/lib/must.h"

namespace gradwire::testing {
namespace {

using testing_support::Must;

constexpr float kShardedRate = 0.25f;
constexpr uint64_t kRound = 1;

v1::JobSpec SpecOf(const ShardedOptions& options) {
  v1::JobSpec spec;
  spec.set_name("sharded");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.set_codec(options.codec);
  spec.set_max_workers(options.workers);
  spec.set_bucket_bytes(1u << 30);
  spec.set_run_elements(options.run_elements);
  spec.set_seed(options.seed);
  auto* tensor = spec.add_tensors();
  tensor->set_name("embedding.weight");
  tensor->add_shape(options.elements);
  return spec;
}

// One shard: its sums, which frames of all workers reach chunk by chunk.
struct Shard {
  absl::Mutex mu;
  std::unique_ptr<Accumulator> accumulator;
};

}  // namespace

ShardedRound::ShardedRound(const ShardedOptions& options)
    : options_(options),
      job_(std::make_unique<Job>(Must(Job::Make(SpecOf(options))))),
      layout_(std::make_unique<Layout>(Must(Layout::Make(*job_, options.shards)))),
      backend_(Must(kernels::MakeBackend("cpu"))) {
  for (uint32_t s = 0; s < options.shards; ++s) {
    codecs_.push_back(Must(MakeCodec({job_.get(), &layout_->at(0, s), backend_.get()})));
  }
}

ShardedResult ShardedRound::Exchange(const std::vector<std::vector<float>>& gradients) {
  const RoundPlan plan = codecs_[0]->InitialPlan();
  std::vector<Shard> shards(options_.shards);
  for (uint32_t s = 0; s < options_.shards; ++s) {
    shards[s].accumulator = codecs_[s]->NewAccumulator();
    shards[s].accumulator->Open(kRound, plan);
  }
  const auto identity = [](uint32_t shard, uint64_t incarnation) {
    return FrameIdentity{static_cast<uint16_t>(shard), 0, kRound, incarnation, {&kShardedRate, 1}, incarnation};
  };
  ShardedResult result;
  result.push_bytes.assign(gradients.size(), std::vector<uint64_t>(options_.shards));
  const auto push = [&](uint32_t worker) {
    std::vector<float> pending = gradients[worker];
    for (uint32_t i = 0; i < options_.shards; ++i) {
      const uint32_t s = (worker + i) % options_.shards;
      const BucketLayout& layout = layout_->at(0, s);
      std::vector<RunInput> runs;
      for (const Run& run : layout.runs) {
        float* const at = pending.data() + run.offset;
        runs.push_back({at, at, {}});
      }
      const EncodedFrame frame = Must(codecs_[s]->NewEncoder()->Encode(identity(s, worker + 1), plan, runs));
      result.push_bytes[worker][s] = frame.bytes;
      FrameAssembler assembler(codecs_[s].get(), &layout, shards[s].accumulator.get(), &plan, kRound,
                               uint64_t{1} << 32);
      for (const Bytes& bytes : frame.chunks) {
        const wire::Chunk chunk = Must(wire::ParseChunk(bytes));
        absl::MutexLock lock(&shards[s].mu);
        Must(assembler.Add(chunk, {&bytes, 1}));
      }
      if (!assembler.complete()) Must(absl::InternalError("the frame is not complete"));
      assembler.Commit();
    }
  };
  {
    std::vector<std::jthread> threads;
    for (uint32_t w = 0; w < gradients.size(); ++w) threads.emplace_back(push, w);
  }
  result.mean.assign(options_.elements, 0);
  for (uint32_t s = 0; s < options_.shards; ++s) {
    const BucketLayout& layout = layout_->at(0, s);
    const UpdateFrame update =
        Must(shards[s].accumulator->Finish(identity(s, 0), static_cast<uint32_t>(gradients.size())));
    result.update_bytes.push_back(TotalSize(update.chunks));
    result.update_elements.push_back(update.stats.elements);
    result.traffic.push_back(update.stats.traffic);
    const Update decoded = Must(DecodeUpdate(update.chunks, *job_, layout, plan));
    for (uint32_t r = 0; r < layout.runs.size(); ++r) {
      decoded.MeanOfRun(layout, r, result.mean.data() + layout.runs[r].offset);
    }
  }
  return result;
}

std::vector<uint64_t> ShardedRound::CountPerShard(const std::vector<bool>& there) const {
  std::vector<uint64_t> counts(options_.shards);
  for (uint32_t s = 0; s < options_.shards; ++s) {
    for (const Run& run : layout_->at(0, s).runs) {
      const auto begin = there.begin() + static_cast<ptrdiff_t>(run.offset);
      counts[s] += static_cast<uint64_t>(std::count(begin, begin + run.length, true));
    }
  }
  return counts;
}

double ImbalanceOf(const std::vector<uint64_t>& counts) {
  const uint64_t sum = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  return static_cast<double>(*std::max_element(counts.begin(), counts.end())) * static_cast<double>(counts.size()) /
         static_cast<double>(sum);
}

}  // namespace gradwire::testing
