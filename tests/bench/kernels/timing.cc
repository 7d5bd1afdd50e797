// See timing.h.
#include "tests/bench/kernels/timing.h"

#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/large_array.h"

namespace gradwire::bench {
namespace {

double Seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The yardsticks' arrays, as long as the gradient.
struct Yardsticks {
  explicit Yardsticks(size_t n) : a(n, 1.0f), b(n, 2.0f), c(n, 3.0f) {}

  double Copy() {
    return 4 * Rate(Seconds([this] { std::memcpy(a.data(), b.data(), a.size() * sizeof(float)); }));
  }
  // a = b + s * c (McCalpin, STREAM).
  double Triad() {
    return 12 * Rate(Seconds([this] {
             for (size_t i = 0; i < a.size(); ++i) a[i] = b[i] + 3.0f * c[i];
           }));
  }
  double DenseAdd() {
    return 4 * Rate(Seconds([this] {
             for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
           }));
  }
  double Rate(double seconds) const { return 1e-9 * static_cast<double>(a.size()) / seconds; }

  LargeArray<float> a, b, c;
};

const char* NameOf(Against against) {
  switch (against) {
    case Against::kCopy:
      return "memcpy";
    case Against::kTriad:
      return "STREAM triad";
    default:
      return "dense fp32 add";
  }
}

}  // namespace

void Measure(const Config& config, const std::string& section, const std::vector<Case>& cases, Report* report) {
  Yardsticks yardsticks(config.elements);
  std::vector<std::function<double()>> contestants = {
      [&] { return yardsticks.Copy(); }, [&] { return yardsticks.Triad(); }, [&] { return yardsticks.DenseAdd(); }};
  for (const Case& c : cases) {
    contestants.push_back([&c] {
      if (c.prepare) c.prepare();
      return 1e-9 * c.bytes / Seconds(c.run);
    });
  }
  for (const auto& contestant : contestants) contestant();  // pages are mapped, buffers have grown
  const std::vector<std::vector<double>> rates = Interleave(config.rounds, contestants);
  for (size_t y = 0; y < 3; ++y) {
    report->Add({absl::StrCat(section, ": ", NameOf(static_cast<Against>(y))), Median(rates[y]), "GB/s", {}, "", {}});
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const double rate = Median(rates[3 + i]);
    std::string name = absl::StrCat(section, ": ", c.name);
    if (c.items != 0) absl::StrAppendFormat(&name, " [%.2f ns/item]", c.bytes / rate / c.items);
    report->Add({std::move(name), rate, "GB/s", MedianRatio(rates[3 + i], rates[static_cast<size_t>(c.against)]),
                 NameOf(c.against), c.target});
  }
}

}  // namespace gradwire::bench
