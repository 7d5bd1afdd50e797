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

// Runs of random lengths that cover n elements, with units and learning rates; and the bounds on the host.
struct Runs {
  std::vector<uint64_t> begin = {0};
  std::vector<int> exponents;
  std::vector<float> units;
  std::vector<float> rates;
};

Runs MakeRuns(size_t n, std::mt19937_64& random) {
  Runs runs;
  while (runs.begin.back() < n) {
    runs.begin.push_back(std::min<uint64_t>(n, runs.begin.back() + 1 + random() % (random() % 2 == 0 ? 3 : 700)));
    runs.exponents.push_back(static_cast<int>(random() % 145) + kMinExponent);
    runs.units.push_back(PowerOfTwo(runs.exponents.back()));
    runs.rates.push_back(0.01f * static_cast<float>(1 + random() % 5));
  }
  return runs;
}

TEST_P(OptimizerAgreement, MeansOfRuns) {
  for (size_t n : kLengths) {
    for (size_t words : {0u, 1u}) {
      const Runs runs = MakeRuns(n, random_);
      std::vector<int32_t> sums(n);
      for (int32_t& s : sums) s = random_() % 3 == 0 ? 0 : static_cast<int32_t>(random_());
      std::vector<float> means(n);
      std::vector<uint32_t> positions;
      std::vector<int32_t> integers;
      std::vector<float> scattered(n, -0.0f);
      for (size_t run = 0; run < runs.units.size(); ++run) {
        for (uint64_t i = runs.begin[run]; i < runs.begin[run + 1]; ++i) {
          means[i] = MeanOfInteger(sums[i], runs.units[run], 3);
          if (i % 5 != 2) continue;
          positions.push_back(static_cast<uint32_t>(i));
          integers.push_back(sums[i]);
          scattered[i] = means[i];
        }
      }
      auto begin = OnDevice(runs.begin);
      auto units = OnDevice(runs.units);
      auto dsums = OnDevice(sums, words * 4);
      const RunScales scales = {begin.get(), units.get(), static_cast<uint32_t>(runs.units.size())};
      auto out = OnDevice(std::vector<float>(n, 7.0f), words * 4);
      backend().MeansOfIntegers(dsums.get(), n, scales, 3, out.get(), nullptr);
      ASSERT_TRUE(SameBits(out.Read(), means)) << n;
      backend().MeansOfIntegers(dsums.get(), n, scales, 3, reinterpret_cast<float*>(dsums.get()), nullptr);
      ASSERT_EQ(BytesOf(dsums.Read()), BytesOf(means)) << n << ", in place";
      auto dpos = OnDevice(positions);
      auto dint = OnDevice(integers);
      auto some = OnDevice(std::vector<float>(n, -0.0f), words * 4);
      backend().ScatterMeans(dpos.get(), dint.get(), positions.size(), scales, 3, some.get(), nullptr);
      ASSERT_TRUE(SameBits(some.Read(), scattered)) << n;
    }
  }
}

TEST_P(OptimizerAgreement, SparsePlainStepsOfRuns) {
  for (size_t n : kLengths) {
    const Runs runs = MakeRuns(n, random_);
    const std::vector<float> p = MakeValues(Pattern::kNormal, n, random_);
    std::vector<float> expected = p;
    std::vector<uint32_t> positions;
    std::vector<int32_t> integers;
    auto dp = OnDevice(p);
    for (size_t run = 0; run < runs.units.size(); ++run) {
      const size_t first = positions.size();
      for (uint64_t i = runs.begin[run]; i < runs.begin[run + 1]; ++i) {
        if (random_() % 3 != 0) continue;
        positions.push_back(static_cast<uint32_t>(i));
        integers.push_back(static_cast<int32_t>(random_()));
      }
      reference_->SparsePlainStep(expected.data() + runs.begin[run], positions.data() + first, integers.data() + first,
                                  positions.size() - first, static_cast<uint32_t>(runs.begin[run]), runs.exponents[run],
                                  5, runs.rates[run], nullptr);
    }
    auto begin = OnDevice(runs.begin);
    auto units = OnDevice(runs.units);
    auto rates = OnDevice(runs.rates);
    // Runs lie wherever they lie: here in two arrays.
    auto other = OnDevice(p);
    std::vector<float*> pointers;
    for (size_t run = 0; run < runs.units.size(); ++run)
      pointers.push_back((run % 3 == 1 ? other : dp).get() + runs.begin[run]);
    auto where = OnDevice(pointers);
    auto dpos = OnDevice(positions);
    auto dint = OnDevice(integers);
    backend().SparsePlainSteps(where.get(), dpos.get(), dint.get(), positions.size(),
                               {begin.get(), units.get(), static_cast<uint32_t>(runs.units.size())}, rates.get(), 5,
                               nullptr);
    std::vector<float> found = dp.Read();
    const std::vector<float> in_other = other.Read();
    for (size_t run = 1; run < runs.units.size(); run += 3)
      std::copy(in_other.begin() + static_cast<ptrdiff_t>(runs.begin[run]),
                in_other.begin() + static_cast<ptrdiff_t>(runs.begin[run + 1]),
                found.begin() + static_cast<ptrdiff_t>(runs.begin[run]));
    ASSERT_TRUE(SameBits(found, expected)) << n;
  }
}

// What a worker does with a gradient: decay and addition in one pass, with or without its own second moment.
TEST_P(OptimizerAgreement, TakesInGradients) {
  for (Pattern pattern : kPatterns) {
    for (size_t n : kFewLengths) {
      for (size_t words : {0u, 1u}) {
        for (const float decay : {1.0f, 0.98f}) {
          std::vector<float> x = MakeValues(pattern, n, random_), step = x, v(n, 0.0f);
          const std::vector<float> g = MakeValues(pattern, n, random_);
          auto dx = OnDevice(x, words * 4);
          auto dstep = OnDevice(step, words * 4);
          auto dg = OnDevice(g, words * 4);
          auto dv = OnDevice(v);
          auto good = OnDevice(std::vector<uint64_t>{~uint64_t{0}});
          auto bad = OnDevice(std::vector<uint64_t>{n / 2});
          const PreconditionCoefficients c = MakePrecondition(0.95f, 1e-8f, 2);
          backend().TakeIn(dx.get(), dg.get(), nullptr, n, decay, c, nullptr, nullptr);
          backend().TakeIn(dstep.get(), dg.get(), dv.get(), n, decay, c, good.get(), nullptr);
          for (float& e : x) e *= decay;
          for (float& e : step) e *= decay;
          reference_->Add(x.data(), g.data(), n, nullptr);
          reference_->AddPreconditioned(step.data(), g.data(), v.data(), n, c, nullptr);
          ASSERT_TRUE(SameBits(dx.Read(), x)) << n;
          ASSERT_TRUE(SameBits(dstep.Read(), step)) << n;
          ASSERT_TRUE(SameBits(dv.Read(), v)) << n;
          backend().TakeIn(dx.get(), dg.get(), nullptr, n, decay, c, bad.get(), nullptr);
          backend().TakeIn(dstep.get(), dg.get(), dv.get(), n, decay, c, bad.get(), nullptr);
          ASSERT_TRUE(SameBits(dx.Read(), x)) << n << ", bad";
          ASSERT_TRUE(SameBits(dstep.Read(), step)) << n << ", bad";
          ASSERT_TRUE(SameBits(dv.Read(), v)) << n << ", bad";
        }
      }
    }
  }
}

}  // namespace
}  // namespace gradwire::kernels::cuda
