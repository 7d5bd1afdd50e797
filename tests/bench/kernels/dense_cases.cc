// The element-wise kernels. GB/s count every byte read and written.
#include <cstring>
#include <random>

#include "common/base/large_array.h"
#include "kernels/math/optimizer.h"
#include "tests/bench/kernels/timing.h"

namespace gradwire::bench {
namespace {

using kernels::Sign;

constexpr double kAdamWTarget = 0.9;

LargeArray<float> Normal(size_t n, uint64_t seed, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  LargeArray<float> out(n);
  for (size_t i = 0; i < n; ++i) out[i] = i < 65536 ? normal(random) : out[i - 65536];
  return out;
}

}  // namespace

void MeasureDense(const Config& config, Report* report) {
  const size_t n = config.elements;
  kernels::Backend& b = *config.backend;
  LargeArray<float> p = Normal(n, 1, 1), g = Normal(n, 2, 0.01f), m(n, 0.0f), v(n, 1e-4f);
  LargeArray<int32_t> sums(n, 0);
  LargeArray<int64_t> grid(n, 0);
  LargeArray<uint8_t> bytes(4 * n);
  const double size = static_cast<double>(n);
  const kernels::AdamWCoefficients adamw = kernels::MakeAdamW(1e-4f, 0.01f, 0.9f, 0.999f, 1e-8f, 10);
  const kernels::SgdCoefficients sgd = {1e-4f, 0.0f, 0.9f, false};
  const kernels::PreconditionCoefficients precondition = kernels::MakePrecondition(0.999f, 1e-8f, 10);
  const uint8_t* floats = reinterpret_cast<const uint8_t*>(g.data());
  std::vector<Case> cases;
  const auto add = [&](const char* name, double bytes_per_element, Against against, std::function<void()> run) {
    cases.push_back({name, std::move(run), {}, bytes_per_element * size, against, {}, size});
  };
  add("AdamW", 28, Against::kTriad, [&] { b.AdamW(p.data(), g.data(), m.data(), v.data(), n, adamw, nullptr); });
  cases.back().target = kAdamWTarget;
  add("SGD with momentum", 20, Against::kTriad, [&] { b.Sgd(p.data(), g.data(), m.data(), n, sgd, nullptr); });
  add("PlainStep", 12, Against::kTriad, [&] { b.PlainStep(p.data(), g.data(), n, 1e-9f, 0.1f, nullptr); });
  add("Add", 12, Against::kTriad, [&] { b.Add(m.data(), g.data(), n, nullptr); });
  add("AddPreconditioned", 20, Against::kTriad,
      [&] { b.AddPreconditioned(m.data(), g.data(), v.data(), n, precondition, nullptr); });
  add("FindNonFinite", 4, Against::kTriad, [&] { b.FindNonFinite(g.data(), n, nullptr); });
  add("RangeOf", 4, Against::kTriad, [&] { b.RangeOf(g.data(), n, nullptr); });
  for (int width : {1, 2, 4}) {
    add(width == 1   ? "AddIntegers 1"
        : width == 2 ? "AddIntegers 2"
                     : "AddIntegers 4",
        8 + width, Against::kTriad,
        [&, width] { b.AddIntegers(sums.data(), bytes.data(), width, n, Sign::kAdd, nullptr); });
  }
  add("FindOutOfGrid", 4, Against::kTriad, [&] { b.FindOutOfGrid(floats, 4, n, kernels::kGridLimitBits, nullptr); });
  add("AddFloats fp32", 20, Against::kTriad, [&] { b.AddFloats(grid.data(), floats, 4, n, Sign::kAdd, nullptr); });
  add("AddFloats bf16", 18, Against::kTriad, [&] { b.AddFloats(grid.data(), floats, 2, n / 2, Sign::kAdd, nullptr); });
  cases.back().bytes /= 2;
  cases.back().items /= 2;
  LargeArray<int64_t> summed(n, 0);  // of gradients alone: in `grid` are sums of bf16 that are halves of their bits
  b.AddFloats(summed.data(), floats, 4, n, Sign::kAdd, nullptr);
  add("GridToMean", 12, Against::kTriad, [&] { b.GridToMean(summed.data(), n, 3, m.data(), nullptr); });
  add("FloatsToMean fp32", 8, Against::kTriad, [&] { b.FloatsToMean(floats, 4, n, 3, m.data()); });
  for (int width : {1, 2, 4}) {
    add(width == 1   ? "Quantize 1"
        : width == 2 ? "Quantize 2"
                     : "Quantize 4",
        8 + width, Against::kTriad, [&, width] { b.Quantize(m.data(), n, -12, 100, width, bytes.data(), nullptr); });
    add(width == 1   ? "Dequantize 1"
        : width == 2 ? "Dequantize 2"
                     : "Dequantize 4",
        8 + width, Against::kTriad, [&, width] { b.Dequantize(bytes.data(), width, n, -12, m.data(), nullptr); });
  }
  add("SplitBf16", 10, Against::kTriad,
      [&] { b.SplitBf16(m.data(), n, kernels::kLargestBf16, bytes.data(), nullptr); });
  add("AddBf16", 10, Against::kTriad, [&] { b.AddBf16(bytes.data(), n, m.data(), nullptr); });
  for (int width : {1, 2, 4}) {
    add(width == 1   ? "AddCells 1"
        : width == 2 ? "AddCells 2"
                     : "AddCells 4",
        3 * width, Against::kTriad, [&, width] {
          b.AddCells(reinterpret_cast<uint8_t*>(sums.data()), bytes.data(), width, n, Sign::kAdd, nullptr);
        });
  }
  Measure(config, "dense", cases, report);
}

}  // namespace gradwire::bench
