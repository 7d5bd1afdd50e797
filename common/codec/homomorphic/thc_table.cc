// See thc_table.h.
#include "common/codec/homomorphic/thc_table.h"

#include <cmath>
#include <limits>

namespace gradwire::homomorphic {
namespace {

constexpr int kHalvings = 10;

// e^-y for y >= 0: the series of a 2^kHalvings-th of it, squared as often.
double ExpOfMinus(double y) {
  const double r = y / (1 << kHalvings);
  double term = 1, sum = 1;
  for (int k = 1; k < 12; ++k) {
    term *= -r / k;
    sum += term;
  }
  for (int i = 0; i < kHalvings; ++i) sum *= sum;
  return sum;
}

double Density(double z) { return 0.3989422804014327 * ExpOfMinus(z * z / 2); }

// Integrals of the density times 1, z and z^2.
struct Moments {
  double zeroth = 0, first = 0, second = 0;
};

// Over [a, b], by Simpson's rule.
Moments Integrate(double a, double b, int pieces) {
  Moments m;
  const double step = (b - a) / (2 * pieces);
  for (int i = 0; i <= 2 * pieces; ++i) {
    const double z = a + step * i;
    const double weight = (i == 0 || i == 2 * pieces ? 1 : i % 2 == 1 ? 4 : 2) * step / 3 * Density(z);
    m.zeroth += weight;
    m.first += weight * z;
    m.second += weight * z * z;
  }
  return m;
}

}  // namespace

double NormalRange(double p) {
  // Newton's method from the left: the integral is concave, so no step goes too far.
  double t = 0;
  double left = (1 - p) / 2;  // beyond t
  for (int i = 0; i < 100; ++i) {
    const double step = left / Density(t);
    left -= Integrate(t, t + step, 64).zeroth;
    t += step;
    if (step < 1e-10) break;
  }
  return t;
}

std::vector<int8_t> ThcTable(uint32_t bits, uint32_t granularity, double p) {
  const size_t half = granularity / 2;
  const size_t positive = size_t{1} << (bits - 1);  // entries above 0
  const double unit = NormalRange(p) / static_cast<double>(half);
  std::vector<Moments> up_to(half + 1);  // over [0, i * unit]
  for (size_t i = 1; i <= half; ++i) {
    const Moments m = Integrate(unit * static_cast<double>(i - 1), unit * static_cast<double>(i), 4);
    const Moments& before = up_to[i - 1];
    up_to[i] = {before.zeroth + m.zeroth, before.first + m.first, before.second + m.second};
  }
  // A number z between neighbours a and b has the expected squared error (b - z)(z - a); here for a = i, b = j.
  const auto cost = [&](size_t i, size_t j) {
    const double a = unit * static_cast<double>(i), b = unit * static_cast<double>(j);
    return (a + b) * (up_to[j].first - up_to[i].first) - (up_to[j].second - up_to[i].second) -
           a * b * (up_to[j].zeroth - up_to[i].zeroth);
  };
  // best[k][j]: of k entries above 0 of which j is the largest, with their mirror images; before[k][j]: the one below
  // j.
  const double none = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> best(positive + 1, std::vector<double>(half + 1, none));
  std::vector<std::vector<size_t>> before(positive + 1, std::vector<size_t>(half + 1, 0));
  for (size_t j = 1; j <= half; ++j) {
    const double b = unit * static_cast<double>(j);
    best[1][j] = b * b * up_to[j].zeroth - up_to[j].second;  // between -j and j, half of it
  }
  for (size_t k = 2; k <= positive; ++k) {
    for (size_t j = k; j <= half; ++j) {
      for (size_t i = k - 1; i < j; ++i) {
        const double total = best[k - 1][i] + cost(i, j);
        if (total >= best[k][j]) continue;
        best[k][j] = total;
        before[k][j] = i;
      }
    }
  }
  std::vector<int8_t> table(2 * positive);
  size_t j = half;
  for (size_t k = positive; k > 0; j = before[k--][j]) {
    table[positive + k - 1] = static_cast<int8_t>(j);
    table[positive - k] = static_cast<int8_t>(-static_cast<int>(j));
  }
  return table;
}

}  // namespace gradwire::homomorphic
