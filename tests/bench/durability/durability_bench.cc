// bench_durability: rounds per second at each level of durability, how long rounds take while a snapshot is written,
// how fast journals are replayed and snapshots loaded.
//   --dir=D     where files are written (default: build/bench/durability; it must be a disk, not a tmpfs)
//   --rounds=N  interleaved rounds (default 5)     --json=F  where the JSON goes
//   --mib=N     parameters of the large job (default 64)
//   --only=rounds|pause|replay|load
#include "tests/bench/durability/durability_bench.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/transport/malloc_tuning.h"

namespace gradwire::bench {
namespace {

int Main(int argc, char** argv) {
  transport::TuneMalloc();
  spdlog::set_level(spdlog::level::warn);
  const std::string parent = Flag(argc, argv, "dir", "build/bench/durability");
  const std::string only = Flag(argc, argv, "only", "");
  const std::string json = Flag(argc, argv, "json", "");
  DurabilityConfig config;
  config.directory = absl::StrCat(parent, "/", getpid());
  config.rounds = std::stoi(Flag(argc, argv, "rounds", "5"));
  config.bytes = static_cast<size_t>(std::stoull(Flag(argc, argv, "mib", "64"))) * kMiB;
  std::filesystem::create_directories(config.directory);
  Report report("durability");
  report.Note("command",
              absl::StrCat("tests/bench/run durability --mib=", config.bytes / kMiB, " --rounds=", config.rounds));
  const std::pair<const char*, void (*)(const DurabilityConfig&, Report*)> parts[] = {
      {"rounds", MeasureRounds}, {"pause", MeasurePause}, {"replay", MeasureReplay}, {"load", MeasureLoad}};
  for (const auto& [name, measure] : parts) {
    if (only.empty() || only == name) measure(config, &report);
  }
  std::filesystem::remove_all(config.directory);
  report.Print();
  return report.WriteJson(json) ? 0 : 1;
}

}  // namespace
}  // namespace gradwire::bench

int main(int argc, char** argv) { return gradwire::bench::Main(argc, argv); }
