// bench_codecs: every codec on one gradient: bytes on the wire, time to encode, merge and decode, error. No network.
// GB/s count the dense float32 gradient; "of copy" is against memcpy of the same gradient, one thread, the median over
// interleaved rounds. Merge is one worker's frame into the shard's sums, bytes received to bytes merged; finish makes
// the update frame of the round; decode makes means of it. Error: |decoded - gradient| / |gradient| of one worker's
// frame.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/codec/codec.h"
#include "common/codec/select/select.h"
#include "common/codec/update/update.h"
#include "common/job/round_mode.h"
#include "common/transport/malloc_tuning.h"
#include "tests/bench/lib/flags.h"
#include "tests/bench/lib/report.h"
#include "tests/lib/must.h"

namespace gradwire::bench {
namespace {

using testing_support::Must;

constexpr float kLearningRate = 0.1f;
constexpr uint64_t kColumns = 1024;

const std::vector<std::string> kSpecs = {
    "dense:fp32",
    "dense:bf16",
    "dense:fixed32",
    "dense:fixed16",
    "fp16",
    "natural:bits=8",
    "qsgd:bits=8",
    "linear:bits=4",
    "qsgd:bits=4",
    "natural:bits=4",
    "terngrad",
    "onebit",
    "efsignsgd",
    "signsgd",
    "signum",
    "uniform:bits=8",
    "uniform:bits=4",
    "uniform:bits=4,rounding=stochastic",
    "thc:bits=4",
    "thc:bits=2",
    "randomk:density=0.01",
    "topk:density=0.1",
    "topk:density=0.01",
    "topk:density=0.01,values=fp16",
    "topk:density=0.01,values=int8",
    "topk:density=0.01,values=int4",
    "topk:density=0.001,values=fp16",
    "threshold:value=0.05",
    "dgc:density=0.01",
    "zen",
    "adaptive",
    "powersgd:rank=1",
    "powersgd:rank=4",
    "tagc:density=0.1",
    "tagc:density=0.01",
    "tagc:density=0.01,form=sketch",
    "tagc:density=0.001",
};

double SecondsOf(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// One bucket of a job on one shard, and a worker.
class Bench {
 public:
  Bench(const std::string& spec, const std::vector<float>& gradient, int workers, kernels::Backend* backend)
      : gradient_(gradient), backend_(backend) {
    v1::JobSpec job;
    job.set_name("bench");
    job.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
    job.set_codec(spec);
    job.set_max_workers(static_cast<uint32_t>(workers));
    job.set_bucket_bytes(1u << 30);
    auto* tensor = job.add_tensors();
    tensor->set_name("w");
    tensor->add_shape(kColumns);
    tensor->add_shape(gradient.size() / kColumns);
    job_ = std::make_unique<Job>(Must(Job::Make(job)));
    layout_ = std::make_unique<Layout>(Must(Layout::Make(*job_, 1)));
    codec_ = Must(MakeCodec({job_.get(), &at(), backend_}));
    encoder_ = codec_->NewEncoder();
    accumulator_ = codec_->NewAccumulator();
    plan_ = codec_->InitialPlan();
    means_.resize(gradient.size());
    Step();
    double error = 0, norm = 0;
    for (size_t i = 0; i < gradient.size(); ++i) {
      const double difference = static_cast<double>(means_[i]) - static_cast<double>(gradient[i]);
      error += difference * difference;
      norm += static_cast<double>(gradient[i]) * static_cast<double>(gradient[i]);
    }
    error_ = std::sqrt(error / norm);
  }

  struct Times {
    double encode = 0, merge = 0, finish = 0, decode = 0;
  };
  // A step of one worker, which starts without a residual: a round, and those that prepare it.
  Times Step() {
    Times times;
    bytes_ = update_bytes_ = 0;
    do {
      Round(&times);
    } while (!CarriesValues(*job_, round_ - 1));
    return times;
  }

  uint64_t bytes() const { return bytes_; }
  uint64_t update_bytes() const { return update_bytes_; }
  double error() const { return error_; }

 private:
  const BucketLayout& at() const { return layout_->at(0, 0); }

  // Adds to the times.
  void Round(Times* times) {
    pending_ = gradient_;
    EncodedFrame frame;
    const FrameIdentity id = {0, 0, round_, 1, {&kLearningRate, 1}, 1};
    times->encode += SecondsOf([&] {
      const Selection selection = SelectThreshold(*codec_, round_, pending_, *backend_);
      std::vector<RunInput> runs(at().runs.size());
      for (size_t i = 0; i < runs.size(); ++i) {
        float* const memory = pending_.data() + at().run_begin[i];
        runs[i] = {memory, memory, selection};
      }
      frame = Must(encoder_->Encode(id, plan_, runs));
    });
    bytes_ += frame.bytes;
    accumulator_->Open(round_, plan_);
    times->merge += SecondsOf([&] {
      for (const wire::Chunk& chunk : Must(wire::ParseFrame(frame.chunks))) {
        for (const wire::Segment& s : chunk.segments) {
          if (s.type != wire::SegmentType::kLearningRates) Must(accumulator_->Add(s));
        }
      }
    });
    UpdateFrame update;
    times->finish += SecondsOf([&] { update = Must(accumulator_->Finish(id, 1)); });
    update_bytes_ += TotalSize(update.chunks);
    times->decode += SecondsOf([&] {
      const Update decoded = Must(DecodeUpdate(update.chunks, *job_, at(), plan_));
      for (uint32_t run = 0; run < at().runs.size() && decoded.body != Update::Body::kEmpty; ++run) {
        decoded.MeanOfRun(at(), run, means_.data() + at().run_begin[run]);
      }
    });
    plan_ = update.next;
    ++round_;
  }

  const std::vector<float>& gradient_;
  kernels::Backend* const backend_;
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<Encoder> encoder_;
  std::unique_ptr<Accumulator> accumulator_;
  RoundPlan plan_;
  uint64_t round_ = 0;
  std::vector<float> pending_;
  std::vector<float> means_;
  uint64_t bytes_ = 0;
  uint64_t update_bytes_ = 0;
  double error_ = 0;
};

// Heavy tails, as gradients have: a normal number times e to another one.
std::vector<float> MakeGradient(size_t elements) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> gradient(elements);
  for (float& x : gradient) x = 0.01f * normal(random) * std::exp(normal(random));
  return gradient;
}

int Main(int argc, char** argv) {
  std::string name = "cpu", only;
  int mib = 16, rounds = 7, workers = 2;
  Flags flags("codecs",
              "Every codec on one gradient: bytes on the wire, time to encode, merge and decode, error. No network.");
  flags.Add("--backend", &name, "The arithmetic: reference, cpu, cpu:avx2, ...");
  flags.Add("--mib", &mib, "MiB of the dense gradient")->check(CLI::Range(1, 1 << 12));
  flags.Add("--rounds", &rounds, "Interleaved rounds; figures are their medians")->check(CLI::Range(1, 1 << 20));
  flags.Add("--workers", &workers, "Workers whose frames a shard merges")->check(CLI::Range(1, 64));
  flags.Add("--only", &only, "Codecs whose spec contains this");
  flags.Parse(argc, argv);
  transport::TuneMalloc();
  const auto made = kernels::MakeBackend(name);
  if (!made.ok()) {
    std::fprintf(stderr, "bench_codecs: %s\n", std::string(made.status().message()).c_str());
    return 2;
  }
  kernels::Backend* const backend = made->get();
  const std::vector<float> gradient = MakeGradient(static_cast<size_t>(mib) << 18);
  const double gigabytes = static_cast<double>(gradient.size()) * 4e-9;
  const double elements = static_cast<double>(gradient.size());

  std::vector<float> copy(gradient.size());
  std::vector<std::string> specs;
  std::vector<std::unique_ptr<Bench>> benches;
  std::vector<std::vector<Bench::Times>> times;
  std::vector<std::function<double()>> contestants = {
      [&] { return SecondsOf([&] { std::memcpy(copy.data(), gradient.data(), gradient.size() * 4); }); }};
  for (const std::string& spec : kSpecs) {
    if (spec.find(only) == std::string::npos) continue;
    specs.push_back(spec);
    benches.push_back(std::make_unique<Bench>(spec, gradient, workers, backend));
    contestants.push_back([&, at = specs.size() - 1] {
      times[at].push_back(benches[at]->Step());
      return times[at].back().encode;
    });
  }
  times.resize(specs.size());
  const std::vector<std::vector<double>> seconds = Interleave(rounds, contestants);

  Report report("codecs");
  report.Note("backend", std::string(backend->name()));
  report.Note("command",
              absl::StrCat("tests/bench/run codecs --mib=", mib, " --rounds=", rounds, " --workers=", workers));
  std::printf("%d MiB of float32, backend %s, one thread; memcpy %.1f GB/s; medians of %d interleaved rounds\n", mib,
              std::string(backend->name()).c_str(), gigabytes / Median(seconds[0]), rounds);
  std::printf("%-32s %12s %8s %12s | %14s %14s %14s %14s | %9s\n", "codec", "push B/el", "fewer", "update B/el",
              "encode GB/s", "merge GB/s", "finish GB/s", "decode GB/s", "error");
  for (size_t i = 0; i < specs.size(); ++i) {
    const Bench& bench = *benches[i];
    std::printf("%-32s %12.4f %7.1fx %12.4f |", specs[i].c_str(), static_cast<double>(bench.bytes()) / elements,
                4 * elements / static_cast<double>(bench.bytes()),
                static_cast<double>(bench.update_bytes()) / elements);
    report.Add({specs[i] + " push", static_cast<double>(bench.bytes()) / elements, "bytes per element", {}, "", {}});
    report.Add(
        {specs[i] + " update", static_cast<double>(bench.update_bytes()) / elements, "bytes per element", {}, "", {}});
    report.Add({specs[i] + " error", bench.error(), "of the gradient's norm", {}, "", {}});
    for (const auto& [what, member] :
         {std::pair("encode", &Bench::Times::encode), std::pair("merge", &Bench::Times::merge),
          std::pair("finish", &Bench::Times::finish), std::pair("decode", &Bench::Times::decode)}) {
      std::vector<double> taken;
      for (const Bench::Times& t : times[i]) taken.push_back(t.*member);
      const double rate = gigabytes / Median(taken);
      const Ratio ratio = MedianRatio(seconds[0], taken);
      std::printf(" %7.2f (%4.2f)", rate, ratio.median);
      report.Add({absl::StrCat(specs[i], " ", what), rate, "GB/s", ratio, "copy", {}});
    }
    std::printf(" | %9.2e\n", bench.error());
  }
  std::printf("In brackets: of memcpy. Merge, finish and decode of sparse codecs count the dense gradient too.\n");
  return report.WriteJson(flags.json());
}

}  // namespace
}  // namespace gradwire::bench

int main(int argc, char** argv) { return gradwire::bench::Main(argc, argv); }
