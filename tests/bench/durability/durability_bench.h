// What the parts of bench_durability share.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/clock.h"
#include "gradwire/session.h"
#include "server/daemon.h"
#include "tests/bench/lib/report.h"

namespace gradwire::bench {

inline constexpr size_t kMiB = 1 << 20;
inline constexpr double kPauseTarget = 1.1;   // a round while a snapshot is taken, to one without
inline constexpr double kReplayTarget = 1.0;  // GB/s of dense-equivalent
inline constexpr double kLoadTarget = 0.5;    // of reading the same files from the disk

struct DurabilityConfig {
  std::string directory;     // empty, on the disk that is measured
  int rounds = 5;            // of interleaving
  size_t bytes = 64 * kMiB;  // parameters of the large job
};

inline double Seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "bench_durability: %s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T Take(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}

// One worker on one shard server, over gRPC on the loopback. Any failure ends the program.
class BenchTraining {
 public:
  // `data`: the server's data directory; snapshots are taken when they are asked for.
  BenchTraining(const std::string& data, const std::string& codec, v1::OptimizerKind optimizer, size_t bytes,
                v1::DurabilityLevel level);
  // Seconds of each round.
  std::vector<double> Rounds(int count);
  uint64_t Snapshots();  // that were taken so far, or failed
  void RequestSnapshot();

  static constexpr char kJob[] = "bench";

 private:
  SteadyClock clock_;
  std::unique_ptr<Daemon> daemon_;
  std::vector<std::vector<float>> parameters_;
  std::vector<std::vector<float>> gradients_;
  std::unique_ptr<Session> session_;
};

// rounds_bench.cc
void MeasureRounds(const DurabilityConfig& config, Report* report);
void MeasurePause(const DurabilityConfig& config, Report* report);
// files_bench.cc
void MeasureReplay(const DurabilityConfig& config, Report* report);
void MeasureLoad(const DurabilityConfig& config, Report* report);

}  // namespace gradwire::bench
