// What benchmarks share: medians of interleaved runs, a table that says met or missed, and the JSON.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/bench/lib/machine_load.h"

namespace gradwire::bench {

// The middle of `values` (the lower one of two); 0 for none.
double Median(std::vector<double> values);
// The value below which `fraction` of `values` lie.
double Quantile(std::vector<double> values, double fraction);

// Runs every contestant once, `rounds` times over, starting each round with another one, so that a disturbance of the
// machine hits all of them alike. Result: [contestant][round].
std::vector<std::vector<double>> Interleave(int rounds, const std::vector<std::function<double()>>& contestants);

// Of numerator / denominator over rounds, each pair from one round: the median, and the quartiles around it.
struct Ratio {
  Ratio(double single) : Ratio(single, single, single) {}  // NOLINT: of one measurement
  Ratio(double median, double low, double high) : median(median), low(low), high(high) {}
  double median;
  double low;
  double high;
};
Ratio MedianRatio(const std::vector<double>& numerator, const std::vector<double>& denominator);

struct Row {
  std::string name;  // "case" in the JSON
  double value = 0;
  std::string unit;
  std::optional<Ratio> ratio;
  std::string ratio_to;  // of what
  std::optional<double> target;
  bool smaller_is_better = false;  // the ratio meets its target from below
};

// A table on stdout and a file, with a note of what else the machine did since construction. Not thread-safe.
class Report {
 public:
  explicit Report(std::string name) : name_(std::move(name)) {}
  // Notes are printed above the table and stored: what the figures depend on.
  void Note(std::string key, std::string value) { notes_.emplace_back(std::move(key), std::move(value)); }
  void Add(Row row) { rows_.push_back(std::move(row)); }
  void Print() const;
  // Writes the JSON (an empty path: none) and returns the program's exit status, with a message where it is not 0: 1
  // when the file cannot be written, 2 when nothing was measured; then the file stays as it is.
  int WriteJson(const std::string& path) const;

 private:
  std::string name_;
  MachineLoad load_;
  std::vector<std::pair<std::string, std::string>> notes_;
  std::vector<Row> rows_;
};

}  // namespace gradwire::bench
