// See shard_bench.h.
#include "tests/bench/exchange/shard_bench.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/include/gradwire/session.h"
#include "tests/bench/exchange/shard_job.h"

namespace gradwire::bench {
namespace {

constexpr size_t kRoundBytes = 64 * kMiB;  // float32 bytes of one round of a job, whatever its buckets
constexpr int kWarmRounds = 12;            // calibration, and until heaps, windows and exponents have settled
constexpr int kLegRounds = 4;              // of legs, for each of the others: they are short
constexpr double kExchangeSeconds = 0.25;  // of one measurement of the whole exchange, about
constexpr size_t kMaxExchanges = 200;
constexpr size_t kStepBytes = 1024;
constexpr size_t kStepTrips = 1000;

struct CodecCase {
  const char* name;
  const char* spec;
  bool dense;
};
constexpr CodecCase kCodecs[] = {
    {"fp32", "dense:values=fp32", true},
    {"fixed32", "dense:values=fixed32", true},
    {"TAGC 1 %", "tagc:density=0.01", false},
};

// Goodput and CPU time of one leg, one value per round.
struct Samples {
  std::vector<double> goodput;        // GB/s
  std::vector<double> cpu;            // seconds per GB, both ends
  std::vector<double> dense_goodput;  // float32 bytes of what the frames stand for, GB/s
};

// One leg of the round, and the same bytes over raw TCP.
struct Leg {
  std::string name;
  std::function<void()> run;
  std::function<size_t()> bytes;  // of the last run
  std::function<void(size_t)> raw;
  std::function<void(size_t)> raw_checked = {};  // with checksums; none: the leg has them made before
  Samples mine = {}, theirs = {}, theirs_dense = {}, theirs_checked = {};
};

class LegBench {
 public:
  LegBench(const ShardBench& bench, const CodecCase& codec, size_t bucket_bytes)
      : bench_(bench),
        codec_(codec),
        bucket_bytes_(bucket_bytes),
        job_({bench.server->address(),
              absl::StrCat("legs-", codec.name[0] == 'T' ? "tagc" : codec.name, "-", bucket_bytes), codec.spec,
              bucket_bytes, std::max(kRoundBytes, bucket_bytes)}),
        push_{"push", [this] { job_.Push(); }, [this] { return job_.frame_bytes(); },
              [this](size_t n) { bench_.raw->Push(n, buffer_); }},
        pull_{"pull of the update", [this] { job_.PullUpdate(); }, [this] { return job_.update_bytes(); },
              [this](size_t n) { bench_.raw->Pull(n); }},
        parameters_{"pull of parameters", [this] { job_.PullParameters(); }, [this] { return job_.parameter_bytes(); },
                    [this](size_t n) { bench_.raw->Pull(n); }, [this](size_t n) { bench_.raw->PullChecked(n); }} {}

  void Run() {
    for (int round = 0; round < kWarmRounds + kLegRounds * bench_.rounds; ++round) {
      job_.Encode();
      Measure(push_, round);
      job_.Close();
      Measure(pull_, round);
      if (WithParameters()) Measure(parameters_, round);
      job_.FinishRound();
    }
    Report(push_);
    Report(pull_);
    if (WithParameters()) Report(parameters_);
  }

 private:
  // Parameters do not depend on the codec.
  bool WithParameters() const { return codec_.spec == kCodecs[0].spec; }

  void Sample(const std::function<void()>& move, const std::function<size_t()>& bytes,
              const std::function<double()>& peer_cpu, Samples* samples) {
    const double before = OwnCpuSeconds() + peer_cpu();
    const double seconds = Seconds(move);
    const double cpu = OwnCpuSeconds() + peer_cpu() - before;
    const double gb = 1e-9 * static_cast<double>(bytes());
    samples->goodput.push_back(gb / seconds);
    samples->cpu.push_back(cpu / gb);
    samples->dense_goodput.push_back(1e-9 * static_cast<double>(job_.dense_bytes()) / seconds);
  }

  void Measure(Leg& leg, int round) {
    const auto mine = [&] {
      Sample(
          leg.run, leg.bytes, [this] { return bench_.server->CpuSeconds(); }, &leg.mine);
    };
    const auto theirs = [&](const std::function<void(size_t)>& raw, size_t bytes, Samples* samples) {
      Sample([&] { raw(bytes); }, [&] { return bytes; }, [this] { return bench_.raw_peer->CpuSeconds(); }, samples);
    };
    if (round < kWarmRounds) {
      leg.run();
      leg.raw(leg.bytes());
      return;
    }
    // The raw sender goes first in every other round, with the bytes of the round before (they hardly differ).
    if (round % 2 == 0) mine();
    theirs(leg.raw, leg.bytes(), &leg.theirs);
    if (leg.raw_checked) theirs(leg.raw_checked, leg.bytes(), &leg.theirs_checked);
    if (!codec_.dense) theirs(leg.raw, job_.dense_bytes(), &leg.theirs_dense);
    if (round % 2 != 0) mine();
  }

  void Report(const Leg& leg) {
    const std::string label =
        absl::StrCat(bench_.transport, " server ", codec_.name, " ", leg.name, " ", SizeName(bucket_bytes_));
    const std::string bytes =
        codec_.dense ? "" : absl::StrCat(" (", leg.bytes() / (job_.dense_bytes() / bucket_bytes_), " B a frame)");
    Row goodput{label + bytes, Median(leg.mine.goodput),
                "GB/s",        MedianRatio(leg.mine.goodput, leg.theirs.goodput),
                "raw TCP",     {},
                false};
    Row cpu{label + ", CPU of both ends",
            Median(leg.mine.cpu),
            "s/GB",
            MedianRatio(leg.mine.cpu, leg.theirs.cpu),
            "raw TCP",
            {},
            true};
    if (codec_.dense && bucket_bytes_ >= kTargetFrom) {
      goodput.target = kGoodputTarget;
      cpu.target = kCpuTarget;
    }
    bench_.report->Add(goodput);
    bench_.report->Add(cpu);
    if (leg.raw_checked) {
      Row checked = goodput;
      checked.name += ", beside raw TCP that computes checksums";
      checked.ratio = MedianRatio(leg.mine.goodput, leg.theirs_checked.goodput);
      checked.ratio_to = "raw TCP, CRC-32C";
      checked.target = {};
      bench_.report->Add(checked);
    }
    if (codec_.dense) return;
    bench_.report->Add({label + ", dense-equivalent",
                        Median(leg.mine.dense_goodput),
                        "GB/s",
                        MedianRatio(leg.mine.dense_goodput, leg.theirs_dense.goodput),
                        "raw TCP, dense bytes",
                        {},
                        false});
  }

  const ShardBench& bench_;
  const CodecCase& codec_;
  const size_t bucket_bytes_;
  const std::vector<uint8_t> buffer_ = std::vector<uint8_t>(kRoundBytes, 5);
  ShardJob job_;
  Leg push_, pull_, parameters_;
};

// One worker of a job of one tensor.
class OneTensor {
 public:
  OneTensor(const std::string& address, const std::string& name, const std::string& codec, size_t bytes)
      : parameters_(bytes / sizeof(float)), gradient_(BenchGradient(bytes / sizeof(float))) {
    SessionOptions options;
    options.servers = {address};
    options.worker = "worker";
    options.memory = {parameters_};
    options.backend = "cpu";
    options.job = BenchJob(name, codec, bytes, bytes);
    options.job.clear_bucket_bytes();  // as a job is cut that says nothing about it
    absl::StatusOr<std::unique_ptr<Session>> session = Session::Join(std::move(options));
    Check(session.status());
    session_ = *std::move(session);
  }
  void Exchange() {
    const float* gradient = gradient_.data();
    const float rate = 1e-4f;
    Check(session_->Exchange({&gradient, 1}, {&rate, 1}));
  }

 private:
  std::vector<float> parameters_;
  const std::vector<float> gradient_;
  std::unique_ptr<Session> session_;
};

double StepP50(const std::function<void()>& trip) {
  std::vector<double> us;
  for (size_t i = 0; i < kStepTrips; ++i) us.push_back(1e6 * Seconds(trip));
  return Median(us);
}

}  // namespace

void BenchLegs(const ShardBench& bench) {
  for (size_t bytes : kSizes)
    for (const CodecCase& codec : kCodecs)
      if (bench.Wants(codec.name, bytes)) LegBench(bench, codec, bytes).Run();
}

void BenchExchange(const ShardBench& bench) {
  const std::vector<uint8_t> buffer(kRoundBytes, 5);
  for (size_t bytes : kSizes) {
    for (const CodecCase& codec : kCodecs) {
      if (!bench.Wants(codec.name, bytes)) continue;
      OneTensor worker(bench.server->address(), absl::StrCat("exchange-", &codec - kCodecs, "-", bytes), codec.spec,
                       bytes);
      for (int i = 0; i < kWarmRounds; ++i) worker.Exchange();
      const double once = Seconds([&] { worker.Exchange(); });
      const size_t times = std::clamp<size_t>(static_cast<size_t>(kExchangeSeconds / once), 1, kMaxExchanges);
      const double gb = 1e-9 * static_cast<double>(times * bytes);
      const auto runs = Interleave(bench.rounds, {[&] {
                                                    return gb / Seconds([&] {
                                                             for (size_t i = 0; i < times; ++i) {
                                                               bench.raw->Push(bytes, buffer);
                                                               bench.raw->Pull(bytes);
                                                             }
                                                           });
                                                  },
                                                  [&] {
                                                    return gb / Seconds([&] {
                                                             for (size_t i = 0; i < times; ++i) worker.Exchange();
                                                           });
                                                  }});
      bench.report->Add(
          {absl::StrCat(bench.transport, " session ", codec.name, " exchange ", SizeName(bytes), ", dense-equivalent"),
           Median(runs[1]),
           "GB/s",
           MedianRatio(runs[1], runs[0]),
           "raw TCP there and back",
           {},
           false});
    }
  }
}

// p50 in microseconds of blocking round trips over raw TCP whose ends the scheduler cannot move.
class PinnedTrips {
 public:
  explicit PinnedTrips(int peer_core)
      : peer_({"--peer=raw", absl::StrCat("--core=", peer_core)}), client_(peer_.address()) {}
  double P50() {
    double us = 0;
    std::thread trips([&] {
      StayOn(0);
      us = StepP50([&] { client_.Echo(kStepBytes); });
    });
    trips.join();
    return us;
  }

 private:
  PeerProcess peer_;
  RawTcpClient client_;
};

void BenchStep(const ShardBench& bench) {
  PinnedTrips one_core(0);
  PinnedTrips two_cores(1);
  OneTensor worker(bench.server->address(), "step", kCodecs[0].spec, kStepBytes);
  const auto raw = [&] { return StepP50([&] { bench.raw->Echo(kStepBytes); }); };
  const auto step = [&] { return StepP50([&] { worker.Exchange(); }); };
  step();  // the calibration round, and until the poller has settled on one thread
  const auto runs =
      Interleave(bench.rounds, {raw, step, [&] { return one_core.P50(); }, [&] { return two_cores.P50(); }});
  // Where the scheduler puts both ends decides how long a raw round trip takes.
  bench.report->Add({"raw TCP 1 KiB round trip, p50", Median(runs[0]), "us", {}, "", {}});
  bench.report->Add({"raw TCP 1 KiB round trip, both ends on one core, p50", Median(runs[2]), "us", {}, "", {}});
  bench.report->Add({"raw TCP 1 KiB round trip, ends on two cores, p50", Median(runs[3]), "us", {}, "", {}});
  const std::string label = absl::StrCat(bench.transport, " session fp32 exchange 1 KiB, p50");
  bench.report->Add(
      {label, Median(runs[1]), "us", MedianRatio(runs[1], runs[0]), "raw TCP round trip", kLatencyTarget, true});
  bench.report->Add({label, Median(runs[1]), "us", MedianRatio(runs[1], runs[3]), "raw TCP, two cores", {}, true});
}

}  // namespace gradwire::bench
