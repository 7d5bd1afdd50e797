// What the parts of bench_exchange share: its knobs, its targets, and how sizes are named.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gradwire::bench {

inline constexpr size_t kMiB = 1 << 20;
inline constexpr size_t kSizes[] = {kMiB / 16, kMiB, 4 * kMiB, 16 * kMiB, 64 * kMiB};
inline constexpr size_t kTargetFrom = kMiB;  // smaller frames are measured, but promised nothing
inline constexpr double kGoodputTarget = 0.85;
inline constexpr double kCpuTarget = 1.6;
inline constexpr double kLatencyTarget = 1.6;

struct Config {
  size_t total_bytes = 0;  // moved per measurement of the bare transport
  int rounds = 0;
};

// Ends the benchmark where something that it takes for granted failed.
inline void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

inline double Seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline std::string SizeName(size_t bytes) {
  return bytes < kMiB ? absl::StrCat(bytes / 1024, " KiB") : absl::StrCat(bytes / kMiB, " MiB");
}

}  // namespace gradwire::bench
