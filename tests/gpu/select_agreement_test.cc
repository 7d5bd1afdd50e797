// Histograms, the threshold, and taking what is selected: the CUDA kernels against the reference, bit for bit.
#include "kernels/math/select.h"
#include "tests/gpu/agreement.h"

namespace gradwire::kernels::cuda {
namespace {

using SelectAgreement = Agreement;
GW_AGREEMENT_SUITE(SelectAgreement);

constexpr size_t kUpperBins = size_t{1} << kUpperBits;
constexpr size_t kLowerBins = size_t{1} << kLowerBits;

TEST_P(SelectAgreement, Histograms) {
  for (Pattern pattern : kPatterns) {
    for (size_t n : kLengths) {
      for (size_t words : {0u, 1u}) {
        std::vector<float> x = MakeValues(pattern, n, random_);
        if (n > 2) x[n / 3] = std::numeric_limits<float>::quiet_NaN();
        std::vector<uint64_t> upper(kUpperBins, 99), lower(kLowerBins, 99);
        auto dx = OnDevice(x, words * 4);
        auto du = OnDevice(upper);
        auto dl = OnDevice(lower);
        backend().UpperHistogram(dx.get(), n, du.get(), nullptr);
        reference_->UpperHistogram(x.data(), n, upper.data(), nullptr);
        ASSERT_EQ(du.Read(), upper) << n;
        for (uint32_t bin : {0u, KeyOf(1.0f) >> kLowerBits, static_cast<uint32_t>(kUpperBins) - 1}) {
          backend().LowerHistogram(dx.get(), n, bin, dl.get(), nullptr);
          reference_->LowerHistogram(x.data(), n, bin, lower.data(), nullptr);
          ASSERT_EQ(dl.Read(), lower) << n << ", bin " << bin;
        }
      }
    }
  }
}

TEST_P(SelectAgreement, TakeSelected) {
  for (Pattern pattern : kPatterns) {
    for (size_t n : kLengths) {
      for (size_t words : {0u, 1u}) {
        for (float threshold : {0.0f, 1.0f, 0x1p-130f, 2.5f}) {
          for (uint64_t keep : {uint64_t{0}, uint64_t{1} << 30, uint64_t{1} << 32}) {
            std::vector<float> x = MakeValues(pattern, n, random_);
            const SelectArgs args = {KeyOf(threshold), keep, 12345, 1'000'000'007, -6, 127};
            std::vector<uint32_t> positions(n, 7);
            std::vector<int32_t> integers(n, 7);
            auto dx = OnDevice(x, words * 4);
            auto dp = OnDevice(positions);
            auto di = OnDevice(integers);
            const size_t taken = backend().TakeSelected(dx.get(), n, args, 500, dp.get(), di.get(), nullptr);
            ASSERT_EQ(taken,
                      reference_->TakeSelected(x.data(), n, args, 500, positions.data(), integers.data(), nullptr));
            ASSERT_TRUE(SameBits(dx.Read(), x)) << n << ", threshold " << threshold;
            ASSERT_EQ(dp.Read(), positions);
            ASSERT_EQ(di.Read(), integers);
          }
        }
      }
    }
  }
}

// Threshold, selection and count stay on the device from one kernel to the next.
TEST_P(SelectAgreement, ThresholdFoundOnTheDeviceIsTheOneFoundOnTheHost) {
  for (Pattern pattern : kPatterns) {
    for (size_t n : kFewLengths) {
      for (double density : {0.0, 0.001, 0.01, 0.1, 0.5, 1.0}) {
        std::vector<float> x = MakeValues(pattern, n, random_);
        std::vector<uint32_t> positions(n, 7);
        std::vector<int32_t> integers(n, 7);
        const double wanted = density * static_cast<double>(n);
        const Threshold expected = reference_->FindThreshold(x.data(), n, wanted, Accuracy::kExact, nullptr);
        auto dx = OnDevice(x);
        auto dp = OnDevice(positions);
        auto di = OnDevice(integers);
        auto dcount = OnDevice(std::vector<uint64_t>{99});
        auto dselection = OnDevice(std::vector<DeviceSelection>(1));
        SelectArgs args = {1, 2, 777, 0, -10, 32767};
        backend().FindThresholdAsync(dx.get(), n, wanted, Accuracy::kExact, dselection.get(), nullptr);
        backend().TakeSelectedAsync(dx.get(), n, args, dselection.get(), 0, dp.get(), di.get(), dcount.get(), nullptr);
        const DeviceSelection found = dselection.Read()[0];
        ASSERT_EQ(found.key, expected.key) << n << ", density " << density;
        ASSERT_EQ(found.keep_below, expected.keep_below) << n << ", density " << density;
        args.key = expected.key;
        args.keep_below = expected.keep_below;
        const size_t taken = reference_->TakeSelected(x.data(), n, args, 0, positions.data(), integers.data(), nullptr);
        ASSERT_EQ(dcount.Read()[0], taken);
        ASSERT_TRUE(SameBits(dx.Read(), x));
        ASSERT_EQ(dp.Read(), positions);
        ASSERT_EQ(di.Read(), integers);
      }
    }
  }
}

// Estimates from samples of ragged arrays, with vectors and without.
TEST_P(SelectAgreement, ThresholdEstimatedOnTheDeviceIsTheOneEstimatedOnTheHost) {
  for (Pattern pattern : kPatterns) {
    for (size_t words : {0u, 1u}) {
      std::vector<float> x = MakeValues(pattern, 2'700'017, random_);
      x[x.size() / 3] = std::numeric_limits<float>::quiet_NaN();
      auto dx = OnDevice(x, words * 4);
      for (double density : {0.01, 0.1, 0.2, 0.7, 1.0}) {
        const double wanted = density * static_cast<double>(x.size());
        const Threshold expected = reference_->FindThreshold(x.data(), x.size(), wanted, Accuracy::kEstimate, nullptr);
        auto dselection = OnDevice(std::vector<DeviceSelection>(1));
        backend().FindThresholdAsync(dx.get(), x.size(), wanted, Accuracy::kEstimate, dselection.get(), nullptr);
        const DeviceSelection found = dselection.Read()[0];
        ASSERT_EQ(found.key, expected.key) << "density " << density;
        ASSERT_EQ(found.keep_below, expected.keep_below) << "density " << density;
      }
    }
  }
}

// What is wanted ends exactly where a bin ends, one element before, and one after; in the upper and in the lower bins.
TEST_P(SelectAgreement, ThresholdAtTheEdgesOfBins) {
  for (const auto& [high, low] : {std::pair{4.0f, 1.0f}, std::pair{1.0f, 0x1.FFF0p-1f}, std::pair{0x1.001p0f, 1.0f}}) {
    std::vector<float> x(4096, 0.0f);
    for (size_t i = 0; i < 1000; ++i) x[4 * i] = i < 300 ? high : -low;
    auto dx = OnDevice(x);
    for (double wanted : {0.0, 0.5, 1.0, 299.0, 299.5, 300.0, 300.5, 301.0, 999.0, 1000.0, 1001.0, 4096.0}) {
      const Threshold expected = reference_->FindThreshold(x.data(), x.size(), wanted, Accuracy::kExact, nullptr);
      const Threshold found = backend().FindThreshold(dx.get(), x.size(), wanted, Accuracy::kExact, nullptr);
      EXPECT_EQ(found.key, expected.key) << wanted;
      EXPECT_EQ(found.keep_below, expected.keep_below) << wanted;
    }
  }
}

TEST_P(SelectAgreement, AsynchronousReductions) {
  for (size_t n : kFewLengths) {
    std::vector<float> x = MakeValues(Pattern::kWide, n, random_);
    if (n > 100) x[n - 7] = std::numeric_limits<float>::infinity();
    auto dx = OnDevice(x);
    auto first = OnDevice(std::vector<uint64_t>{5, 5});
    auto largest = OnDevice(std::vector<uint32_t>{5});
    backend().FindNonFiniteAsync(dx.get(), n, first.get(), nullptr);
    backend().FindOutOfGridAsync(reinterpret_cast<uint8_t*>(dx.get()), 4, n, kGridLimitBits, first.get() + 1, nullptr);
    backend().LargestMagnitudeAsync(dx.get(), n, largest.get(), nullptr);
    const auto* bytes = reinterpret_cast<const uint8_t*>(x.data());
    EXPECT_EQ(static_cast<int64_t>(first.Read()[0]), reference_->FindNonFinite(x.data(), n, nullptr));
    EXPECT_EQ(static_cast<int64_t>(first.Read()[1]), reference_->FindOutOfGrid(bytes, 4, n, kGridLimitBits, nullptr));
    uint32_t most = 0;
    for (float v : x) most = std::max(most, std::bit_cast<uint32_t>(std::abs(v)));
    EXPECT_EQ(largest.Read()[0], most);
  }
}

// A bucket in three pieces of ragged runs: ranges, and what is taken, as run by run on the host.
TEST_P(SelectAgreement, PiecesOfABucket) {
  for (Pattern pattern : kPatterns) {
    for (size_t n : kLengths) {
      for (size_t words : {0u, 1u}) {
        std::vector<float> x = MakeValues(pattern, n, random_);
        std::vector<uint64_t> begin = {0};
        std::vector<int> exponents;
        std::vector<float> units;
        while (begin.back() < n) {
          begin.push_back(std::min<uint64_t>(n, begin.back() + 1 + random_() % 900));
          exponents.push_back(static_cast<int>(random_() % 20) - 15);
          units.push_back(PowerOfTwo(exponents.back()));
        }
        const size_t runs = units.size();
        std::vector<uint32_t> positions(n, 7), expected_largest(runs, 0);
        std::vector<int32_t> integers(n, 7);
        auto dx = OnDevice(x, words * 4);
        auto dbegin = OnDevice(begin);
        auto dunits = OnDevice(units);
        auto dpositions = OnDevice(positions);
        auto dintegers = OnDevice(integers);
        auto dlargest = OnDevice(std::vector<uint32_t>(runs, 9));
        auto dcounts = OnDevice(std::vector<uint64_t>(4, 0));
        const RunScales scales = {dbegin.get(), dunits.get(), static_cast<uint32_t>(runs)};
        const SelectArgs args = {KeyOf(0.5f), uint64_t{1} << 31, 777, 1000, 0, 32767};
        size_t taken = 0;
        const size_t bounds[] = {0, runs / 3, runs / 2, runs};
        for (size_t piece = 0; piece < 3; ++piece) {
          const size_t first = bounds[piece], last = bounds[piece + 1];
          const uint64_t at = begin[first], size = begin[last] - at;
          if (size == 0) {
            backend().runtime().Copy(dcounts.get() + piece + 1, dcounts.get() + piece, 8, nullptr);
            continue;
          }
          backend().LargestOfRuns(dx.get() + at, dbegin.get(), static_cast<uint32_t>(first),
                                  static_cast<uint32_t>(last - first), dlargest.get() + first, nullptr);
          backend().AppendSelectedAsync(dx.get() + at, size, args, nullptr, scales, static_cast<uint32_t>(at),
                                        dpositions.get(), dintegers.get(), dcounts.get() + piece,
                                        dcounts.get() + piece + 1, nullptr);
          for (size_t run = first; run < last; ++run) {
            for (uint64_t i = begin[run]; i < begin[run + 1]; ++i) {
              expected_largest[run] = std::max(expected_largest[run], std::bit_cast<uint32_t>(std::abs(x[i])));
            }
            SelectArgs of_run = args;
            of_run.first_element += begin[run] - at;
            of_run.exponent = exponents[run];
            taken += reference_->TakeSelected(&x[begin[run]], begin[run + 1] - begin[run], of_run,
                                              static_cast<uint32_t>(begin[run]), &positions[taken], &integers[taken],
                                              nullptr);
          }
        }
        ASSERT_EQ(dlargest.Read(), expected_largest) << n;
        ASSERT_EQ(dcounts.Read()[3], taken) << n;
        ASSERT_TRUE(SameBits(dx.Read(), x)) << n;
        positions.resize(taken);
        integers.resize(taken);
        std::vector<uint32_t> device_positions = dpositions.Read();
        std::vector<int32_t> device_integers = dintegers.Read();
        for (size_t i = taken; i < n; ++i) ASSERT_EQ(device_positions[i], 7u) << "written behind what was taken";
        device_positions.resize(taken);
        device_integers.resize(taken);
        ASSERT_EQ(device_positions, positions) << n;
        ASSERT_EQ(device_integers, integers) << n;
      }
    }
  }
}

TEST_P(SelectAgreement, QuantizeRuns) {
  for (int width : {2, 4}) {
    for (size_t n : kLengths) {
      for (size_t offset : {0u, 1u}) {
        std::vector<float> x = MakeValues(Pattern::kNormal, n, random_);
        std::vector<uint8_t> q(n * static_cast<size_t>(width), 3);
        std::vector<uint64_t> begin = {0, 100};  // x begins within the second run
        std::vector<float> units = {1.0f};
        auto dx = OnDevice(x, offset * 4);
        auto dq = OnDevice(q, offset * 2);
        while (begin.back() < 150 + n) {
          const uint64_t from = begin.back();
          begin.push_back(std::min<uint64_t>(150 + n, from + (from < 150 ? 51 : 1) + random_() % 900));
          const int exponent = static_cast<int>(random_() % 20) - 15;
          const bool unscaled = random_() % 4 == 0;
          units.push_back(unscaled ? 0.0f : PowerOfTwo(exponent));
          const uint64_t first = std::max<uint64_t>(from, 150) - 150, size = begin.back() - 150 - first;
          uint8_t* out = q.data() + first * static_cast<size_t>(width);
          if (unscaled) {
            std::fill_n(out, size * static_cast<size_t>(width), uint8_t{0});
          } else {
            reference_->Quantize(x.data() + first, size, exponent, 30'000, width, out, nullptr);
          }
        }
        auto dbegin = OnDevice(begin);
        auto dunits = OnDevice(units);
        backend().QuantizeRuns(dx.get(), n, {dbegin.get(), dunits.get(), static_cast<uint32_t>(units.size())}, 150,
                               30'000, width, dq.get(), nullptr);
        ASSERT_EQ(dq.Read(), q) << "width " << width << ", n " << n;
        ASSERT_TRUE(SameBits(dx.Read(), x)) << "width " << width << ", n " << n;
      }
    }
  }
}

}  // namespace
}  // namespace gradwire::kernels::cuda
