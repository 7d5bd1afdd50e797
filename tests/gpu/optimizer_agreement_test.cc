// Optimizer steps and the preconditioner: the CUDA kernels against the reference, bit for bit, over several steps.
#include <numeric>

#include "tests/gpu/agreement.h"

namespace gradwire::kernels::cuda {
namespace {

using OptimizerAgreement = Agreement;
GW_AGREEMENT_SUITE(OptimizerAgreement);

TEST_P(OptimizerAgreement, Sgd) {
  for (const SgdCoefficients& c : {SgdCoefficients{0.1f, 0.01f, 0.0f, false}, SgdCoefficients{0.1f, 0.01f, 0.9f, false},
                                   SgdCoefficients{1e-3f, 0.0f, 0.9f, true}}) {
    for (Pattern pattern : kPatterns) {
      for (size_t n : kFewLengths) {
        for (size_t words : {0u, 1u}) {
          std::vector<float> p = MakeValues(Pattern::kNormal, n, random_), momentum(n, 0.0f);
          auto dp = OnDevice(p, words * 4);
          auto dm = OnDevice(momentum);
          for (int step = 0; step < 3; ++step) {
            std::vector<float> g = MakeValues(pattern, n, random_);
            if (n > 2 && step == 2) g[n / 2] = std::numeric_limits<float>::quiet_NaN();
            auto dg = OnDevice(g, words * 4);
            backend().Sgd(dp.get(), dg.get(), c.momentum == 0 ? nullptr : dm.get(), n, c, nullptr);
            reference_->Sgd(p.data(), g.data(), c.momentum == 0 ? nullptr : momentum.data(), n, c, nullptr);
          }
          ASSERT_TRUE(SameBits(dp.Read(), p)) << n;
          ASSERT_TRUE(SameBits(dm.Read(), momentum)) << n;
        }
      }
    }
  }
}

TEST_P(OptimizerAgreement, AdamW) {
  for (Pattern pattern : kPatterns) {
    for (size_t n : kLengths) {
      for (size_t words : {0u, 3u}) {
        std::vector<float> p = MakeValues(Pattern::kNormal, n, random_), m(n, 0.0f), v(n, 0.0f);
        auto dp = OnDevice(p, words * 4);
        auto dm = OnDevice(m);
        auto dv = OnDevice(v, words * 4);
        for (uint64_t t = 1; t <= 3; ++t) {
          const std::vector<float> g = MakeValues(pattern, n, random_);
          const AdamWCoefficients c = MakeAdamW(1e-3f, 0.1f, 0.9f, 0.95f, 1e-8f, t);
          auto dg = OnDevice(g, words * 4);
          backend().AdamW(dp.get(), dg.get(), dm.get(), dv.get(), n, c, nullptr);
          reference_->AdamW(p.data(), g.data(), m.data(), v.data(), n, c, nullptr);
        }
        ASSERT_TRUE(SameBits(dp.Read(), p)) << n;
        ASSERT_TRUE(SameBits(dm.Read(), m)) << n;
        ASSERT_TRUE(SameBits(dv.Read(), v)) << n;
      }
    }
  }
}

TEST_P(OptimizerAgreement, AddsAndPlainSteps) {
  for (Pattern pattern : kPatterns) {
    for (size_t n : kFewLengths) {
      for (size_t words : {0u, 1u}) {
        std::vector<float> x = MakeValues(pattern, n, random_), v(n, 0.0f);
        const std::vector<float> y = MakeValues(pattern, n, random_);
        auto dx = OnDevice(x, words * 4);
        auto dy = OnDevice(y, words * 4);
        auto dv = OnDevice(v);
        const PreconditionCoefficients c = MakePrecondition(0.95f, 1e-8f, 2);
        backend().Add(dx.get(), dy.get(), n, nullptr);
        reference_->Add(x.data(), y.data(), n, nullptr);
        backend().AddPreconditioned(dx.get(), dy.get(), dv.get(), n, c, nullptr);
        reference_->AddPreconditioned(x.data(), y.data(), v.data(), n, c, nullptr);
        backend().PlainStep(dx.get(), dy.get(), n, 0.1f, 0.0f, nullptr);
        reference_->PlainStep(x.data(), y.data(), n, 0.1f, 0.0f, nullptr);
        backend().PlainStep(dx.get(), dy.get(), n, 0.1f, 0.01f, nullptr);
        reference_->PlainStep(x.data(), y.data(), n, 0.1f, 0.01f, nullptr);
        ASSERT_TRUE(SameBits(dx.Read(), x)) << n;
        ASSERT_TRUE(SameBits(dv.Read(), v)) << n;
      }
    }
  }
}

TEST_P(OptimizerAgreement, SparsePlainStep) {
  for (size_t n : kLengths) {
    const size_t parameters = 2 * n + 1;
    std::vector<float> p = MakeValues(Pattern::kNormal, parameters, random_);
    std::vector<uint32_t> positions(parameters);
    std::iota(positions.begin(), positions.end(), 4'000'000'000u);
    std::shuffle(positions.begin(), positions.end(), random_);
    positions.resize(n);
    std::vector<int32_t> integers(n);
    for (int32_t& q : integers) q = static_cast<int32_t>(random_());
    auto dp = OnDevice(p);
    auto dpos = OnDevice(positions);
    auto dint = OnDevice(integers);
    // Half of the elements first, by a count that only the device knows.
    const uint64_t half = n / 2;
    auto dhalf = OnDevice(std::vector<uint64_t>{half});
    backend().SparsePlainStepAsync(dp.get(), dpos.get(), dint.get(), {n, dhalf.get()}, 4'000'000'000u, -20, 3, 0.1f,
                                   nullptr);
    reference_->SparsePlainStep(p.data(), positions.data(), integers.data(), half, 4'000'000'000u, -20, 3, 0.1f,
                                nullptr);
    ASSERT_TRUE(SameBits(dp.Read(), p)) << n;
    backend().SparsePlainStep(dp.get(), dpos.get(), dint.get(), n, 4'000'000'000u, -20, 3, 0.1f, nullptr);
    reference_->SparsePlainStep(p.data(), positions.data(), integers.data(), n, 4'000'000'000u, -20, 3, 0.1f, nullptr);
    ASSERT_TRUE(SameBits(dp.Read(), p)) << n;
  }
}

}  // namespace
}  // namespace gradwire::kernels::cuda
