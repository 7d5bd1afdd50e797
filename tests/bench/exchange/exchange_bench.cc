// bench_exchange: goodput, latency and CPU cost of frames, each as a ratio to raw TCP over the same loopback in the
// same interleaved run: over bare transports ("grpc", "tcp"), through a gradwire-server process that listens on each
// ("tcp server"), and as workers see it ("tcp session").
#include <algorithm>
#include <cstdio>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/transport/malloc_tuning.h"
#include "tests/bench/exchange/measure.h"
#include "tests/bench/exchange/peer_process.h"
#include "tests/bench/exchange/raw_tcp.h"
#include "tests/bench/exchange/server_process.h"
#include "tests/bench/exchange/shard_bench.h"
#include "tests/bench/exchange/stream_exchange.h"
#include "tests/bench/lib/flags.h"
#include "tests/bench/lib/report.h"

namespace gradwire::bench {
namespace {

// One side of a comparison: moves frames, and knows the CPU time of both ends.
struct Contestant {
  std::string name;
  std::function<void(size_t frames, size_t frame_bytes)> move;
  PeerProcess* peer;
};

// Goodput in GB/s and CPU seconds per GB of each contestant, one value per round.
struct Measured {
  std::vector<std::vector<double>> goodput;
  std::vector<std::vector<double>> cpu;
};

Measured Measure(const Config& config, size_t frame_bytes, const std::vector<Contestant>& contestants) {
  const size_t frames = std::max<size_t>(1, config.total_bytes / frame_bytes);
  const double gb = 1e-9 * static_cast<double>(frames * frame_bytes);
  Measured measured;
  measured.cpu.resize(contestants.size());
  std::vector<std::function<double()>> runs;
  for (size_t i = 0; i < contestants.size(); ++i) {
    runs.push_back([&, i] {
      const Contestant& contestant = contestants[i];
      const double before = OwnCpuSeconds() + contestant.peer->CpuSeconds();
      const double seconds = Seconds([&] { contestant.move(frames, frame_bytes); });
      measured.cpu[i].push_back((OwnCpuSeconds() + contestant.peer->CpuSeconds() - before) / gb);
      return gb / seconds;
    });
  }
  measured.goodput = Interleave(config.rounds, runs);
  return measured;
}

// contestants[0] is what the others are compared with.
void Goodput(const Config& config, const std::string& direction, const std::vector<Contestant>& contestants,
             Report& report) {
  // Heaps, windows and congestion control have settled before anything is measured.
  for (const Contestant& contestant : contestants) contestant.move(config.total_bytes / kMiB, kMiB);
  for (size_t frame_bytes : kSizes) {
    const Measured m = Measure(config, frame_bytes, contestants);
    for (size_t i = 0; i < contestants.size(); ++i) {
      const std::string label = absl::StrCat(contestants[i].name, " ", direction, " ", SizeName(frame_bytes));
      Row goodput{label, Median(m.goodput[i]), "GB/s", {}, "", {}};
      Row cpu{absl::StrCat(label, ", CPU of both ends"), Median(m.cpu[i]), "s/GB", {}, "", {}};
      if (i > 0) {
        goodput.ratio = MedianRatio(m.goodput[i], m.goodput[0]);
        goodput.ratio_to = contestants[0].name;
        cpu.ratio = MedianRatio(m.cpu[i], m.cpu[0]);
        cpu.ratio_to = contestants[0].name;
        cpu.smaller_is_better = true;
        if (frame_bytes >= kTargetFrom) {
          goodput.target = kGoodputTarget;
          cpu.target = kCpuTarget;
        }
      }
      report.Add(goodput);
      report.Add(cpu);
    }
  }
}

void Latency(const Config& config, RawTcpClient& raw, const std::string& name, StreamClient& stream, Report& report) {
  constexpr size_t kBytes = 1024;
  constexpr size_t kRoundTrips = 2000;
  const auto p50 = [&](const std::function<void()>& trip) {
    std::vector<double> us;
    for (size_t i = 0; i < kRoundTrips; ++i) us.push_back(1e6 * Seconds(trip));
    return Median(us);
  };
  const auto runs = Interleave(
      config.rounds, {[&] { return p50([&] { raw.Echo(kBytes); }); }, [&] { return p50([&] { stream.Echo(kBytes); }); },
                      [&] { return p50([&] { stream.EchoPolling(kBytes); }); },
                      [&] { return 1e6 * Median(stream.EchoInSink(kRoundTrips, kBytes)); }});
  report.Add({"raw TCP 1 KiB round trip, p50", Median(runs[0]), "us", {}, "", {}});
  const char* const ways[] = {"waiting thread", "polling thread", "within sinks"};
  for (size_t i = 0; i < std::size(ways); ++i) {
    report.Add({absl::StrCat(name, " 1 KiB round trip, ", ways[i], ", p50"), Median(runs[i + 1]), "us",
                MedianRatio(runs[i + 1], runs[0]), "raw TCP", kLatencyTarget, true});
  }
}

// One transport, and the peer of the same program that listens on it.
struct Bare {
  explicit Bare(const std::string& scheme)
      : name(scheme), peer({absl::StrCat("--peer=", scheme)}), stream(peer.address()) {}
  std::string name;
  PeerProcess peer;
  StreamClient stream;
};

int Main(int argc, char** argv) {
  std::string mode, only, transport, codec, server = GRADWIRE_SERVER_BINARY;
  int core = -1, rounds = 9;
  size_t mib = 256, kib = 0;
  Flags flags(
      "exchange",
      "Goodput, latency and CPU cost of frames over loopback, each as a ratio to raw TCP in the same interleaved "
      "run: over bare transports (\"grpc\", \"tcp\"), through a gradwire-server that listens on each (\"tcp "
      "server\"), and as workers see it (\"tcp session\").");
  flags.Add("--rounds", &rounds, "Interleaved rounds, of legs four times as many: a leg takes 20 ms")
      ->check(CLI::Range(1, 1 << 20));
  flags.Add("--mib", &mib, "MiB moved per measurement of the bare transport")->check(CLI::Range(1, 1 << 14));
  flags.Add("--transport", &transport, "Only this one: grpc, tcp")->check(CLI::IsMember({"grpc", "tcp"}));
  flags.Add("--only", &only, "Only this part")
      ->check(CLI::IsMember({"push", "pull", "echo", "legs", "exchange", "step"}));
  flags.Add("--codec", &codec, "Only these rows of legs and exchange")
      ->check(CLI::IsMember({"fp32", "fixed32", "TAGC 1 %"}));
  flags.Add("--kib", &kib, "Only rows of legs and exchange with frames of so many KiB; 0: all")
      ->check(CLI::Range(0, 1 << 20));
  flags.Add("--server", &server, "The gradwire-server that is measured")->check(CLI::ExistingFile);
  flags.AddHidden("--peer", &mode);
  flags.AddHidden("--core", &core);
  flags.Parse(argc, argv);
  transport::TuneMalloc();
  if (core >= 0) StayOn(core);
  if (mode == "raw") return RunRawTcpPeer(), 0;
  if (!mode.empty()) return RunStreamPeer(absl::StrCat(mode, "://127.0.0.1:0")), 0;

  const Config config{mib * kMiB, rounds};
  std::vector<std::string> transports = {"grpc", "tcp"};
  if (!transport.empty()) transports = {transport};
  std::vector<std::unique_ptr<ServerProcess>> servers;  // first: they inherit no pipe of the others
  for (const std::string& scheme : transports) servers.push_back(std::make_unique<ServerProcess>(server, scheme));
  PeerProcess raw_peer({"--peer=raw"});
  RawTcpClient raw(raw_peer.address());
  const std::vector<uint8_t> buffer(64 * kMiB, 5);

  Report report("exchange");
  report.Note("congestion control", CongestionControl());
  report.Note("command",
              absl::StrCat("tests/bench/run exchange --mib=", config.total_bytes / kMiB, " --rounds=", config.rounds));
  const auto wanted = [&only](const char* part) { return only.empty() || only == part; };
  if (wanted("push") || wanted("pull") || wanted("echo")) {
    std::vector<std::unique_ptr<Bare>> bare;
    for (const std::string& scheme : transports) bare.push_back(std::make_unique<Bare>(scheme));
    std::vector<Contestant> pushers = {
        {"raw TCP", [&](size_t n, size_t bytes) { raw.Push(n * bytes, buffer); }, &raw_peer}};
    std::vector<Contestant> pullers = {{"raw TCP", [&](size_t n, size_t bytes) { raw.Pull(n * bytes); }, &raw_peer}};
    for (const auto& b : bare) {
      StreamClient* stream = &b->stream;
      pushers.push_back({b->name, [&, stream](size_t n, size_t bytes) { stream->Push(n, bytes, buffer); }, &b->peer});
      pullers.push_back({b->name, [stream](size_t n, size_t bytes) { stream->Pull(n, bytes); }, &b->peer});
    }
    if (wanted("push")) Goodput(config, "push", pushers, report);
    if (wanted("pull")) Goodput(config, "pull", pullers, report);
    for (const auto& b : bare)
      if (wanted("echo")) Latency(config, raw, b->name, b->stream, report);
  }  // gRPC polls all sockets of a process together: its thread would receive for the sessions as well
  for (size_t i = 0; i < transports.size(); ++i) {
    const ShardBench bench{config.rounds, codec, kib * 1024, transports[i], servers[i].get(), &raw, &raw_peer, &report};
    if (wanted("legs")) BenchLegs(bench);
    if (wanted("exchange")) BenchExchange(bench);
    if (wanted("step")) BenchStep(bench);
  }
  report.Print();
  return report.WriteJson(flags.json());
}

}  // namespace
}  // namespace gradwire::bench

int main(int argc, char** argv) { return gradwire::bench::Main(argc, argv); }
