// bench_codecs: every codec on one gradient: bytes on the wire, time to encode, merge and decode, error. No network.
// GB/s count the dense float32 gradient; "of copy" is against memcpy of the same gradient, one thread, the median over
// interleaved rounds; both in large pages (from 2 MiB on), as sessions have them. Merge is one worker's frame into the
// shard's sums, bytes received to bytes merged; finish makes the update frame of the round; decode makes means of it.
// Error: |decoded - gradient| / |gradient| of one worker's frame.
//
// Lists (TAGC's, top-k's) from 0.05 to 10 % density are compared with what they cannot go below: bytes with the entropy
// of which elements are chosen and the bits of their values, adding with touching the same sums, which are in no cache.
// Calibration does not count there.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/large_array.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/bits/integer_code.h"
#include "common/codec/codec.h"
#include "common/codec/select/select.h"
#include "common/codec/sparse/sparse_segment.h"
#include "common/codec/tagc/tagc_shape.h"
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

// Codecs that write lists; a density of these is behind each.
const std::vector<std::string> kLists = {"tagc", "tagc:bits=2", "topk:values=int8"};
const std::vector<double> kListDensities = {0.0005, 0.001, 0.01, 0.05, 0.1};
constexpr double kSizeTarget = 1.1;        // of a list's bound
constexpr double kEncodeTarget = 0.5;      // of memcpy,
constexpr double kEncodeTargetAt = 0.01;   // at this density
constexpr double kElementsTarget = 150e6;  // that a shard adds per second and core

// What a frame's lists hold.
struct Listed {
  std::vector<uint32_t> positions;
  double value_bits = 0;

  // Bytes below which no code of the positions gets, were they independent, with the values as they are.
  double BoundBytes(uint64_t of) const {
    const double p = static_cast<double>(positions.size()) / static_cast<double>(of);
    const double entropy = p <= 0 || p >= 1 ? 0 : -p * std::log2(p) - (1 - p) * std::log2(1 - p);
    return (entropy * static_cast<double>(of) + value_bits) / 8;
  }
};

void Count(const wire::Segment& s, Listed* listed) {
  if (s.type == wire::SegmentType::kList && s.bytes != 0) {
    uint64_t index_bytes = 0;
    std::span<const uint8_t> payload = s.payload();
    TakeNumber(&payload, &index_bytes);
    Must(DecodeIndex(static_cast<IndexCoding>(s.param & 7), payload.first(index_bytes), static_cast<uint32_t>(s.begin),
                     s.count, &listed->positions));
    listed->value_bits += 8.0 * static_cast<double>(payload.size() - index_bytes);
  } else if (s.type == wire::SegmentType::kSparse && (s.param & 15) != sparse::kAgreedCoding) {
    sparse::Pairs pairs;
    Must(sparse::ReadPairs(s, {}, &pairs));
    listed->positions.insert(listed->positions.end(), pairs.positions.begin(), pairs.positions.end());
    uint32_t index_bytes = 0;
    std::memcpy(&index_bytes, s.data, sizeof(index_bytes));
    listed->value_bits += 8.0 * static_cast<double>(s.bytes - sizeof(index_bytes) - index_bytes);
  }
}

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
    pending_.resize(gradient.size());
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
    double list = 0, add = 0;  // of the frame with values alone: encoding and merging it
    double touch = 0;          // touching the sums of its elements
  };
  // A step of one worker, which starts without a residual: a round, and those that prepare it.
  Times Step() {
    Times times;
    bytes_ = update_bytes_ = 0;
    do {
      const Times before = times;
      Round(&times);
      times.list = times.encode - before.encode;
      times.add = times.merge - before.merge;
    } while (!CarriesValues(*job_, round_ - 1));
    times.touch = Touch();
    return times;
  }

  uint64_t bytes() const { return bytes_; }
  uint64_t listed_bytes() const { return listed_bytes_; }  // of the frame with values
  const Listed& listed() const { return listed_; }
  uint64_t update_bytes() const { return update_bytes_; }
  double error() const { return error_; }

 private:
  const BucketLayout& at() const { return layout_->at(0, 0); }

  // Adds to the times.
  void Round(Times* times) {
    // As in a session: it has just been added to a residual, in large pages.
    std::ranges::fill(pending_, 0.0f);
    AddToPending(gradient_, pending_, *backend_);
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
    listed_bytes_ = frame.bytes;
    listed_.positions.clear();
    listed_.value_bits = 0;
    accumulator_->Open(round_, plan_);
    std::vector<wire::Chunk> chunks;
    times->merge += SecondsOf([&] {
      chunks = Must(wire::ParseFrame(frame.chunks));
      for (const wire::Chunk& chunk : chunks) {
        for (const wire::Segment& s : chunk.segments) {
          if (s.type != wire::SegmentType::kLearningRates) Must(accumulator_->Add(s));
        }
      }
    });
    for (const wire::Chunk& chunk : chunks)
      for (const wire::Segment& s : chunk.segments) Count(s, &listed_);
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

  // Seconds for adding 1 to what lies where a sum of each listed element does.
  double Touch() {
    if (listed_.positions.empty()) return 0;
    const CodecSpec& spec = job_->codecs()[at().codec];
    const bool integers = std::holds_alternative<TagcSpec>(spec);  // else the grid's int64
    const int width =
        integers ? Must(tagc::TagcShape::Make({job_.get(), &at(), backend_}, std::get<TagcSpec>(spec))).cell_bytes
                 : static_cast<int>(sizeof(int64_t));
    if (touched_.empty()) touched_.resize(gradient_.size() * static_cast<size_t>(width));
    const auto touch = [this]<typename T>(T* sums) {
      constexpr size_t kAhead = 32;
      const std::vector<uint32_t>& at = listed_.positions;
      return SecondsOf([&] {
        for (size_t i = 0; i < at.size(); ++i) {
          __builtin_prefetch(sums + at[std::min(i + kAhead, at.size() - 1)], 1);
          sums[at[i]] = static_cast<T>(sums[at[i]] + 1);
        }
      });
    };
    switch (width) {
      case 1:
        return touch(touched_.data());
      case 2:
        return touch(reinterpret_cast<uint16_t*>(touched_.data()));
      case 4:
        return touch(reinterpret_cast<uint32_t*>(touched_.data()));
      default:
        return touch(reinterpret_cast<uint64_t*>(touched_.data()));
    }
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
  LargeArray<float> pending_;
  std::vector<float> means_;
  uint64_t bytes_ = 0;
  uint64_t update_bytes_ = 0;
  Listed listed_;
  uint64_t listed_bytes_ = 0;
  LargeArray<uint8_t> touched_;
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

// A codec, what it is measured by, and its times, one of each round.
struct Contestant {
  std::string spec;
  double density;  // of lists that are compared with their bounds; 0: one of the table
  std::unique_ptr<Bench> bench;
  std::vector<Bench::Times> times;

  std::vector<double> Seconds(double Bench::Times::*stage) const {
    std::vector<double> taken;
    for (const Bench::Times& t : times) taken.push_back(t.*stage);
    return taken;
  }
};

void ReportCodecs(const std::vector<Contestant>& contestants, const std::vector<double>& copying, size_t n,
                  Report* report) {
  const double elements = static_cast<double>(n);
  const double gigabytes = 4e-9 * elements;
  std::printf("%-32s %12s %8s %12s | %14s %14s %14s %14s | %9s\n", "codec", "push B/el", "fewer", "update B/el",
              "encode GB/s", "merge GB/s", "finish GB/s", "decode GB/s", "error");
  for (const Contestant& c : contestants) {
    if (c.density != 0) continue;
    const double push = static_cast<double>(c.bench->bytes()) / elements;
    const double update = static_cast<double>(c.bench->update_bytes()) / elements;
    std::printf("%-32s %12.4f %7.1fx %12.4f |", c.spec.c_str(), push, 4 / push, update);
    report->Add({c.spec + " push", push, "bytes per element", {}, "", {}});
    report->Add({c.spec + " update", update, "bytes per element", {}, "", {}});
    report->Add({c.spec + " error", c.bench->error(), "of the gradient's norm", {}, "", {}});
    for (const auto& [what, stage] :
         {std::pair("encode", &Bench::Times::encode), std::pair("merge", &Bench::Times::merge),
          std::pair("finish", &Bench::Times::finish), std::pair("decode", &Bench::Times::decode)}) {
      const std::vector<double> taken = c.Seconds(stage);
      const double rate = gigabytes / Median(taken);
      const Ratio ratio = MedianRatio(copying, taken);
      std::printf(" %7.2f (%4.2f)", rate, ratio.median);
      report->Add({absl::StrCat(c.spec, " ", what), rate, "GB/s", ratio, "copy", {}});
    }
    std::printf(" | %9.2e\n", c.bench->error());
  }
  std::printf("In brackets: of memcpy. Merge, finish and decode of sparse codecs count the dense gradient too.\n");
}

void ReportLists(const std::vector<Contestant>& contestants, const std::vector<double>& copying, size_t n,
                 Report* report) {
  Report lists("codecs, lists");
  for (const Contestant& c : contestants) {
    if (c.density == 0) continue;
    const Listed& listed = c.bench->listed();
    const double elements = static_cast<double>(listed.positions.size());
    const double bytes = static_cast<double>(c.bench->listed_bytes());
    const std::vector<double> encoding = c.Seconds(&Bench::Times::list);
    const std::vector<double> adding = c.Seconds(&Bench::Times::add);
    const double added = elements / Median(adding);
    const std::optional<double> encode_target =
        c.density == kEncodeTargetAt ? std::optional(kEncodeTarget) : std::nullopt;
    for (const Row& row :
         {Row{c.spec + " size", bytes / elements, "B/listed", bytes / listed.BoundBytes(n), "its bound", kSizeTarget,
              true},
          Row{c.spec + " encode", 4e-9 * static_cast<double>(n) / Median(encoding), "GB/s",
              MedianRatio(copying, encoding), "copy", encode_target, false},
          Row{c.spec + " merge", 1e-6 * added, "M listed/s", added / kElementsTarget, "150 M listed/s", 1.0, false},
          Row{c.spec + " merge",
              1e-6 * added,
              "M listed/s",
              MedianRatio(c.Seconds(&Bench::Times::touch), adding),
              "touching sums",
              {},
              false}}) {
      lists.Add(row);
      report->Add(row);
    }
  }
  lists.Print();
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

  // In large pages, too.
  const LargeArray<float> from(gradient.begin(), gradient.end());
  LargeArray<float> copy(gradient.size());
  std::vector<Contestant> contestants;
  const auto add = [&](const std::string& spec, double density) {
    if (spec.find(only) == std::string::npos) return;
    contestants.push_back({spec, density, std::make_unique<Bench>(spec, gradient, workers, backend), {}});
  };
  for (const std::string& spec : kSpecs) add(spec, 0);
  for (const std::string& codec : kLists)
    for (double density : kListDensities)
      add(absl::StrCat(codec, codec.find(':') == std::string::npos ? ":" : ",", "density=", density), density);
  std::vector<std::function<double()>> runs = {
      [&] { return SecondsOf([&] { std::memcpy(copy.data(), from.data(), from.size() * 4); }); }};
  for (Contestant& c : contestants) {
    runs.push_back([&c] {
      c.times.push_back(c.bench->Step());
      return c.times.back().encode;
    });
  }
  const std::vector<double> copying = Interleave(rounds, runs)[0];

  Report report("codecs");
  report.Note("backend", std::string(backend->name()));
  report.Note("command",
              absl::StrCat("tests/bench/run codecs --mib=", mib, " --rounds=", rounds, " --workers=", workers));
  std::printf("%d MiB of float32, backend %s, one thread; memcpy %.1f GB/s; medians of %d interleaved rounds\n", mib,
              std::string(backend->name()).c_str(), 4e-9 * static_cast<double>(gradient.size()) / Median(copying),
              rounds);
  ReportCodecs(contestants, copying, gradient.size(), &report);
  ReportLists(contestants, copying, gradient.size(), &report);
  return report.WriteJson(flags.json());
}

}  // namespace
}  // namespace gradwire::bench

int main(int argc, char** argv) { return gradwire::bench::Main(argc, argv); }
