// gradwire_sim: runs seeds in parallel processes, prints what they covered, and replays the first one that fails.
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "tests/sim/run.h"

namespace gradwire::sim {
namespace {

constexpr char kUsage[] =
    "usage: gradwire_sim [--seeds=N] [--first=SEED] [--jobs=N] [--break=dedup|early-ack|fate|promotion] [--async]\n"
    "       gradwire_sim --seed=SEED [--trace] [--break=...]\n"
    "Runs N seeds from SEED on (default 1000 from 1) in JOBS processes (default 2). Exits 1 where an invariant does "
    "not\n"
    "hold, or where a kind of fault or situation never occurred in 1,000 seeds and more. With --break, one mechanism "
    "is\n"
    "broken on purpose: exits 0 as soon as a seed notices, 1 if none does. With --async, only jobs with asynchronous\n"
    "rounds run.\n";

struct Options {
  uint64_t seeds = 1000;
  uint64_t first = 1;
  uint64_t jobs = 2;
  std::optional<uint64_t> seed;
  bool trace = false;
  bool async = false;
  Broken broken = Broken::kNothing;
};

// What a process tells its parent.
struct Outcome {
  Coverage coverage{};
  uint64_t ran = 0;
  uint64_t failed_seed = 0;
  bool failed = false;
  bool died = false;
  char violation[400] = {};
};

std::optional<Options> Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const auto number = [&](std::string_view name, uint64_t* out) {
      return arg.starts_with(name) && absl::SimpleAtoi(std::string(arg.substr(name.size())), out);
    };
    uint64_t seed = 0;
    if (number("--seeds=", &options.seeds) || number("--first=", &options.first) || number("--jobs=", &options.jobs)) {
      continue;
    } else if (number("--seed=", &seed)) {
      options.seed = seed;
    } else if (arg == "--trace") {
      options.trace = true;
    } else if (arg == "--async") {
      options.async = true;
    } else if (arg == "--break=dedup") {
      options.broken = Broken::kDedup;
    } else if (arg == "--break=early-ack") {
      options.broken = Broken::kEarlyAck;
    } else if (arg == "--break=promotion") {
      options.broken = Broken::kPromotion;
    } else if (arg == "--break=fate") {
      options.broken = Broken::kFate;
    } else {
      return std::nullopt;
    }
  }
  if (options.jobs == 0 || options.jobs > 64 || options.seeds == 0) return std::nullopt;
  return options;
}

std::string RunSeed(const Options& options, uint64_t seed, bool trace, Coverage* coverage) {
  Run run(seed, options.broken, trace);
  if (!options.async || run.setup().async()) run.Go();
  for (size_t i = 0; i < kEvents; ++i) (*coverage)[i] += run.world().coverage()[i];
  return run.world().violation();
}

// Seeds first + job, first + job + jobs, ...
Outcome RunShare(const Options& options, uint64_t job) {
  Outcome outcome;
  for (uint64_t i = job; i < options.seeds && !outcome.failed; i += options.jobs) {
    alarm(60);  // a run that hangs ends the process
    outcome.failed_seed = options.first + i;
    const std::string violation = RunSeed(options, options.first + i, false, &outcome.coverage);
    ++outcome.ran;
    if (violation.empty()) continue;
    outcome.failed = true;
    std::strncpy(outcome.violation, violation.c_str(), sizeof(outcome.violation) - 1);
  }
  return outcome;
}

bool PrintCoverage(const Coverage& coverage) {
  bool all = true;
  for (size_t i = 0; i < kEvents; ++i) {
    std::printf("%10lu  %s%s\n", coverage[i], NameOf(static_cast<Event>(i)), coverage[i] == 0 ? "   NEVER" : "");
    all = all && coverage[i] > 0;
  }
  return all;
}

int RunAll(const Options& options) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<int> pipes;
  for (uint64_t job = 0; job < options.jobs; ++job) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return 1;
    std::fflush(stdout);
    const pid_t child = fork();
    if (child < 0) return 1;
    if (child == 0) {
      const Outcome outcome = RunShare(options, job);
      _exit(write(ends[1], &outcome, sizeof(outcome)) == sizeof(outcome) ? 0 : 1);
    }
    close(ends[1]);
    pipes.push_back(ends[0]);
  }
  Outcome all;
  for (int end : pipes) {
    Outcome outcome;
    if (read(end, &outcome, sizeof(outcome)) != sizeof(outcome)) {
      outcome.failed = all.died = true;
      std::strcpy(outcome.violation, "the process of these seeds died or hung (see --jobs=1)");
    }
    close(end);
    all.ran += outcome.ran;
    for (size_t i = 0; i < kEvents; ++i) all.coverage[i] += outcome.coverage[i];
    if (!outcome.failed || (all.failed && all.failed_seed <= outcome.failed_seed)) continue;
    all.failed = true;
    all.failed_seed = outcome.failed_seed;
    std::memcpy(all.violation, outcome.violation, sizeof(all.violation));
  }
  while (wait(nullptr) > 0) {
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (options.broken != Broken::kNothing) {
    if (all.died) return std::printf("%s\n", all.violation), 1;
    std::printf(all.failed ? "noticed by seed %lu (%lu seeds ran, %.1f s): %s\n"
                           : "NOT NOTICED (seed %lu; %lu seeds ran, %.1f s)%s\n",
                all.failed_seed, all.ran, seconds, all.violation);
    return all.failed ? 0 : 1;
  }
  const bool covered = PrintCoverage(all.coverage);
  std::printf("%lu seeds in %.1f s\n", all.ran, seconds);
  if (all.failed) {
    std::printf("seed %lu: %s\nIts trace: gradwire_sim --seed=%lu --trace\n", all.failed_seed, all.violation,
                all.failed_seed);
    return 1;
  }
  if (!covered && !options.async && options.seeds >= 1000) std::printf("some of the above never occurred\n");
  return covered || options.async || options.seeds < 1000 ? 0 : 1;
}

int Main(int argc, char** argv) {
  const std::optional<Options> options = Parse(argc, argv);
  if (!options) return std::fputs(kUsage, stderr), 2;
  spdlog::set_level(spdlog::level::off);
  if (!options->seed) return RunAll(*options);
  Coverage coverage{};
  const std::string violation = RunSeed(*options, *options->seed, options->trace, &coverage);
  std::printf("seed %lu: %s\n", *options->seed, violation.empty() ? "all invariants hold" : violation.c_str());
  return violation.empty() ? 0 : 1;
}

}  // namespace
}  // namespace gradwire::sim

int main(int argc, char** argv) { return gradwire::sim::Main(argc, argv); }
