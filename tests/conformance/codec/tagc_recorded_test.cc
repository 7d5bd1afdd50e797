// TAGC on what the quickstart's workers really send (recorded/record.py): hot rows of a tensor come and go, so what
// falls to one shard changes from a round to the next while the whole does not. Nothing of it may be late (that would
// make more of it fall to that shard in the next round), and sharding may change no bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/hash.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/codec.h"
#include "common/codec/frame/frame_assembler.h"
#include "common/codec/select/select.h"
#include "common/codec/update/update.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "kernels/backend.h"
#include "tests/lib/must.h"

namespace gradwire::testing {
namespace {

using testing_support::Must;

// DEFAULT_CODEC of gradwire.torch.
constexpr char kCodec[] = "tagc:density=0.01,bits=2,warmup_rounds=40,warmup_density=0.05";
constexpr uint32_t kWorkers = 2;
constexpr float kRate = 0.5f;

// What a file of recorded/ says.
struct Recording {
  std::vector<uint32_t> tensors;  // elements of each, in the order of positions
  // Per round and worker, ascending, through all tensors.
  std::map<uint64_t, std::vector<std::vector<uint32_t>>> rounds;
};

Recording Load(const std::string& name) {
  std::ifstream in(std::string(GRADWIRE_RECORDED_DIR) + "/" + name, std::ios::binary);
  const auto take = [&in] {
    uint32_t value = 0;
    in.read(reinterpret_cast<char*>(&value), sizeof(value));
    return value;
  };
  Recording recording;
  recording.tensors.resize(take());
  uint32_t elements = 0;
  for (uint32_t& n : recording.tensors) elements += n = take();
  for (uint32_t left = take(); left != 0 && in.good(); --left) {
    const uint32_t round = take();
    const uint32_t worker = take();
    std::vector<uint8_t> coded(take());
    in.read(reinterpret_cast<char*>(coded.data()), static_cast<std::streamsize>(coded.size()));
    auto& workers = recording.rounds[round];
    workers.resize(kWorkers);
    EXPECT_TRUE(DecodeIndex(IndexCoding::kRice, coded, 0, elements, &workers.at(worker)).ok());
  }
  EXPECT_TRUE(in.good()) << name;
  return recording;
}

// The quickstart's job, of the recorded tensors: its workers' residuals, and shards without servers.
class Replay {
 public:
  Replay(const Recording& recording, const std::string& form, uint32_t shards)
      : recording_(recording),
        shards_(shards),
        job_(MakeJob(recording, form)),
        layout_(Must(Layout::Make(*job_, shards))) {
    uint64_t elements = 0;
    for (uint32_t n : recording.tensors) elements += n;
    for (auto& pending : pending_) pending.resize(elements);
    mean_.resize(elements);
    for (uint32_t s = 0; s < shards; ++s) {
      codecs_.push_back(Must(MakeCodec({job_.get(), &layout_.at(0, s), backend_.get()})));
      plans_.push_back(codecs_[s]->InitialPlan());
    }
  }

  // The mean of every element in one round. A round that does not follow the last one calibrates first.
  const std::vector<float>& Round(uint64_t round) {
    AddGradients(round);
    if (round != next_round_) {
      for (uint32_t s = 0; s < shards_; ++s) plans_[s] = codecs_[s]->InitialPlan();
      Exchange(round - 1);
    }
    Exchange(round);
    next_round_ = round + 1;
    return mean_;
  }
  uint64_t deferred() const { return deferred_; }
  uint64_t elements() const { return elements_; }
  uint64_t push_bytes() const { return push_bytes_; }
  double largest_share() const { return largest_share_; }

 private:
  static std::unique_ptr<Job> MakeJob(const Recording& recording, const std::string& form) {
    v1::JobSpec spec;
    spec.set_name("gpt");
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
    spec.set_codec(absl::StrCat(kCodec, ",form=", form));
    spec.set_max_workers(kWorkers);
    spec.set_seed(1);
    for (size_t t = recording.tensors.size(); t-- > 0;) {  // buckets begin with the last one
      auto* tensor = spec.add_tensors();
      tensor->set_name("tensor" + std::to_string(t));
      tensor->add_shape(recording.tensors[t]);
    }
    return std::make_unique<Job>(Must(Job::Make(spec)));
  }

  // What was recorded is where, not what: any value will do that fits the range of the round before.
  static float ValueOf(uint64_t round, uint32_t worker, uint32_t position) {
    const uint64_t hash = HashCombine(HashCombine(round, worker), position);
    const float magnitude = 0.5f + static_cast<float>(hash % 17) / 64;
    return (hash >> 32 & 1) != 0 ? magnitude : -magnitude;
  }

  // Where tensor t of the job begins in pending_.
  uint64_t Begin(uint32_t tensor) const {
    uint64_t begin = 0;
    for (size_t t = 0; t + 1 + tensor < recording_.tensors.size(); ++t) begin += recording_.tensors[t];
    return begin;
  }

  void AddGradients(uint64_t round) {
    for (uint32_t w = 0; w < kWorkers; ++w) {
      for (uint32_t p : recording_.rounds.at(round)[w]) pending_[w][p] += ValueOf(round, w, p);
    }
  }

  std::vector<EncodedFrame> Encode(uint64_t round, uint32_t worker, const FrameIdentity& id) {
    std::vector<Selection> selections;
    for (uint32_t t = 0; t < job_->tensors().size(); ++t) {
      const std::span<const float> tensor(pending_[worker].data() + Begin(t), job_->tensors()[t].elements);
      selections.push_back(SelectThreshold(*codecs_[0], round, tensor, *backend_));
    }
    std::vector<EncodedFrame> frames;
    for (uint32_t s = 0; s < shards_; ++s) {
      FrameIdentity at = id;
      at.shard = static_cast<uint16_t>(s);
      std::vector<RunInput> runs;
      for (float* run : Runs(worker, s)) {
        runs.push_back({run, run, selections[layout_.at(0, s).runs[runs.size()].tensor]});
      }
      frames.push_back(Must(codecs_[s]->NewEncoder()->Encode(at, plans_[s], runs)));
      push_bytes_ += frames.back().bytes;
    }
    return frames;
  }

  std::vector<float*> Runs(uint32_t worker, uint32_t shard) {
    std::vector<float*> runs;
    for (const Run& run : layout_.at(0, shard).runs) {
      runs.push_back(pending_[worker].data() + Begin(run.tensor) + run.offset);
    }
    return runs;
  }

  void Exchange(uint64_t round) {
    std::vector<std::vector<EncodedFrame>> frames;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      frames.push_back(Encode(round, w, {0, 0, round, w + 1, {&kRate, 1}, w + 1}));
    }
    std::fill(mean_.begin(), mean_.end(), 0.0f);
    uint64_t all = 0, most = 0;
    for (uint32_t s = 0; s < shards_; ++s) {
      const BucketLayout& layout = layout_.at(0, s);
      const std::unique_ptr<Accumulator> accumulator = codecs_[s]->NewAccumulator();
      accumulator->Open(round, plans_[s]);
      for (uint32_t w = 0; w < kWorkers; ++w) {
        FrameAssembler assembler(codecs_[s].get(), &layout, accumulator.get(), &plans_[s], round, uint64_t{1} << 32);
        for (const Bytes& bytes : frames[w][s].chunks) {
          const absl::Status status = assembler.Add(Must(wire::ParseChunk(bytes)), {&bytes, 1});
          ASSERT_TRUE(status.ok()) << status;
        }
        ASSERT_TRUE(assembler.complete());
        assembler.Commit();
      }
      const UpdateFrame update =
          Must(accumulator->Finish({static_cast<uint16_t>(s), 0, round, 0, {&kRate, 1}, 0}, kWorkers));
      const Update decoded = Must(DecodeUpdate(update.chunks, *job_, layout, plans_[s]));
      for (uint32_t r = 0; r < layout.runs.size(); ++r) {
        const Run& run = layout.runs[r];
        if (decoded.body != Update::Body::kEmpty) {
          decoded.MeanOfRun(layout, r, mean_.data() + Begin(run.tensor) + run.offset);
        }
      }
      for (uint32_t w = 0; w < kWorkers; ++w) {
        ASSERT_TRUE(codecs_[s]->Return(frames[w][s], &decoded.deferred, Runs(w, s)).ok());
      }
      elements_ += update.stats.elements + update.stats.deferred;
      deferred_ += update.stats.deferred;
      all += update.stats.elements + update.stats.deferred;
      most = std::max(most, update.stats.elements + update.stats.deferred);
      plans_[s] = update.next;
    }
    if (all != 0) {
      largest_share_ = std::max(largest_share_, static_cast<double>(most * shards_) / static_cast<double>(all));
    }
  }

  const Recording& recording_;
  const uint32_t shards_;
  const std::unique_ptr<kernels::Backend> backend_ = *kernels::MakeBackend("cpu");
  const std::unique_ptr<Job> job_;
  const Layout layout_;
  std::vector<std::unique_ptr<Codec>> codecs_;  // [shard]
  std::vector<RoundPlan> plans_;                // [shard]
  std::vector<float> pending_[kWorkers];
  std::vector<float> mean_;
  uint64_t next_round_ = 0;
  uint64_t deferred_ = 0;
  uint64_t elements_ = 0;
  uint64_t push_bytes_ = 0;
  double largest_share_ = 0;
};

// The parameters: a file of recorded/, without ".bin", and a form.
class TagcRecorded : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  const Recording recording_ = Load(absl::StrCat(std::get<0>(GetParam()), ".bin"));
  const std::string form_ = std::get<1>(GetParam());
};

TEST_P(TagcRecorded, DefersNoMoreThanTheSketchPromises) {
  for (uint32_t shards : {1u, 2u, 4u}) {
    Replay replay(recording_, form_, shards);
    for (const auto& [round, positions] : recording_.rounds) replay.Round(round);
    std::printf("%d shards: %d of %d deferred, %d bytes pushed, up to %.2f of its share on one shard\n", shards,
                static_cast<int>(replay.deferred()), static_cast<int>(replay.elements()),
                static_cast<int>(replay.push_bytes()), replay.largest_share());
    EXPECT_GT(replay.elements(), 100'000u);
    EXPECT_LE(static_cast<double>(replay.deferred()), 1e-4 * static_cast<double>(replay.elements())) << shards;
    if (form_ != "sketch") {
      EXPECT_EQ(replay.deferred(), 0u);
    }
  }
}

TEST_P(TagcRecorded, GivesTheSameBitsOnAnyNumberOfShards) {
  Replay one(recording_, form_, 1), two(recording_, form_, 2), four(recording_, form_, 4);
  for (const auto& [round, positions] : recording_.rounds) {
    const std::vector<float>& mean = one.Round(round);
    ASSERT_EQ(std::memcmp(mean.data(), two.Round(round).data(), mean.size() * sizeof(float)), 0) << "round " << round;
    ASSERT_EQ(std::memcmp(mean.data(), four.Round(round).data(), mean.size() * sizeof(float)), 0) << "round " << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Pushed, TagcRecorded,
                         ::testing::Combine(::testing::Values("steps", "gradients"),
                                            ::testing::Values("auto", "sketch")),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param), "_", std::get<1>(info.param));
                         });

}  // namespace
}  // namespace gradwire::testing
