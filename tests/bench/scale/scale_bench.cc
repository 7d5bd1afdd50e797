// bench_scale: what one worker pushes and pulls per round, against the number of workers; and how fast the shard adds
// its frame. One bucket, one shard, no network. Gradients: rows of 64 elements share a scale that all workers see (log
// normal), within them every worker has its own heavy-tailed numbers, so supports overlap as those of real gradients
// do in part. Residuals are kept; figures are those of the last round.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/codec.h"
#include "common/codec/select/select.h"
#include "common/codec/update/update.h"
#include "common/codec/update/update_compressor.h"
#include "common/transport/malloc_tuning.h"
#include "tests/bench/lib/flags.h"
#include "tests/bench/lib/plot.h"
#include "tests/bench/lib/report.h"
#include "tests/lib/must.h"

namespace gradwire::bench {
namespace {

using testing_support::Must;

constexpr float kLearningRate = 0.1f;
constexpr uint64_t kColumns = 1024;
constexpr uint64_t kRow = 64;              // elements that share a scale
constexpr double kPushTarget = 1.05;       // of what a worker alone pushes
constexpr double kPullTarget = 1.0 / 3.0;  // of the same union in float32

// How gradients travel, and updates.
struct Case {
  std::string codec;
  std::string update_codec = {};
  bool drawn = false;  // without --only: all of them cannot be told apart
  std::string name() const { return update_codec.empty() ? codec : absl::StrCat(codec, " / ", update_codec); }
  // A sketch is made for the union of all workers.
  bool grows() const { return codec.find("form=sketch") != std::string::npos; }
  bool reduced() const { return !update_codec.empty() || codec.starts_with("tagc"); }
};
const std::vector<Case> kCases = {{"tagc:density=0.01", "", true},
                                  {"tagc:density=0.01,bits=4"},
                                  {"tagc:density=0.01,bits=2", "", true},
                                  {"tagc:density=0.01", "union:values=int4"},
                                  {"tagc:density=0.01,form=sketch", "", true},
                                  {"tagc:density=0.01,bits=2,form=sketch"},
                                  {"topk:density=0.01,values=int8", "", true},
                                  {"topk:density=0.01,values=int8", "union:values=int6", true},
                                  {"topk:density=0.01,values=int8", "union:values=int4"},
                                  {"threshold:value=0.5,values=int8"},
                                  {"threshold:value=0.5,values=int8", "union:values=int4"},
                                  {"randomk:density=0.01,values=int8"},
                                  {"randomk:density=0.01,values=int8", "union:values=int4"},
                                  {"dgc:density=0.01,values=int8"},
                                  {"dgc:density=0.01,values=int8", "union:values=int4"},
                                  {"thc:bits=4", "", true}};

double UnionBytes(const Update& update, uint64_t elements) {
  constexpr uint64_t kBlock = 1u << 16;
  const std::vector<uint32_t>& all = update.positions;
  double bytes = 4.0 * static_cast<double>(all.size());
  for (uint64_t begin = 0; begin < elements && !all.empty(); begin += kBlock) {
    const uint64_t end = std::min(begin + kBlock, elements);
    const auto first = std::lower_bound(all.begin(), all.end(), begin);
    const auto last = std::lower_bound(first, all.end(), end);
    bytes += static_cast<double>(
        EncodeIndex({first, last}, static_cast<uint32_t>(begin), static_cast<uint32_t>(end - begin)).payload.size());
  }
  return bytes;
}

struct Measured {
  double push_bytes = 0;  // of one worker
  double pull_bytes = 0;
  double float_bytes = 0;  // of the same union with values of float32; 0 for dense updates
  double add_seconds = 0;  // of one worker's frame at the shard
  double sent = 0;         // elements of one worker; 0 where the codec is not sparse
};

// One bucket of a job on one shard, and its workers.
class Bench {
 public:
  Bench(const Case& spec, uint64_t elements, uint32_t workers, kernels::Backend* backend)
      : backend_(backend), pending_(workers, std::vector<float>(elements)), scales_(elements / kRow) {
    v1::JobSpec job;
    job.set_name("scale");
    job.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
    job.set_codec(spec.codec);
    job.set_update_codec(spec.update_codec);
    job.set_max_workers(workers);
    job.set_bucket_bytes(1u << 30);
    auto* tensor = job.add_tensors();
    tensor->set_name("w");
    tensor->add_shape(elements / kColumns);
    tensor->add_shape(kColumns);
    job_ = std::make_unique<Job>(Must(Job::Make(job)));
    layout_ = std::make_unique<Layout>(Must(Layout::Make(*job_, 1)));
    codec_ = Must(MakeCodec({job_.get(), &at(), backend_}));
    compressor_ = Must(UpdateCompressor::Make({job_.get(), &at(), backend_}));
    if (compressor_ != nullptr) residual_.resize(elements);
    accumulator_ = codec_->NewAccumulator();
    plan_ = codec_->InitialPlan();
    for (uint32_t w = 0; w < workers; ++w) encoders_.push_back(codec_->NewEncoder());
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    for (float& scale : scales_) scale = 0.01f * std::exp(normal(random));
  }

  Measured Round() {
    Measured measured;
    std::vector<EncodedFrame> frames;
    for (uint32_t w = 0; w < pending_.size(); ++w) frames.push_back(Encode(w));
    accumulator_->Open(round_, plan_);
    const double workers = static_cast<double>(frames.size());
    for (const EncodedFrame& frame : frames) {
      measured.push_bytes += static_cast<double>(frame.bytes) / workers;
      measured.sent += static_cast<double>(frame.positions.size()) / workers;
      const std::vector<wire::Chunk> chunks = Must(wire::ParseFrame(frame.chunks));
      const auto begin = std::chrono::steady_clock::now();
      for (const wire::Chunk& chunk : chunks) {
        for (const wire::Segment& s : chunk.segments) {
          if (s.type != wire::SegmentType::kLearningRates) Must(accumulator_->Add(s));
        }
      }
      measured.add_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / workers;
    }
    UpdateFrame update =
        Must(accumulator_->Finish({0, 0, round_, 0, {&kLearningRate, 1}, 0}, static_cast<uint32_t>(frames.size())));
    if (compressor_ != nullptr) {
      Must(compressor_->Compress(plan_, residual_.data(), &change_, &update));
      change_.ApplyTo(residual_.data());
    }
    measured.pull_bytes = static_cast<double>(TotalSize(update.chunks));
    const Update decoded = Must(DecodeUpdate(update.chunks, *job_, at(), plan_));
    measured.float_bytes = UnionBytes(decoded, at().elements);
    for (uint32_t w = 0; w < pending_.size() && !decoded.deferred.empty(); ++w) {
      Must(codec_->Return(frames[w], &decoded.deferred, Runs(w)));
    }
    plan_ = update.next;
    ++round_;
    return measured;
  }

 private:
  const BucketLayout& at() const { return layout_->at(0, 0); }

  std::vector<float*> Runs(uint32_t worker) {
    std::vector<float*> runs;
    for (size_t i = 0; i < at().runs.size(); ++i) runs.push_back(pending_[worker].data() + at().run_begin[i]);
    return runs;
  }

  EncodedFrame Encode(uint32_t worker) {
    std::vector<float>& pending = pending_[worker];
    std::mt19937_64 random(1000 * round_ + worker);
    std::normal_distribution<float> normal;
    const bool keeps = codec_->uses_residual();
    for (size_t i = 0; i < pending.size(); ++i) {
      const float x = scales_[i / kRow] * normal(random) * std::exp(normal(random));
      pending[i] = keeps ? pending[i] + x : x;
    }
    Selection selection;
    if (codec_->selects()) selection = SelectThreshold(*codec_, round_, pending, *backend_);
    std::vector<RunInput> runs;
    for (float* run : Runs(worker)) runs.push_back({run, run, selection});
    return Must(encoders_[worker]->Encode({0, 0, round_, worker + 1, {&kLearningRate, 1}, worker + 1}, plan_, runs));
  }

  kernels::Backend* const backend_;
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<Accumulator> accumulator_;
  std::unique_ptr<UpdateCompressor> compressor_;  // null: updates are as the accumulator finished them
  std::vector<float> residual_;                   // of the compressor
  ResidualChange change_;
  std::vector<std::unique_ptr<Encoder>> encoders_;
  RoundPlan plan_;
  uint64_t round_ = 0;
  std::vector<std::vector<float>> pending_;  // [worker]
  std::vector<float> scales_;                // of each row
};

int Main(int argc, char** argv) {
  std::string backend = "cpu", only;
  int elements_log2 = 20, rounds = 5, most = 32;
  Flags flags("scale", "What one worker pushes and pulls per round, against the number of workers. No network.");
  flags.Add("--backend", &backend, "The arithmetic: reference, cpu, cpu:avx2, ...");
  flags.Add("--log2-elements", &elements_log2, "Elements of the model: 2 to this power")->check(CLI::Range(16, 24));
  flags.Add("--rounds", &rounds, "Rounds after the first; figures are those of the last")->check(CLI::Range(1, 100));
  flags.Add("--workers", &most, "The largest number of workers")->check(CLI::Range(1, 64));
  flags.Add("--only", &only, "Codecs whose specs contain this");
  flags.Parse(argc, argv);
  transport::TuneMalloc();
  const auto made = kernels::MakeBackend(backend);
  if (!made.ok()) {
    std::fprintf(stderr, "bench_scale: %s\n", std::string(made.status().message()).c_str());
    return 2;
  }
  const uint64_t elements = uint64_t{1} << elements_log2;
  Report report("scale");
  Report aims("scale, aims: the push does not grow, and the pull of a union is a third of float32's");
  report.Note("command", absl::StrCat("tests/bench/run scale --log2-elements=", elements_log2, " --rounds=", rounds));
  Plot plot(absl::StrCat("One worker's bytes per round, 2^", elements_log2, " elements"), "workers",
            "KiB (dashed: pulled)", 2);
  std::printf("%-48s %8s %12s %12s %18s %22s\n", "codec", "workers", "push KiB", "pull KiB", "both ways, fewer",
              "added, M elements/s");
  for (const Case& spec : kCases) {
    const std::string name = spec.name();
    if (name.find(only) == std::string::npos) continue;
    std::vector<std::pair<double, double>> pushed, pulled;
    double most_push = 0, most_pull = 0, alone = 0, most_of_float = 0;
    for (uint32_t workers = 1; workers <= static_cast<uint32_t>(most); workers *= 2) {
      Bench bench(spec, elements, workers, made->get());
      Measured last;
      for (int r = 0; r <= rounds; ++r) last = bench.Round();
      const double fewer = 8 * static_cast<double>(elements) / (last.push_bytes + last.pull_bytes);
      const double rate = last.sent / last.add_seconds;
      std::printf("%-48s %8u %12.1f %12.1f %17.1fx", name.c_str(), workers, last.push_bytes / 1024,
                  last.pull_bytes / 1024, fewer);
      if (last.sent > 0) std::printf(" %22.0f", 1e-6 * rate);
      std::printf("\n");
      std::fflush(stdout);
      pushed.emplace_back(workers, last.push_bytes / 1024);
      pulled.emplace_back(workers, last.pull_bytes / 1024);
      if (workers == 1) alone = last.push_bytes;
      most_push = std::max(most_push, last.push_bytes);
      if (last.float_bytes > 0 && last.pull_bytes / last.float_bytes > most_of_float) {
        most_of_float = last.pull_bytes / last.float_bytes;
        most_pull = last.pull_bytes;
      }
      const std::string at = absl::StrCat(name, " ", workers, " workers ");
      report.Add({at + "push", last.push_bytes / 1024, "KiB", {}, "", {}});
      report.Add({at + "pull", last.pull_bytes / 1024, "KiB", {}, "", {}});
      if (last.sent > 0) report.Add({at + "added", 1e-6 * rate, "M/s", {}, "", {}});
    }
    std::vector<Row> verdicts;
    if (!spec.grows()) {
      verdicts.push_back(
          {name + " largest push", most_push / 1024, "KiB", most_push / alone, "one worker's", kPushTarget, true});
    }
    if (spec.reduced() && most_of_float > 0) {
      verdicts.push_back(
          {name + " pull", most_pull / 1024, "KiB", most_of_float, "its union in float32, at most", kPullTarget, true});
    }
    for (const Row& row : verdicts) {
      aims.Add(row);
      report.Add(row);
    }
    if (spec.drawn || !only.empty()) {
      plot.AddLine(name, pushed);
      plot.AddLine(name, pulled, /*dashed=*/true);
    }
  }
  const std::string json = flags.json();
  const std::string path = json.empty() ? "" : absl::StrCat(absl::StripSuffix(json, ".json"), ".svg");
  if (!plot.Write(path)) std::fprintf(stderr, "bench_scale: cannot write %s\n", path.c_str());
  if (!path.empty()) std::printf("plot: %s\n", path.c_str());
  std::printf("Fewer: than float32 both ways. The pull is the union of what all workers sent.\n");
  aims.Print();
  return report.WriteJson(flags.json());
}

}  // namespace
}  // namespace gradwire::bench

int main(int argc, char** argv) { return gradwire::bench::Main(argc, argv); }
