// bench_durability: rounds per second at each level of durability, how long rounds take while a snapshot is written,
// how fast journals are replayed and snapshots loaded.
#include "tests/bench/durability/durability_bench.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/transport/malloc_tuning.h"
#include "tests/bench/lib/flags.h"

namespace gradwire::bench {
namespace {

int Main(int argc, char** argv) {
  std::string parent = "build/bench/durability", only;
  DurabilityConfig config;
  size_t mib = 64;
  config.rounds = 5;
  Flags flags(
      "durability",
      "Rounds per second at each level of durability, how long rounds take while a snapshot is written, how fast "
      "journals are replayed and snapshots loaded.");
  flags.Add("--dir", &parent, "Where files are written; it must be a disk, not a tmpfs");
  flags.Add("--rounds", &config.rounds, "Interleaved rounds; figures are their medians")->check(CLI::Range(1, 1 << 20));
  flags.Add("--mib", &mib, "MiB of the parameters of the large job")->check(CLI::Range(1, 1 << 12));
  flags.Add("--only", &only, "Only this part")->check(CLI::IsMember({"rounds", "pause", "replay", "load"}));
  flags.Parse(argc, argv);
  transport::TuneMalloc();
  spdlog::set_level(spdlog::level::warn);
  config.directory = absl::StrCat(parent, "/", getpid());
  config.bytes = mib * kMiB;
  std::error_code failed;
  std::filesystem::create_directories(config.directory, failed);
  if (failed) {
    std::fprintf(stderr, "bench_durability: cannot make '%s': %s; --dir names another place\n",
                 config.directory.c_str(), failed.message().c_str());
    return 1;
  }
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
  return report.WriteJson(flags.json());
}

}  // namespace
}  // namespace gradwire::bench

int main(int argc, char** argv) { return gradwire::bench::Main(argc, argv); }
