// See report.h.
#include "tests/bench/lib/report.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

namespace gradwire::bench {
namespace {

bool Met(const Row& row) {
  return row.smaller_is_better ? row.ratio->median <= *row.target : row.ratio->median >= *row.target;
}

// Model name, cores and memory of this machine.
std::string Machine() {
  std::string model = "unknown processor";
  std::ifstream cpu("/proc/cpuinfo");
  for (std::string line; std::getline(cpu, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    model = line.substr(line.find(':') + 2);
    break;
  }
  return model + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores";
}

}  // namespace

double Quantile(std::vector<double> values, double fraction) {
  if (values.empty()) return 0;
  const size_t index = static_cast<size_t>(fraction * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(index), values.end());
  return values[index];
}

double Median(std::vector<double> values) { return Quantile(std::move(values), 0.5); }

std::vector<std::vector<double>> Interleave(int rounds, const std::vector<std::function<double()>>& contestants) {
  std::vector<std::vector<double>> results(contestants.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < contestants.size(); ++i) {
      const size_t who = (i + static_cast<size_t>(round)) % contestants.size();
      results[who].push_back(contestants[who]());
    }
  }
  return results;
}

Ratio MedianRatio(const std::vector<double>& numerator, const std::vector<double>& denominator) {
  std::vector<double> ratios;
  for (size_t i = 0; i < numerator.size(); ++i) ratios.push_back(numerator[i] / denominator[i]);
  return {Median(ratios), Quantile(ratios, 0.25), Quantile(ratios, 0.75)};
}

void Report::Print() const {
  std::printf("%s on %s\n", name_.c_str(), Machine().c_str());
  for (const auto& [key, value] : notes_) std::printf("  %s: %s\n", key.c_str(), value.c_str());
  if (const std::string load = load_.Describe(); !load.empty()) std::printf("  meanwhile: %s\n", load.c_str());
  std::printf("%-44s %12s %-10s %8s %-15s %-22s %8s\n", "case", "value", "unit", "ratio", " (quartiles)", "to",
              "target");
  for (const Row& row : rows_) {
    std::printf("%-44s %12.4g %-10s ", row.name.c_str(), row.value, row.unit.c_str());
    if (row.ratio) {
      std::printf("%8.3f (%5.3f-%5.3f)  %-22s", row.ratio->median, row.ratio->low, row.ratio->high,
                  row.ratio_to.c_str());
    } else {
      std::printf("%8s %-15s %-22s", "", "", "");
    }
    if (row.ratio && row.target)
      std::printf(" %s %5.2f  %s", row.smaller_is_better ? "<=" : ">=", *row.target, Met(row) ? "met" : "missed");
    std::printf("\n");
  }
}

int Report::WriteJson(const std::string& path) const {
  if (rows_.empty()) {
    std::fprintf(stderr, "bench_%s: nothing was measured: its flags leave nothing over (--help)\n", name_.c_str());
    return 2;
  }
  if (path.empty()) return 0;
  nlohmann::ordered_json json;
  json["name"] = name_;
  json["machine"] = Machine();
  for (const auto& [key, value] : notes_) json["notes"][key] = value;
  if (const std::string load = load_.Describe(); !load.empty()) json["notes"]["meanwhile"] = load;
  json["rows"] = nlohmann::ordered_json::array();
  for (const Row& row : rows_) {
    nlohmann::ordered_json out;
    out["case"] = row.name;
    out["value"] = row.value;
    out["unit"] = row.unit;
    out["ratio"] = row.ratio ? nlohmann::ordered_json(row.ratio->median) : nlohmann::ordered_json(nullptr);
    if (row.ratio) out["ratio_quartiles"] = {row.ratio->low, row.ratio->high};
    out["ratio_to"] = row.ratio ? nlohmann::ordered_json(row.ratio_to) : nlohmann::ordered_json(nullptr);
    out["target"] = row.target ? nlohmann::ordered_json(*row.target) : nlohmann::ordered_json(nullptr);
    out["met"] = row.ratio && row.target ? nlohmann::ordered_json(Met(row)) : nlohmann::ordered_json(nullptr);
    json["rows"].push_back(std::move(out));
  }
  std::ofstream file(path);
  file << json.dump(2) << "\n";
  if (file.flush()) return 0;
  std::fprintf(stderr, "bench_%s: cannot write '%s': %s\n", name_.c_str(), path.c_str(), std::strerror(errno));
  return 1;
}

}  // namespace gradwire::bench
