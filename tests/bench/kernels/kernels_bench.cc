// bench_kernels: GB/s of each kernel next to memcpy and STREAM triad of the same arrays, one thread, interleaved.
//   --backend=NAME  as for MakeBackend (default cpu)       --json=F  where the JSON goes
//   --mib=N         of the dense gradient (default 64)     --rounds=N  interleaved rounds (default 7)
//   --only=TEXT     sections whose name contains TEXT: dense, 0.1%, 1%, 3%, 5%, 10%, uniform, clustered
// GB/s count the dense gradient's bytes, except in the dense section, where all bytes read and written count.
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/transport/malloc_tuning.h"
#include "tests/bench/kernels/timing.h"

namespace gradwire::bench {
namespace {

int Main(int argc, char** argv) {
  transport::TuneMalloc();
  const std::string name = Flag(argc, argv, "backend", "cpu");
  auto backend = kernels::MakeBackend(name);
  if (!backend.ok()) {
    std::fprintf(stderr, "bench_kernels: %s\n", std::string(backend.status().message()).c_str());
    return 2;
  }
  const int mib = std::stoi(Flag(argc, argv, "mib", "64"));
  const Config config = {.elements = static_cast<size_t>(mib) << 18,
                         .rounds = std::stoi(Flag(argc, argv, "rounds", "7")),
                         .only = Flag(argc, argv, "only", ""),
                         .backend = backend->get()};
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
  return report.WriteJson(Flag(argc, argv, "json", "")) ? 0 : 1;
}

}  // namespace
}  // namespace gradwire::bench

int main(int argc, char** argv) { return gradwire::bench::Main(argc, argv); }
