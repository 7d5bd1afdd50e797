// bench_exchange: goodput, latency and CPU cost of frames, each as a ratio to raw TCP over the same loopback in the
// same interleaved run: over the bare transport ("grpc"), through a gradwire-server process ("server"), and as workers
// see it ("session").
//   --rounds=N  interleaved rounds (default 5)             --json=F   where the JSON goes
//   --mib=N     MiB moved per measurement of the bare transport (default 256)
//   --only=push|pull|echo|legs|exchange|step
//   --codec=fp32|fixed32|"TAGC 1 %", --kib=N  only these rows of legs and exchange
#include <algorithm>
#include <cstdio>
#include <functional>
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

void Latency(const Config& config, RawTcpClient& raw, StreamClient& stream, Report& report) {
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
  report.Add({"grpc 1 KiB round trip, waiting thread, p50", Median(runs[1]), "us", MedianRatio(runs[1], runs[0]),
              "raw TCP", kLatencyTarget, true});
  report.Add({"grpc 1 KiB round trip, polling thread, p50", Median(runs[2]), "us", MedianRatio(runs[2], runs[0]),
              "raw TCP", kLatencyTarget, true});
  report.Add({"grpc 1 KiB round trip, within sinks, p50", Median(runs[3]), "us", MedianRatio(runs[3], runs[0]),
              "raw TCP", kLatencyTarget, true});
}

int Main(int argc, char** argv) {
  transport::TuneMalloc();
  const std::string mode = Flag(argc, argv, "peer", "");
  if (const std::string core = Flag(argc, argv, "core", ""); !core.empty()) StayOn(std::stoi(core));
  if (mode == "tcp") return RunRawTcpPeer(), 0;
  if (mode == "grpc") return RunStreamPeer("grpc://127.0.0.1:0"), 0;

  const Config config{static_cast<size_t>(std::stoull(Flag(argc, argv, "mib", "256"))) * kMiB,
                      std::stoi(Flag(argc, argv, "rounds", "5"))};
  const std::string only = Flag(argc, argv, "only", "");
  ServerProcess server(GRADWIRE_SERVER_BINARY);  // first: it inherits no pipe of the others
  PeerProcess tcp_peer({"--peer=tcp"});
  PeerProcess grpc_peer({"--peer=grpc"});
  RawTcpClient raw(tcp_peer.address());
  auto stream = std::make_unique<StreamClient>(grpc_peer.address());
  const std::vector<uint8_t> buffer(64 * kMiB, 5);

  Report report("exchange");
  report.Note("congestion control", CongestionControl());
  report.Note("command",
              absl::StrCat("tests/bench/run exchange --mib=", config.total_bytes / kMiB, " --rounds=", config.rounds));
  const auto wanted = [&only](const char* part) { return only.empty() || only == part; };
  if (wanted("push"))
    Goodput(config, "push",
            {{"raw TCP", [&](size_t n, size_t bytes) { raw.Push(n * bytes, buffer); }, &tcp_peer},
             {"grpc", [&](size_t n, size_t bytes) { stream->Push(n, bytes, buffer); }, &grpc_peer}},
            report);
  if (wanted("pull"))
    Goodput(config, "pull",
            {{"raw TCP", [&](size_t n, size_t bytes) { raw.Pull(n * bytes); }, &tcp_peer},
             {"grpc", [&](size_t n, size_t bytes) { stream->Pull(n, bytes); }, &grpc_peer}},
            report);
  if (wanted("echo")) Latency(config, raw, *stream, report);
  stream.reset();  // gRPC polls all sockets of a process together: its thread would receive for the sessions as well
  const ShardBench bench{config.rounds,
                         Flag(argc, argv, "codec", ""),
                         static_cast<size_t>(std::stoull(Flag(argc, argv, "kib", "0"))) * 1024,
                         &server,
                         &raw,
                         &tcp_peer,
                         &report};
  if (wanted("legs")) BenchLegs(bench);
  if (wanted("exchange")) BenchExchange(bench);
  if (wanted("step")) BenchStep(bench);
  report.Print();
  return report.WriteJson(Flag(argc, argv, "json", "")) ? 0 : 1;
}

}  // namespace
}  // namespace gradwire::bench

int main(int argc, char** argv) { return gradwire::bench::Main(argc, argv); }
