// What the parts of bench_kernels share: a case, and running a set of them interleaved with memcpy and triad.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "tests/bench/lib/report.h"

namespace gradwire::bench {

struct Config {
  size_t elements = 0;  // of the gradient
  int rounds = 0;
  std::string only;  // substring of the sections to run; empty: all
  kernels::Backend* backend = nullptr;
};

// What a case is measured against.
enum class Against { kCopy, kTriad, kDenseAdd };

struct Case {
  std::string name;
  std::function<void()> run;      // timed
  std::function<void()> prepare;  // not timed; may be empty
  double bytes = 0;               // what GB/s counts: those of the dense gradient, or all that are moved
  Against against = Against::kCopy;
  std::optional<double> target;
  double items = 0;  // where not 0, nanoseconds per item are reported too
};

// Runs the cases and the three yardsticks interleaved and adds a row per case: GB/s, and the median over rounds of its
// rate over the yardstick's. The yardsticks count: copy the bytes copied (the payload), triad and dense add the bytes
// read and written.
void Measure(const Config& config, const std::string& section, const std::vector<Case>& cases, Report* report);

// Each element-wise kernel of the backend on dense arrays.
void MeasureDense(const Config& config, Report* report);
// Selection, encoding, merging and decoding at one density.
void MeasureSparse(const Config& config, double density, bool clustered, Report* report);

}  // namespace gradwire::bench
