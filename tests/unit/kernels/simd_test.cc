// Every SIMD target that this machine runs against the reference backend, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/simd/simd_backend.h"
#include "kernels/math/fixed_point.h"
#include "kernels/math/select.h"
#include "kernels/math/sketch.h"

namespace gradwire::kernels {
namespace {

constexpr size_t kLengths[] = {0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 1009, 1023, 1024, 1025, 4099, 65549, 262147};

// Finite values that arithmetic finds hard.
struct Pattern {
  const char* name;
  std::function<void(std::mt19937_64&, std::vector<float>*)> fill;
};

const std::vector<Pattern>& Patterns() {
  using Random = std::mt19937_64;
  using Values = std::vector<float>;
  static const auto& patterns = *new std::vector<Pattern>{
      {"normal",
       [](Random& random, Values* x) {
         std::normal_distribution<float> normal;
         for (float& v : *x) v = normal(random);
       }},
      {"any bits",
       [](Random& random, Values* x) {
         for (float& v : *x) {
           do v = FloatFromBits(static_cast<uint32_t>(random()));
           while (!std::isfinite(v));
         }
       }},
      {"all equal",
       [](Random& random, Values* x) {
         for (float& v : *x) v = random() % 2 != 0 ? 1.0f : -1.0f;
       }},
      {"zeros of both signs",
       [](Random& random, Values* x) {
         for (float& v : *x) v = random() % 2 != 0 ? 0.0f : -0.0f;
       }},
      {"denormals and zeros",
       [](Random& random, Values* x) {
         for (float& v : *x) v = FloatFromBits(static_cast<uint32_t>(random() % 3 == 0 ? 0 : random() & 0x807FFFFF));
       }},
      {"one giant",
       [](Random& random, Values* x) {
         for (float& v : *x) v = 1e-6f * static_cast<float>(static_cast<int>(random() % 200) - 100);
         if (!x->empty()) (*x)[random() % x->size()] = -3e38f;
       }},
      {"clustered",
       [](Random& random, Values* x) {
         std::normal_distribution<float> normal;
         const size_t begin = x->empty() ? 0 : random() % x->size();
         for (size_t i = 0; i < x->size(); ++i) {
           (*x)[i] = (i >= begin && i < begin + x->size() / 50 ? 1000.0f : 0.001f) * normal(random);
         }
       }},
      {"ascending",
       [](Random&, Values* x) {
         for (size_t i = 0; i < x->size(); ++i) (*x)[i] = static_cast<float>(i);
       }},
  };
  return patterns;
}

// Payloads of NaN are no promise: one NaN is another.
void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    ASSERT_EQ(FloatBits(a[i]), FloatBits(b[i])) << what << ", element " << i << ": " << a[i] << " and " << b[i];
  }
}

class SimdBackend : public ::testing::TestWithParam<std::string> {
 protected:
  // Calls body(values, pattern and length) for all patterns and lengths.
  void ForAll(const std::function<void(const std::vector<float>&, const std::string&)>& body) {
    for (const Pattern& pattern : Patterns()) {
      for (size_t n : kLengths) {
        std::vector<float> x(n);
        pattern.fill(random_, &x);
        body(x, std::string(pattern.name) + ", " + std::to_string(n));
        if (HasFatalFailure()) return;
      }
    }
  }
  std::vector<uint8_t> RandomBytes(size_t n) {
    std::vector<uint8_t> out(n);
    for (uint8_t& v : out) v = static_cast<uint8_t>(random_());
    return out;
  }

  std::mt19937_64 random_{20261121};
  std::unique_ptr<Backend> simd_ = MakeSimdBackend(GetParam());
  std::unique_ptr<Backend> reference_ = *MakeBackend("reference");
};

TEST_P(SimdBackend, TakesItsName) {
  const std::string name = "cpu:" + GetParam();
  EXPECT_EQ(simd_->name(), name);
  EXPECT_EQ((*MakeBackend(name))->name(), name);
}

TEST_P(SimdBackend, FindsTheSameThreshold) {
  ForAll([&](const std::vector<float>& x, const std::string& what) {
    const double n = static_cast<double>(x.size());
    for (double wanted : {0.0, 0.3, 1.0, 0.001 * n, 0.01 * n, std::floor(0.1 * n), 0.45 * n, 0.9 * n, n, 2 * n}) {
      const Threshold expected = reference_->FindThreshold(x.data(), x.size(), wanted, Accuracy::kExact, nullptr);
      const Threshold got = simd_->FindThreshold(x.data(), x.size(), wanted, Accuracy::kExact, nullptr);
      ASSERT_EQ(got.key, expected.key) << what << ", wanted " << wanted;
      ASSERT_EQ(got.keep_below, expected.keep_below) << what << ", wanted " << wanted;
    }
  });
}

// Magnitudes that a sample misleads: what is large lies where it does not look, or looks only.
TEST_P(SimdBackend, FindsTheSameThresholdWhereASampleMisleads) {
  const size_t n = 300'000;
  for (size_t period : {64u, 1024u, 1040u}) {
    for (size_t width : {1u, 16u, 40u}) {
      std::vector<float> x(n);
      for (size_t i = 0; i < n; ++i) {
        x[i] = (i % period < width ? 100.0f : 1.0f) * (1.0f + static_cast<float>(random_() % 1000) * 1e-3f);
      }
      for (double wanted : {10.0, 300.0, 3000.0, 20'000.0}) {
        const Threshold expected = reference_->FindThreshold(x.data(), n, wanted, Accuracy::kExact, nullptr);
        const Threshold got = simd_->FindThreshold(x.data(), n, wanted, Accuracy::kExact, nullptr);
        ASSERT_EQ(got.key, expected.key) << period << ", " << width << ", " << wanted;
        ASSERT_EQ(got.keep_below, expected.keep_below) << period << ", " << width << ", " << wanted;
      }
    }
  }
}

// What is not finite is larger than all that is, in brackets without an upper edge, too.
TEST_P(SimdBackend, FindsTheSameThresholdAmongWhatIsNotFinite) {
  std::normal_distribution<float> normal;
  std::vector<float> x(65'549);
  for (float& v : x) v = normal(random_);
  for (size_t i = 7; i < x.size(); i += 9001) {
    x[i] = i % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
  }
  for (double wanted : {1.0, 3.0, 8.0, 20.0, 655.0}) {
    const Threshold expected = reference_->FindThreshold(x.data(), x.size(), wanted, Accuracy::kExact, nullptr);
    const Threshold got = simd_->FindThreshold(x.data(), x.size(), wanted, Accuracy::kExact, nullptr);
    ASSERT_EQ(got.key, expected.key) << wanted;
    ASSERT_EQ(got.keep_below, expected.keep_below) << wanted;
  }
}

// Samples of every stride from the least on, of ragged lengths and any address.
TEST_P(SimdBackend, EstimatesTheSameThreshold) {
  for (const Pattern& pattern : Patterns()) {
    std::vector<float> x(2'700'017);
    pattern.fill(random_, &x);
    x[x.size() / 2] = std::numeric_limits<float>::quiet_NaN();
    x[x.size() / 3] = -std::numeric_limits<float>::infinity();
    for (size_t skipped : {0u, 1u, 15u}) {
      const float* const begin = x.data() + skipped;
      const size_t n = x.size() - 2 * skipped;
      for (double density : {0.09, 0.1, 0.2, 0.45, 0.9, 1.0, 2.0}) {
        const double wanted = density * static_cast<double>(n);
        EXPECT_EQ(SampleOf(n, wanted, Accuracy::kEstimate).stride > 1, density > 0.09);
        const Threshold expected = reference_->FindThreshold(begin, n, wanted, Accuracy::kEstimate, nullptr);
        const Threshold got = simd_->FindThreshold(begin, n, wanted, Accuracy::kEstimate, nullptr);
        ASSERT_EQ(got.key, expected.key) << pattern.name << ", density " << density;
        ASSERT_EQ(got.keep_below, expected.keep_below) << pattern.name << ", density " << density;
      }
    }
  }
}

TEST_P(SimdBackend, MarksWhatIsAtLeastSoLarge) {
  ForAll([&](const std::vector<float>& x, const std::string& what) {
    for (uint32_t least : {0u, 1u, FloatBits(1e-3f), FloatBits(1.0f), 0x7F800000u, 0x7FFFFFFFu}) {
      const size_t words = (x.size() + 63) / 64;
      for (Backend* backend : {reference_.get(), simd_.get()}) {
        std::vector<uint64_t> marks(words + 1, 7);
        backend->MarkAtLeast(x.data(), x.size(), least, marks.data());
        for (size_t i = 0; i < 64 * words; ++i) {
          const bool want = i < x.size() && (FloatBits(x[i]) & 0x7FFFFFFF) >= least;
          ASSERT_EQ(marks[i / 64] >> i % 64 & 1, want ? 1u : 0u) << what << ", element " << i << ", least " << least;
        }
        ASSERT_EQ(marks[words], 7u) << "wrote behind the room it has";
      }
    }
  });
}

TEST_P(SimdBackend, TakesTheSame) {
  ForAll([&](const std::vector<float>& x, const std::string& what) {
    for (double density : {0.001, 0.02, 0.3, 1.0}) {
      const Threshold t = reference_->FindThreshold(x.data(), x.size(), density * static_cast<double>(x.size()),
                                                    Accuracy::kExact, nullptr);
      for (int exponent : {kMinExponent, -8, 30}) {
        const SelectArgs args = {t.key,    t.keep_below,
                                 12345,    (uint64_t{1} << 32) - 1000,  // element numbers cross 2^32
                                 exponent, density == 0.02 ? 127 : 2147483647};
        const uint64_t room = x.size();
        std::vector<float> a = x, b = x;
        std::vector<uint32_t> pa(room, 7), pb(room + 1, 7);
        std::vector<int32_t> qa(room, 7), qb(room + 1, 7);
        const size_t na = reference_->TakeSelected(a.data(), room, args, 1000, pa.data(), qa.data(), nullptr);
        const size_t nb = simd_->TakeSelected(b.data(), room, args, 1000, pb.data(), qb.data(), nullptr);
        ASSERT_EQ(nb, na) << what << ", density " << density << ", exponent " << exponent;
        ASSERT_TRUE(std::equal(pa.begin(), pa.begin() + static_cast<ptrdiff_t>(na), pb.begin())) << what;
        ASSERT_TRUE(std::equal(qa.begin(), qa.begin() + static_cast<ptrdiff_t>(na), qb.begin())) << what;
        ASSERT_EQ(pb[room], 7u) << "wrote behind the room it has";
        ASSERT_EQ(qb[room], 7) << "wrote behind the room it has";
        ExpectSameBits(a, b, what);
      }
    }
  });
}

TEST_P(SimdBackend, TakesTheSameShareOfTies) {
  for (uint64_t keep : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 31, (uint64_t{1} << 32) - 1, uint64_t{1} << 32}) {
    std::vector<float> x(10'007, 1.0f);
    for (size_t i = 0; i < x.size(); i += 3) x[i] = i % 2 != 0 ? 2.0f : -0.5f;
    std::vector<float> a = x, b = x;
    std::vector<uint32_t> pa(x.size()), pb(x.size());
    std::vector<int32_t> qa(x.size()), qb(x.size());
    const SelectArgs args = {KeyOf(1.0f), keep, 99, 5, -3, 100};
    const size_t na = reference_->TakeSelected(a.data(), a.size(), args, 0, pa.data(), qa.data(), nullptr);
    const size_t nb = simd_->TakeSelected(b.data(), b.size(), args, 0, pb.data(), qb.data(), nullptr);
    ASSERT_EQ(na, nb) << keep;
    pa.resize(na), pb.resize(nb);
    EXPECT_EQ(pa, pb) << keep;
    ExpectSameBits(a, b, "ties");
  }
}

TEST_P(SimdBackend, QuantizesTheSame) {
  ForAll([&](const std::vector<float>& x, const std::string& what) {
    for (int width : {1, 2, 4}) {
      const int32_t limit = width == 1 ? 127 : width == 2 ? 32767 : 2147483647;
      for (int exponent : {kMinExponent, -7, kMaxExponent}) {
        std::vector<float> a = x, b = x;
        std::vector<uint8_t> qa(x.size() * static_cast<size_t>(width) + 1), qb = qa;
        reference_->Quantize(a.data(), a.size(), exponent, limit, width, qa.data() + 1, nullptr);
        simd_->Quantize(b.data(), b.size(), exponent, limit, width, qb.data() + 1, nullptr);
        ASSERT_EQ(qa, qb) << what << ", width " << width << ", exponent " << exponent;
        ExpectSameBits(a, b, what);
      }
    }
    ASSERT_EQ(simd_->RangeOf(x.data(), x.size(), nullptr), reference_->RangeOf(x.data(), x.size(), nullptr)) << what;
  });
}

TEST_P(SimdBackend, FindsTheSameFirstBadValue) {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(), 262144.0f}) {
    for (size_t n : kLengths) {
      std::vector<float> x(n + 1, -1.5f);
      for (size_t misalign : {0u, 1u}) {
        for (size_t at : {size_t{0}, n / 2, n - 1, n}) {
          if (n == 0 && at != 0) continue;
          std::vector<float> y = x;
          y[at] = bad;
          y[n] = bad;
          const float* from = y.data() + (n == 0 ? 0 : misalign);
          const size_t count = n == 0 ? 0 : n - misalign;
          const auto bytes = reinterpret_cast<const uint8_t*>(from);
          ASSERT_EQ(simd_->FindNonFinite(from, count, nullptr), reference_->FindNonFinite(from, count, nullptr));
          for (int width : {2, 4}) {
            for (const uint32_t limit : {kGridLimitBits, GridLimitBits(3), GridLimitBits(1u << 20)}) {
              ASSERT_EQ(simd_->FindOutOfGrid(bytes, width, count, limit, nullptr),
                        reference_->FindOutOfGrid(bytes, width, count, limit, nullptr));
            }
          }
          if (count > 1) {  // bytes of any alignment
            ASSERT_EQ(simd_->FindOutOfGrid(bytes + 1, 4, count - 1, kGridLimitBits, nullptr),
                      reference_->FindOutOfGrid(bytes + 1, 4, count - 1, kGridLimitBits, nullptr));
          }
        }
      }
    }
  }
}

TEST_P(SimdBackend, MergesTheSame) {
  ForAll([&](const std::vector<float>& x, const std::string& what) {
    const size_t n = x.size();
    for (Sign sign : {Sign::kAdd, Sign::kSubtract}) {
      for (int width : {1, 2, 4}) {
        const std::vector<uint8_t> values = RandomBytes(n * static_cast<size_t>(width) + 1);
        std::vector<int32_t> a(n, 5), b(n, 5);
        reference_->AddIntegers(a.data(), values.data() + 1, width, n, sign, nullptr);
        simd_->AddIntegers(b.data(), values.data() + 1, width, n, sign, nullptr);
        ASSERT_EQ(a, b) << what;
        std::vector<uint8_t> ca = RandomBytes(n * static_cast<size_t>(width)), cb = ca;
        reference_->AddCells(ca.data(), values.data() + 1, width, n, sign, nullptr);
        simd_->AddCells(cb.data(), values.data() + 1, width, n, sign, nullptr);
        ASSERT_EQ(ca, cb) << what;
        std::vector<float> da = x, db = x;
        reference_->Dequantize(values.data() + 1, width, n, -9, da.data(), nullptr);
        simd_->Dequantize(values.data() + 1, width, n, -9, db.data(), nullptr);
        ExpectSameBits(da, db, what);
      }
    }
  });
}

TEST_P(SimdBackend, ConvertsTheSame) {
  ForAll([&](const std::vector<float>& x, const std::string& what) {
    const size_t n = x.size();
    std::vector<int64_t> sums(n);
    for (int64_t& s : sums) s = static_cast<int64_t>(random_()) >> (random_() % 64);
    for (uint32_t contributors : {1u, 3u, 64u}) {
      std::vector<float> a(n), b(n);
      reference_->GridToMean(sums.data(), n, contributors, a.data(), nullptr);
      simd_->GridToMean(sums.data(), n, contributors, b.data(), nullptr);
      ExpectSameBits(a, b, what);
    }
    // Within and at the end of what float64 holds, halfway between two float32, and one beyond it among the others.
    std::vector<int64_t> exact(n);
    for (size_t i = 0; i < n; ++i) {
      constexpr int64_t kBound = int64_t{1} << 51;
      const int64_t edges[] = {kBound - 1, -kBound, (int64_t{1} << 24) + 1, (int64_t{3} << 24) + 2, 0, -1};
      exact[i] =
          i % 3 == 0 ? edges[i / 3 % std::size(edges)] : static_cast<int64_t>(random_()) >> (13 + random_() % 51);
    }
    for (const int64_t beyond :
         {int64_t{0}, int64_t{1} << 51, -(int64_t{1} << 51) - 1, std::numeric_limits<int64_t>::max()}) {
      if (n != 0 && beyond != 0) exact[random_() % n] = beyond;
      std::vector<float> a(n), b(n);
      reference_->GridToMean(exact.data(), n, 3, a.data(), nullptr);
      simd_->GridToMean(exact.data(), n, 3, b.data(), nullptr);
      ExpectSameBits(a, b, what);
    }
    std::vector<float> small = x;
    for (float& v : small) v = std::abs(v) < 262144.0f ? v : 0.0f;
    for (int width : {2, 4}) {
      std::vector<int64_t> a = sums, b = sums;
      std::vector<uint8_t> bytes(n * 4 + 1);
      if (n != 0) std::memcpy(bytes.data() + 1, small.data(), n * 4);
      if (reference_->FindOutOfGrid(bytes.data() + 1, width, n, kGridLimitBits, nullptr) != -1) continue;
      reference_->AddFloats(a.data(), bytes.data() + 1, width, n, Sign::kSubtract, nullptr);
      simd_->AddFloats(b.data(), bytes.data() + 1, width, n, Sign::kSubtract, nullptr);
      ASSERT_EQ(a, b) << what;
      // Streaming stores have a head and a tail: start the accumulator anywhere in a vector.
      const size_t skip = n == 0 ? 0 : random_() % std::min<size_t>(n, 17);
      std::fill(a.begin(), a.end(), 77), std::fill(b.begin(), b.end(), 77);
      reference_->AssignFloats(a.data() + skip, bytes.data() + 1, width, n - skip, nullptr);
      simd_->AssignFloats(b.data() + skip, bytes.data() + 1, width, n - skip, nullptr);
      ASSERT_EQ(a, b) << what;
      std::fill(a.begin(), a.end(), 0);
      reference_->AddFloats(a.data() + skip, bytes.data() + 1, width, n - skip, Sign::kAdd, nullptr);
      std::fill_n(b.begin(), skip, 0);
      ASSERT_EQ(a, b) << what;
      for (uint32_t contributors : {1u, 3u}) {
        std::vector<float> by_sums(n, 7.0f), direct(n, 7.0f);
        reference_->GridToMean(a.data() + skip, n - skip, contributors, by_sums.data(), nullptr);
        for (Backend* backend : {reference_.get(), simd_.get()}) {
          backend->FloatsToMean(bytes.data() + 1, width, n - skip, contributors, direct.data());
          for (size_t i = 0; i < n; ++i) ASSERT_EQ(FloatBits(direct[i]), FloatBits(by_sums[i])) << what << i;
        }
      }
    }
    for (int width : {1, 2, 4}) {
      const size_t skip = n == 0 ? 0 : random_() % std::min<size_t>(n, 17);
      std::vector<int32_t> a(n, 77), b(n, 77);
      std::vector<uint8_t> bytes(n * 4 + 1);
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random_());
      reference_->AssignIntegers(a.data() + skip, bytes.data() + 1, width, n - skip, nullptr);
      simd_->AssignIntegers(b.data() + skip, bytes.data() + 1, width, n - skip, nullptr);
      ASSERT_EQ(a, b) << what;
      if (width == 4) {
        std::vector<int32_t> c(n, 77);
        for (const WordRange& range : {WordRange::Integers(0x7FFFFFFF), WordRange::Integers(0), WordRange::Floats(1),
                                       WordRange::Floats(0x7F800000), WordRange::Floats(0x7FFFFFFF)}) {
          std::vector<uint8_t> words = bytes;
          for (int bad = 0; bad < 2; ++bad) {
            const bool want = reference_->AssignWords(a.data() + skip, words.data() + 1, n - skip, range);
            ASSERT_EQ(simd_->AssignWords(c.data() + skip, words.data() + 1, n - skip, range), want) << what;
            ASSERT_EQ(a, c) << what;
            for (size_t i = 0; i < n; ++i) {  // all inside, then one of them not
              const bool integer = range.shift == 0;
              const uint32_t inside = integer ? -(static_cast<uint32_t>(i) % (range.offset + 1)) : range.last >> 1;
              std::memcpy(words.data() + 1 + 4 * i, &inside, 4);
            }
            ASSERT_TRUE(simd_->AssignWords(c.data() + skip, words.data() + 1, n - skip, range)) << what;
            if (n == skip) continue;
            const uint32_t outside = range.shift == 0 ? range.offset + 1 : (range.last >> 1) + 1;
            std::memcpy(words.data() + 1 + 4 * (random_() % (n - skip)), &outside, 4);
            ASSERT_FALSE(simd_->AssignWords(c.data() + skip, words.data() + 1, n - skip, range)) << what << range.shift;
          }
          reference_->AssignIntegers(a.data() + skip, bytes.data() + 1, width, n - skip, nullptr);
        }
      }
      std::fill(a.begin(), a.end(), 0), std::fill_n(b.begin(), skip, 0);
      reference_->AddIntegers(a.data() + skip, bytes.data() + 1, width, n - skip, Sign::kAdd, nullptr);
      ASSERT_EQ(a, b) << what;
    }
    std::vector<float> a = x, b = x;
    std::vector<uint8_t> wa(2 * n + 1), wb(2 * n + 1);
    reference_->SplitBf16(a.data(), n, 510.0f, wa.data() + 1, nullptr);
    simd_->SplitBf16(b.data(), n, 510.0f, wb.data() + 1, nullptr);
    ASSERT_EQ(wa, wb) << what;
    ExpectSameBits(a, b, what);
    reference_->AddBf16(wa.data() + 1, n, a.data(), nullptr);
    simd_->AddBf16(wb.data() + 1, n, b.data(), nullptr);
    ExpectSameBits(a, b, what);
  });
}

TEST_P(SimdBackend, StepsTheSame) {
  ForAll([&](const std::vector<float>& values, const std::string& what) {
    std::vector<float> g = values;
    const size_t n = g.size();
    if (n > 20) g[n / 2] = std::numeric_limits<float>::quiet_NaN(), g[n / 3] = std::numeric_limits<float>::infinity();
    std::vector<float> p0(n), m0(n), v0(n);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < n; ++i) p0[i] = normal(random_), m0[i] = normal(random_), v0[i] = std::abs(normal(random_));
    const auto compare = [&](const char* name, const std::function<void(Backend&, float*, float*, float*)>& step) {
      std::vector<float> pa = p0, ma = m0, va = v0, pb = p0, mb = m0, vb = v0;
      step(*reference_, pa.data(), ma.data(), va.data());
      step(*simd_, pb.data(), mb.data(), vb.data());
      ExpectSameBits(pa, pb, what + ", " + name);
      ExpectSameBits(ma, mb, what + ", " + name);
      ExpectSameBits(va, vb, what + ", " + name);
    };
    compare("AdamW", [&](Backend& b, float* p, float* m, float* v) {
      b.AdamW(p, g.data(), m, v, n, MakeAdamW(0.01f, 0.1f, 0.9f, 0.999f, 1e-8f, 7), nullptr);
    });
    compare("AddPreconditioned", [&](Backend& b, float* p, float*, float* v) {
      b.AddPreconditioned(p, g.data(), v, n, MakePrecondition(0.99f, 1e-8f, 3), nullptr);
    });
    compare("SGD", [&](Backend& b, float* p, float* m, float*) {
      b.Sgd(p, g.data(), m, n, {0.1f, 0.01f, 0.9f, true}, nullptr);
      b.Sgd(p, g.data(), nullptr, n, {0.1f, 0.01f, 0.0f, false}, nullptr);
    });
    compare("PlainStep", [&](Backend& b, float* p, float*, float*) {
      b.PlainStep(p, g.data(), n, 0.1f, 0.01f, nullptr);
      b.PlainStep(p, g.data(), n, 0.1f, 0.0f, nullptr);
      b.Add(p, g.data(), n, nullptr);
    });
    std::vector<uint32_t> positions;
    std::vector<int32_t> integers;
    for (uint32_t i = 0; i < n; i += 1 + static_cast<uint32_t>(random_() % 30)) {
      positions.push_back(70 + i);
      integers.push_back(static_cast<int32_t>(random_()));
    }
    compare("SparsePlainStep", [&](Backend& b, float* p, float*, float*) {
      b.SparsePlainStep(p, positions.data(), integers.data(), positions.size(), 70, -20, 3, 0.1f, nullptr);
    });
  });
}

// The sketch ---------------------------------------------------------------------------------------------------------

enum class Spread { kUniform, kDense, kOneGroup };

std::vector<uint32_t> MakePositions(size_t n, Spread spread, const SketchArgs& args, std::mt19937_64& random) {
  std::set<uint32_t> unique;
  for (uint32_t next = 4'000'000'000u; unique.size() < n; ++next) {
    const uint32_t p = spread == Spread::kUniform ? static_cast<uint32_t>(random()) : next;
    if (spread != Spread::kOneGroup || SketchGroup(SketchHash(p, args.salt), args.groups) == 0) unique.insert(p);
  }
  return {unique.begin(), unique.end()};
}

TEST_P(SimdBackend, AddsAndPeelsTheSame) {
  for (Spread spread : {Spread::kUniform, Spread::kDense, Spread::kOneGroup}) {
    for (size_t n : {0u, 1u, 3u, 15u, 16u, 17u, 255u, 256u, 257u, 1009u, 1025u, 20'011u}) {
      for (int width : {1, 2, 4}) {
        for (double cells_per_element : {0.7, 1.2, 1.25, 2.0}) {  // from hopeless to easy
          SketchArgs args = {random_(), static_cast<uint32_t>(n / 4096 + 1), 0, width};
          const double mean = static_cast<double>(n) / args.groups;
          args.cells_per_group = 3 * static_cast<uint32_t>(cells_per_element * mean / 3 + 1);
          const std::vector<uint32_t> positions = MakePositions(n, spread, args, random_);
          std::vector<int32_t> integers(n);
          for (int32_t& v : integers) v = static_cast<int32_t>(random_());
          const size_t size = size_t{args.groups} * args.cells_per_group * static_cast<size_t>(width);
          std::vector<uint8_t> a = RandomBytes(size), b = a;
          if (n % 2 != 0) std::fill(a.begin(), a.end(), 0), b = a;  // else: cells that no worker could have sent
          reference_->SketchAdd(positions.data(), integers.data(), n, args, a.data(), nullptr);
          simd_->SketchAdd(positions.data(), integers.data(), n, args, b.data(), nullptr);
          ASSERT_EQ(a, b) << n << ", width " << width;
          std::vector<int32_t> sa(n, 3), sb(n, 4);
          std::vector<uint8_t> ra(n, 3), rb(n, 4);
          reference_->SketchPeel(a.data(), args, positions.data(), n, sa.data(), ra.data(), nullptr);
          simd_->SketchPeel(b.data(), args, positions.data(), n, sb.data(), rb.data(), nullptr);
          ASSERT_EQ(ra, rb) << n << ", width " << width << ", " << cells_per_element << " cells per element";
          // Cells that do not belong to the elements give no particular sums, but the same elements are resolved.
          if (n % 2 == 0) continue;
          ASSERT_EQ(sa, sb) << n << ", width " << width << ", " << cells_per_element << " cells per element";
        }
      }
    }
  }
}

TEST_P(SimdBackend, PeelsGroupsTooLargeForItsWords) {
  const size_t n = 70'000;
  const SketchArgs args = {random_(), 1, 3 * 30'000, 1};
  const std::vector<uint32_t> positions = MakePositions(n, Spread::kDense, args, random_);
  std::vector<int32_t> integers(n), sa(n), sb(n);
  for (int32_t& v : integers) v = static_cast<int32_t>(random_() % 255) - 127;
  std::vector<uint8_t> cells(args.cells_per_group, 0), ra(n), rb(n);
  simd_->SketchAdd(positions.data(), integers.data(), n, args, cells.data(), nullptr);
  reference_->SketchPeel(cells.data(), args, positions.data(), n, sa.data(), ra.data(), nullptr);
  simd_->SketchPeel(cells.data(), args, positions.data(), n, sb.data(), rb.data(), nullptr);
  EXPECT_EQ(ra, rb);
  EXPECT_EQ(sa, sb);
  EXPECT_EQ(std::count(rb.begin(), rb.end(), 1), static_cast<ptrdiff_t>(n));
}

INSTANTIATE_TEST_SUITE_P(Targets, SimdBackend, ::testing::ValuesIn(SimdTargets()),
                         [](const auto& info) { return info.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SimdBackend);

TEST(SimdTargets, AreNamedWhereOneIsMissing) {
  const auto backend = MakeBackend("cpu:altivec");
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kFailedPrecondition);
  for (const std::string& target : SimdTargets()) {
    EXPECT_NE(std::string(backend.status().message()).find(target), std::string::npos);
  }
}

}  // namespace
}  // namespace gradwire::kernels
