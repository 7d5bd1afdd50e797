// bench_kernels: GB/s of each kernel next to memcpy and STREAM triad of the same arrays.
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/transport/malloc_tuning.h"
#include "tests/bench/kernels/timing.h"
#include "tests/bench/lib/flags.h"

namespace gradwire::bench {
namespace {

int Main(int argc, char** argv) {
  std::string name = "cpu", only;
  int mib = 64, rounds = 7;
  Flags flags(
      "kernels",
      "GB/s of each kernel next to memcpy and STREAM triad of the same arrays, one thread, interleaved. GB/s count "
      "the dense gradient's bytes, except in the dense section, where all bytes read and written count.");
  flags.Add("--backend", &name, "The arithmetic: reference, cpu, cpu:avx2, ...");
  flags.Add("--mib", &mib, "MiB of the dense gradient")->check(CLI::Range(1, 1 << 12));
  flags.Add("--rounds", &rounds, "Interleaved rounds; figures are their medians")->check(CLI::Range(1, 1 << 20));
  flags.Add("--only", &only, "Sections whose name contains this: dense, 0.1%, 1%, 3%, 5%, 10%, uniform, clustered");
  flags.Parse(argc, argv);
  transport::TuneMalloc();
  auto backend = kernels::MakeBackend(name);
  if (!backend.ok()) {
    std::fprintf(stderr, "bench_kernels: %s\n", std::string(backend.status().message()).c_str());
    return 2;
  }
  const Config config = {
      .elements = static_cast<size_t>(mib) << 18, .rounds = rounds, .only = only, .backend = backend->get()};
  Report report("kernels");
  report.Note("backend", std::string((*backend)->name()));
  report.Note("command",
              absl::StrCat("tests/bench/run kernels --backend=", name, " --mib=", mib, " --rounds=", config.rounds));
  const auto wanted = [&](const std::string& section) { return section.find(config.only) != std::string::npos; };
  if (wanted("dense")) MeasureDense(config, &report);
  for (double percent : {0.1, 1.0, 3.0, 5.0, 10.0}) {
    for (bool clustered : {false, true}) {
      if (wanted(absl::StrCat(percent, "% ", clustered ? "clustered" : "uniform"))) {
        MeasureSparse(config, percent / 100, clustered, &report);
      }
    }
  }
  report.Print();
  return report.WriteJson(flags.json());
}

}  // namespace
}  // namespace gradwire::bench

int main(int argc, char** argv) { return gradwire::bench::Main(argc, argv); }
