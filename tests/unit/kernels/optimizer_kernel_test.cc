// Optimizer steps against PyTorch's definitions in float64, and the same bits however a tensor is cut.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/backend.h"
#include "kernels/math/fixed_point.h"
#include "kernels/math/optimizer.h"

namespace gradwire::kernels {
namespace {

constexpr size_t kElements = 1001;

std::vector<float> Random(uint64_t seed, size_t n, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> out(n);
  for (float& v : out) v = normal(random);
  return out;
}

TEST(IntegerPower, AgreesWithTheLibrary) {
  for (double base : {0.9, 0.999, 0.5, 1.0, 0.0}) {
    for (uint64_t n : {0u, 1u, 2u, 7u, 1000u}) {
      const double expected = std::pow(base, static_cast<double>(n));
      EXPECT_NEAR(IntegerPower(base, n), expected, 1e-12 * expected);
    }
  }
}

TEST(AdamW, FollowsTorch) {
  auto backend = *MakeBackend("cpu");
  std::vector<float> p = Random(1, kElements, 1), m(kElements, 0), v(kElements, 0);
  std::vector<double> op(p.begin(), p.end()), om(kElements, 0), ov(kElements, 0);
  const double lr = 0.0078125, wd = 0.125, b1 = 0.875, b2 = 0.984375, eps = 1e-8f;
  for (uint64_t t = 1; t <= 50; ++t) {
    const std::vector<float> g = Random(100 + t, kElements, 0.01f);
    backend->AdamW(p.data(), g.data(), m.data(), v.data(), kElements,
                   MakeAdamW(static_cast<float>(lr), static_cast<float>(wd), static_cast<float>(b1),
                             static_cast<float>(b2), static_cast<float>(eps), t),
                   nullptr);
    for (size_t i = 0; i < kElements; ++i) {
      const double gi = g[i];
      op[i] *= 1 - lr * wd;
      om[i] = b1 * om[i] + (1 - b1) * gi;
      ov[i] = b2 * ov[i] + (1 - b2) * gi * gi;
      const double c1 = 1 - std::pow(b1, static_cast<double>(t)), c2 = 1 - std::pow(b2, static_cast<double>(t));
      op[i] -= lr / c1 * om[i] / (std::sqrt(ov[i]) / std::sqrt(c2) + eps);
    }
  }
  for (size_t i = 0; i < kElements; ++i) ASSERT_NEAR(p[i], op[i], 1e-5);
}

TEST(Sgd, FollowsTorch) {
  auto backend = *MakeBackend("cpu");
  for (float momentum : {0.0f, 0.875f}) {
    for (bool nesterov : {false, true}) {
      if (nesterov && momentum == 0) continue;
      std::vector<float> p = Random(2, kElements, 1), buffer(kElements, 0);
      std::vector<double> op(p.begin(), p.end()), ob(kElements, 0);
      const SgdCoefficients c = {0.03125f, 0.0625f, momentum, nesterov};
      for (int t = 0; t < 30; ++t) {
        const std::vector<float> g = Random(200 + t, kElements, 0.1f);
        backend->Sgd(p.data(), g.data(), momentum == 0 ? nullptr : buffer.data(), kElements, c, nullptr);
        for (size_t i = 0; i < kElements; ++i) {
          double d = static_cast<double>(g[i]) + 0.0625 * op[i];
          if (momentum != 0) {
            ob[i] = t == 0 ? d : static_cast<double>(momentum) * ob[i] + d;
            d = nesterov ? d + static_cast<double>(momentum) * ob[i] : ob[i];
          }
          op[i] -= 0.03125 * d;
        }
      }
      for (size_t i = 0; i < kElements; ++i) ASSERT_NEAR(p[i], op[i], 1e-5) << momentum << nesterov;
    }
  }
}

TEST(PlainStep, SparseAndDenseGiveTheSameBits) {
  auto backend = *MakeBackend("cpu");
  std::mt19937_64 random(3);
  std::vector<float> dense = Random(4, kElements, 1);
  std::vector<float> sparse = dense;
  const std::vector<float> start = dense;
  std::vector<float> mean(kElements, 0);
  std::vector<uint32_t> positions;
  std::vector<int32_t> integers;
  for (uint32_t i = 0; i < kElements; i += 1 + static_cast<uint32_t>(random() % 20)) {
    positions.push_back(500 + i);
    integers.push_back(static_cast<int32_t>(random() % 255) - 127);
    mean[i] = MeanOfInteger(integers.back(), PowerOfTwo(-9), 3);
  }
  backend->PlainStep(dense.data(), mean.data(), kElements, 0.1f, 0, nullptr);
  backend->SparsePlainStep(sparse.data(), positions.data(), integers.data(), positions.size(), 500, -9, 3, 0.1f,
                           nullptr);
  EXPECT_EQ(dense, sparse);
  EXPECT_NE(dense, start);
  std::vector<float> decayed = start;
  backend->PlainStep(decayed.data(), mean.data(), kElements, 0.1f, 0.5f, nullptr);
  for (size_t i = 0; i < kElements; ++i) {
    ASSERT_NEAR(
        decayed[i],
        static_cast<double>(start[i]) - 0.1 * (static_cast<double>(mean[i]) + 0.5 * static_cast<double>(start[i])),
        1e-6);
  }
}

// A shard may own any part of a tensor, at any alignment: the bits are those of the whole.
TEST(OptimizerSteps, GiveTheSameBitsForEverySplit) {
  auto backend = *MakeBackend("cpu");
  const std::vector<float> g = Random(5, kElements, 0.1f);
  const AdamWCoefficients adamw = MakeAdamW(0.001f, 0.1f, 0.9f, 0.999f, 1e-8f, 3);
  const SgdCoefficients sgd = {0.1f, 0.01f, 0.9f, true};
  const std::vector<float> p0 = Random(6, kElements, 1), m0 = Random(7, kElements, 0.1f);
  std::vector<float> v0 = Random(8, kElements, 0.1f);
  for (float& v : v0) v = v * v;
  const auto run = [&](size_t piece, bool use_adamw) {
    std::vector<float> p = p0, m = m0, v = v0;
    for (size_t begin = 0; begin < kElements; begin += piece) {
      const size_t n = std::min(piece, kElements - begin);
      if (use_adamw) {
        backend->AdamW(&p[begin], &g[begin], &m[begin], &v[begin], n, adamw, nullptr);
      } else {
        backend->Sgd(&p[begin], &g[begin], &m[begin], n, sgd, nullptr);
      }
    }
    p.insert(p.end(), m.begin(), m.end());
    p.insert(p.end(), v.begin(), v.end());
    return p;
  };
  for (bool use_adamw : {false, true}) {
    const std::vector<float> whole = run(kElements, use_adamw);
    for (size_t piece : {1u, 3u, 8u, 13u, 64u, 500u}) EXPECT_EQ(run(piece, use_adamw), whole) << piece;
    // And they are the bits of the scalar definition.
    for (size_t i = 0; i < kElements; ++i) {
      float m = m0[i], v = v0[i];
      ASSERT_EQ(whole[i], use_adamw ? AdamWStep(p0[i], g[i], &m, &v, adamw) : SgdMomentumStep(p0[i], g[i], &m, sgd));
    }
  }
}

}  // namespace
}  // namespace gradwire::kernels
