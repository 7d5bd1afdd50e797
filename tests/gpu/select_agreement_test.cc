// Histograms, the threshold, and taking what is selected: the CUDA kernels against the reference, bit for bit.
#include <algorithm>
#include <numeric>

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

// Ragged runs that fill a bucket of n elements and lie anywhere in an array, aligned or not, some longer than a tile.
struct ScatteredRuns {
  ScatteredRuns(size_t n, std::mt19937_64& random) {
    for (size_t position = 0; position < n;) {
      const size_t most = random() % 8 == 0 ? 40'000 : 900;
      const size_t length = std::min(n - position, 1 + random() % most);
      const int exponent = static_cast<int>(random() % 20) - 15;
      runs.push_back({.position = position, .length = length, .exponent = exponent, .unscaled = random() % 8 == 0});
      position += length;
    }
    std::vector<size_t> order(runs.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t r : order) {
      elements += random() % 5;
      runs[r].at = elements;
      elements += runs[r].length;
    }
  }

  // In an array at x.
  std::vector<RunPlace> PlacesIn(float* x, const SelectArgs& args) const {
    std::vector<RunPlace> places;
    for (const Run& run : runs) {
      RunPlace& place = places.emplace_back();
      place.x = x + run.at;
      place.keep_below = args.keep_below;
      place.first_element = args.first_element + run.position;
      place.key = args.key;
      place.phase = args.phase;
      place.length = static_cast<uint32_t>(run.length);
      place.position = static_cast<uint32_t>(run.position);
      place.unit = run.unscaled ? 0.0f : PowerOfTwo(run.exponent);
    }
    return places;
  }
  RunPlaces Table(const RunPlace* places) const {
    size_t longest = 0;
    for (const Run& run : runs) longest = std::max(longest, run.length);
    return {places, static_cast<uint32_t>(runs.size()), static_cast<uint32_t>(longest)};
  }

  struct Run {
    size_t position = 0;
    size_t length = 0;
    int exponent = 0;
    bool unscaled = false;
    size_t at = 0;
  };
  std::vector<Run> runs;
  size_t elements = 0;  // of the array
};

TEST_P(SelectAgreement, RunsOfABucketAreTakenAsRunByRun) {
  for (Pattern pattern : kPatterns) {
    for (size_t n : kLengths) {
      for (size_t words : {0u, 1u}) {
        ScatteredRuns bucket(n, random_);
        for (auto& run : bucket.runs) run.unscaled = false;
        std::vector<float> x = MakeValues(pattern, bucket.elements, random_);
        std::vector<uint32_t> positions(n, 7), largest(bucket.runs.size(), 0);
        std::vector<int32_t> integers(n, 7);
        const SelectArgs args = {KeyOf(0.5f), uint64_t{1} << 31, 777, 1000, 0, 32767};
        auto dx = OnDevice(x, words * 4);
        auto dplaces = OnDevice(bucket.PlacesIn(dx.get(), args));
        auto dpositions = OnDevice(positions);
        auto dintegers = OnDevice(integers);
        auto dlargest = OnDevice(std::vector<uint32_t>(bucket.runs.size(), 9));
        auto dtaken = OnDevice(std::vector<uint64_t>{99});
        const RunPlaces table = bucket.Table(dplaces.get());
        backend().LargestOfRuns(table, dlargest.get(), nullptr);
        backend().TakeSelectedOfRuns(table, args.limit, dpositions.get(), dintegers.get(), dtaken.get(), nullptr);
        size_t taken = 0;
        for (size_t r = 0; r < bucket.runs.size(); ++r) {
          const ScatteredRuns::Run& run = bucket.runs[r];
          for (size_t i = 0; i < run.length; ++i)
            largest[r] = std::max(largest[r], std::bit_cast<uint32_t>(std::abs(x[run.at + i])));
          SelectArgs of_run = args;
          of_run.first_element += run.position;
          of_run.exponent = run.exponent;
          taken += reference_->TakeSelected(&x[run.at], run.length, of_run, static_cast<uint32_t>(run.position),
                                            &positions[taken], &integers[taken], nullptr);
        }
        ASSERT_EQ(dlargest.Read(), largest) << n;
        ASSERT_EQ(dtaken.Read()[0], taken) << n;
        ASSERT_TRUE(SameBits(dx.Read(), x)) << n;
        ASSERT_EQ(dpositions.Read(), positions) << n;  // nothing is written behind what was taken
        ASSERT_EQ(dintegers.Read(), integers) << n;
      }
    }
  }
}

// A threshold that was found on the device, one per tensor, is read where it is.
TEST_P(SelectAgreement, RunsOfABucketHaveThresholdsOfTheirOwn) {
  std::vector<float> x = MakeValues(Pattern::kNormal, 10'000, random_);
  auto dx = OnDevice(x);
  auto dselections = OnDevice(std::vector<DeviceSelection>(2));
  std::vector<RunPlace> places(2);
  std::vector<uint32_t> positions(10'000);
  std::vector<int32_t> integers(10'000);
  size_t taken = 0;
  for (uint32_t r = 0; r < 2; ++r) {
    const double wanted = r == 0 ? 50.0 : 2000.0;
    backend().FindThresholdAsync(dx.get() + 5000 * r, 5000, wanted, Accuracy::kExact, dselections.get() + r, nullptr);
    places[r] = {.x = dx.get() + 5000 * r,
                 .selection = dselections.get() + r,
                 .length = 5000,
                 .position = 5000 * r,
                 .unit = 0x1p-10f};
    const Threshold found = reference_->FindThreshold(&x[5000 * r], 5000, wanted, Accuracy::kExact, nullptr);
    const SelectArgs args = {found.key, found.keep_below, 0, 0, -10, 32767};
    taken += reference_->TakeSelected(&x[5000 * r], 5000, args, 5000 * r, &positions[taken], &integers[taken], nullptr);
  }
  auto dplaces = OnDevice(places);
  auto dpositions = OnDevice(std::vector<uint32_t>(10'000));
  auto dintegers = OnDevice(std::vector<int32_t>(10'000));
  auto dtaken = OnDevice(std::vector<uint64_t>{99});
  backend().TakeSelectedOfRuns({dplaces.get(), 2, 5000}, 32767, dpositions.get(), dintegers.get(), dtaken.get(),
                               nullptr);
  EXPECT_EQ(dtaken.Read()[0], taken);
  EXPECT_EQ(dpositions.Read(), positions);
  EXPECT_EQ(dintegers.Read(), integers);
  EXPECT_TRUE(SameBits(dx.Read(), x));
}

TEST_P(SelectAgreement, RunsOfABucketAreQuantizedSplitAndCopied) {
  for (size_t n : kLengths) {
    for (size_t words : {0u, 1u}) {
      const ScatteredRuns bucket(n, random_);
      const std::vector<float> values = MakeValues(Pattern::kNormal, bucket.elements, random_);
      for (const int width : {2, 4, 0, 1}) {  // 0: bfloat16; 1: as they are
        std::vector<float> x = values;
        const size_t bytes = width == 0 ? 2 : width == 1 ? 4 : static_cast<size_t>(width);
        std::vector<uint8_t> out(n * bytes, 3);
        auto dx = OnDevice(x, words * 4);
        auto dplaces = OnDevice(bucket.PlacesIn(dx.get(), {}));
        auto dout = OnDevice(out, words * 4);
        const RunPlaces table = bucket.Table(dplaces.get());
        if (width == 0) backend().SplitBf16Runs(table, 1.5f, dout.get(), nullptr);
        if (width == 1) backend().CopyRuns(table, reinterpret_cast<float*>(dout.get()), nullptr);
        if (width > 1) backend().QuantizeRuns(table, 30'000, width, dout.get(), nullptr);
        for (const ScatteredRuns::Run& run : bucket.runs) {
          uint8_t* const to = &out[run.position * bytes];
          if (width == 0) {
            reference_->SplitBf16(&x[run.at], run.length, 1.5f, to, nullptr);
          } else if (width == 1) {
            std::memcpy(to, &x[run.at], run.length * bytes);
          } else if (run.unscaled) {
            std::fill_n(to, run.length * bytes, uint8_t{0});
          } else {
            reference_->Quantize(&x[run.at], run.length, run.exponent, 30'000, width, to, nullptr);
          }
        }
        ASSERT_EQ(dout.Read(), out) << "width " << width << ", n " << n;
        ASSERT_TRUE(SameBits(dx.Read(), x)) << "width " << width << ", n " << n;
        if (width != 1 || bucket.runs.empty()) continue;
        std::vector<RunPlace> some = bucket.PlacesIn(dx.get(), {});
        some.back().x = nullptr;
        auto dsome = OnDevice(some);
        backend().Dequantize(dout.get(), 4, n, 0, reinterpret_cast<float*>(dout.get()), nullptr);  // other values
        std::vector<float> others(n);
        const std::vector<uint8_t> bytes_of_others = dout.Read();
        std::memcpy(others.data(), bytes_of_others.data(), n * sizeof(float));
        backend().CopyToRuns(reinterpret_cast<const float*>(dout.get()), bucket.Table(dsome.get()), nullptr);
        for (const ScatteredRuns::Run& run : bucket.runs) {
          if (&run != &bucket.runs.back()) std::copy_n(&others[run.position], run.length, &x[run.at]);
        }
        ASSERT_TRUE(SameBits(dx.Read(), x)) << "n " << n;
      }
    }
  }
}

}  // namespace
}  // namespace gradwire::kernels::cuda
