// Dense merging, fixed point, bfloat16 and cells: the CUDA kernels against the reference, bit for bit.
#include "tests/gpu/agreement.h"

namespace gradwire::kernels::cuda {
namespace {

using DenseAgreement = Agreement;
GW_AGREEMENT_SUITE(DenseAgreement);

struct Alignment {
  size_t bytes;  // of byte arrays
  size_t words;  // of typed arrays, in elements
};
constexpr Alignment kAlignments[] = {{0, 0}, {1, 0}, {0, 1}, {3, 3}};

TEST_P(DenseAgreement, AddIntegers) {
  for (int width : {1, 2, 4}) {
    for (size_t n : kLengths) {
      for (const Alignment& at : kAlignments) {
        const std::vector<uint8_t> values = MakeBytes(n * static_cast<size_t>(width), random_);
        std::vector<int32_t> acc(n);
        for (int32_t& a : acc) a = static_cast<int32_t>(random_());
        auto v = OnDevice(values, at.bytes);
        auto a = OnDevice(acc, at.words * 4);
        for (Sign sign : {Sign::kAdd, Sign::kAdd, Sign::kSubtract}) {
          backend().AddIntegers(a.get(), v.get(), width, n, sign, nullptr);
          reference_->AddIntegers(acc.data(), values.data(), width, n, sign, nullptr);
          ASSERT_EQ(a.Read(), acc) << "width " << width << ", n " << n;
        }
        backend().AssignIntegers(a.get(), v.get(), width, n, nullptr);
        std::vector<int32_t> assigned(n, 7);
        reference_->AssignIntegers(assigned.data(), values.data(), width, n, nullptr);
        ASSERT_EQ(a.Read(), assigned) << "width " << width << ", n " << n;
        v.Read();
      }
    }
  }
}

// float32 or bfloat16 bytes of values inside the grid.
std::vector<uint8_t> GridBytes(Pattern pattern, size_t n, int width, std::mt19937_64& random) {
  std::vector<float> x = MakeValues(pattern, n, random);
  for (float& v : x) v = std::abs(v) < 0x1p17f ? v : 0x1.FFFFFEp17f;
  if (width == 4) return BytesOf(x);
  std::vector<uint16_t> b;
  for (float v : x) b.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(v) >> 16));
  return BytesOf(b);
}

// The checked additions are the unchecked ones of good values, and name the first bad one.
TEST_P(DenseAgreement, AddIntegersChecked) {
  for (int width : {2, 4}) {
    for (size_t n : kFewLengths) {
      for (const Alignment& at : kAlignments) {
        std::vector<int32_t> integers(n);
        for (int32_t& v : integers) v = static_cast<int32_t>(random_() % 2001) - 1000;
        std::vector<uint64_t> expected = {~uint64_t{0}};
        if (n > 3) {
          integers[n / 2] = 1001;
          integers[n - 1] = -1001;
          expected[0] = (uint64_t{7} + n / 2) << 32 | 1001;
        }
        std::vector<uint8_t> values;
        for (int32_t v : integers) {
          for (int b = 0; b < width; ++b) values.push_back(static_cast<uint8_t>(static_cast<uint32_t>(v) >> 8 * b));
        }
        std::vector<int32_t> acc(n, 5);
        auto v = OnDevice(values, at.bytes);
        auto a = OnDevice(acc, at.words * 4);
        auto first = OnDevice(std::vector<uint64_t>{~uint64_t{0}});
        for (Sign sign : {Sign::kAdd, Sign::kAdd, Sign::kSubtract}) {
          backend().AddIntegersChecked(a.get(), v.get(), width, n, sign, 1000, 7, first.get(), nullptr);
          reference_->AddIntegers(acc.data(), values.data(), width, n, sign, nullptr);
        }
        ASSERT_EQ(a.Read(), acc) << "width " << width << ", n " << n;
        ASSERT_EQ(first.Read(), expected) << "width " << width << ", n " << n;
        v.Read();
      }
    }
  }
}

TEST_P(DenseAgreement, AddFloatsAndGridToMean) {
  for (int width : {2, 4}) {
    for (Pattern pattern : kPatterns) {
      for (size_t n : kFewLengths) {
        for (const Alignment& at : kAlignments) {
          const std::vector<uint8_t> values = GridBytes(pattern, n, width, random_);
          std::vector<int64_t> acc(n, 12345);
          auto v = OnDevice(values, at.bytes);
          auto a = OnDevice(acc, at.words * 8);
          for (Sign sign : {Sign::kAdd, Sign::kAdd, Sign::kSubtract}) {
            backend().AddFloats(a.get(), v.get(), width, n, sign, nullptr);
            reference_->AddFloats(acc.data(), values.data(), width, n, sign, nullptr);
          }
          ASSERT_EQ(a.Read(), acc) << "width " << width << ", n " << n;
          for (uint32_t contributors : {1u, 3u, 64u}) {
            std::vector<float> mean(n, -1.0f);
            auto m = OnDevice(mean, at.words * 4);
            backend().GridToMean(a.get(), n, contributors, m.get(), nullptr);
            reference_->GridToMean(acc.data(), n, contributors, mean.data(), nullptr);
            ASSERT_TRUE(SameBits(m.Read(), mean));
          }
          backend().AssignFloats(a.get(), v.get(), width, n, nullptr);
          std::vector<int64_t> assigned(n, 7);
          reference_->AssignFloats(assigned.data(), values.data(), width, n, nullptr);
          ASSERT_EQ(a.Read(), assigned) << "width " << width << ", n " << n;
        }
      }
    }
  }
}

// What is out of the grid is named, and can be taken back.
TEST_P(DenseAgreement, AddFloatsChecked) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int width : {2, 4}) {
    for (size_t n : kFewLengths) {
      for (const Alignment& at : kAlignments) {
        const std::vector<uint8_t> good = GridBytes(Pattern::kNormal, n, width, random_);
        const std::vector<int64_t> start(n, -3);
        std::vector<int64_t> acc = start;
        auto g = OnDevice(good, at.bytes);
        auto a = OnDevice(acc, at.words * 8);
        auto first = OnDevice(std::vector<uint64_t>{~uint64_t{0}});
        backend().AddFloatsChecked(a.get(), g.get(), width, n, Sign::kAdd, kGridLimitBits, 0, first.get(), nullptr);
        reference_->AddFloats(acc.data(), good.data(), width, n, Sign::kAdd, nullptr);
        ASSERT_EQ(a.Read(), acc) << "width " << width << ", n " << n;
        ASSERT_EQ(first.Read()[0], ~uint64_t{0});
        g.Read();
        if (n == 0) continue;
        for (float bad :
             {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(), 0x1p18f, -0x1p18f, -0x1p13f}) {
          const uint32_t limit = bad == -0x1p13f ? GridLimitBits(64) : kGridLimitBits;
          std::vector<uint8_t> values = good;
          const uint32_t bits = std::bit_cast<uint32_t>(bad);
          for (size_t i : {n / 2, n - 1}) {
            for (int b = 0; b < width; ++b) {
              values[i * static_cast<size_t>(width) + static_cast<size_t>(b)] =
                  static_cast<uint8_t>(bits >> (32 - 8 * width + 8 * b));
            }
          }
          auto v = OnDevice(values, at.bytes);
          auto found = OnDevice(std::vector<uint64_t>{~uint64_t{0}});
          backend().AddFloatsChecked(a.get(), v.get(), width, n, Sign::kAdd, limit, 100, found.get(), nullptr);
          ASSERT_EQ(found.Read()[0], (uint64_t{100} + n / 2) << 32 | bits) << "width " << width << ", n " << n;
          backend().AddFloatsChecked(a.get(), v.get(), width, n, Sign::kSubtract, limit, 100, found.get(), nullptr);
          ASSERT_EQ(a.Read(), acc) << "width " << width << ", n " << n;
        }
      }
    }
  }
}

TEST_P(DenseAgreement, FindsTheFirstOfManyBadValues) {
  const float inf = std::numeric_limits<float>::infinity();
  for (float bad : {0x1p18f, -inf, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::max()}) {
    for (size_t n : kLengths) {
      for (size_t offset : {0u, 1u, 4u}) {
        for (size_t at : {size_t{0}, n / 2, n}) {  // n: none
          std::vector<float> x = MakeValues(Pattern::kNormal, n, random_);
          for (size_t i = at; i < n; i += 1 + random_() % 40) x[i] = bad;
          std::vector<uint16_t> b;
          for (float v : x) b.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(v) >> 16));
          const std::vector<uint8_t> wide = BytesOf(x), narrow = BytesOf(b);
          auto w = OnDevice(wide, offset);
          auto h = OnDevice(narrow, offset);
          auto typed = OnDevice(x, offset / 4 * 4);
          for (const uint32_t limit : {kGridLimitBits, GridLimitBits(5)}) {
            ASSERT_EQ(backend().FindOutOfGrid(w.get(), 4, n, limit, nullptr),
                      reference_->FindOutOfGrid(wide.data(), 4, n, limit, nullptr));
            ASSERT_EQ(backend().FindOutOfGrid(h.get(), 2, n, limit, nullptr),
                      reference_->FindOutOfGrid(narrow.data(), 2, n, limit, nullptr));
          }
          ASSERT_EQ(backend().FindNonFinite(typed.get(), n, nullptr), reference_->FindNonFinite(x.data(), n, nullptr));
        }
      }
    }
  }
}

TEST_P(DenseAgreement, QuantizeAndDequantize) {
  for (int width : {1, 2, 4}) {
    const int32_t limit = width == 1 ? 127 : width == 2 ? 32767 : std::numeric_limits<int32_t>::max();
    for (Pattern pattern : kPatterns) {
      for (size_t n : kFewLengths) {
        for (const Alignment& at : kAlignments) {
          for (int exponent : {-24, -3, 5}) {
            std::vector<float> x = MakeValues(pattern, n, random_);
            std::vector<uint8_t> q(n * static_cast<size_t>(width), 0xEE);
            auto dx = OnDevice(x, at.words * 4);
            auto dq = OnDevice(q, at.bytes);
            backend().Quantize(dx.get(), n, exponent, limit, width, dq.get(), nullptr);
            reference_->Quantize(x.data(), n, exponent, limit, width, q.data(), nullptr);
            ASSERT_TRUE(SameBits(dx.Read(), x)) << "width " << width << ", n " << n << ", exponent " << exponent;
            ASSERT_EQ(dq.Read(), q);
            backend().Dequantize(dq.get(), width, n, exponent, dx.get(), nullptr);
            reference_->Dequantize(q.data(), width, n, exponent, x.data(), nullptr);
            ASSERT_TRUE(SameBits(dx.Read(), x));
          }
        }
      }
    }
  }
}

TEST_P(DenseAgreement, Bf16) {
  for (Pattern pattern : kPatterns) {
    for (size_t n : kLengths) {
      for (const Alignment& at : kAlignments) {
        std::vector<float> x = MakeValues(pattern, n, random_);
        if (n > 2) x[n / 2] = std::numeric_limits<float>::max();  // would round to infinity
        if (n > 2) x[n - 1] = std::numeric_limits<float>::quiet_NaN();
        std::vector<uint8_t> out(2 * n, 0xEE);
        auto dx = OnDevice(x, at.words * 4);
        auto d = OnDevice(out, at.bytes);
        const float largest = n % 2 == 0 ? kLargestBf16 : 0.5f;
        backend().SplitBf16(dx.get(), n, largest, d.get(), nullptr);
        reference_->SplitBf16(x.data(), n, largest, out.data(), nullptr);
        ASSERT_TRUE(SameBits(dx.Read(), x)) << n;
        ASSERT_EQ(d.Read(), out);
        backend().AddBf16(d.get(), n, dx.get(), nullptr);
        reference_->AddBf16(out.data(), n, x.data(), nullptr);
        ASSERT_TRUE(SameBits(dx.Read(), x)) << n;
      }
    }
  }
}

TEST_P(DenseAgreement, RangeOf) {
  for (Pattern pattern : kPatterns) {
    for (size_t n : kLengths) {
      for (size_t words : {0u, 1u}) {
        const std::vector<float> x = MakeValues(pattern, n, random_);
        auto dx = OnDevice(x, words * 4);
        ASSERT_EQ(backend().RangeOf(dx.get(), n, nullptr), reference_->RangeOf(x.data(), n, nullptr)) << n;
      }
    }
  }
}

TEST_P(DenseAgreement, AddCells) {
  for (int width : {1, 2, 4}) {
    for (size_t n : kLengths) {
      for (size_t offset : {0u, 1u, 4u}) {
        const size_t bytes = n * static_cast<size_t>(width);
        const std::vector<uint8_t> cells = MakeBytes(bytes, random_);
        std::vector<uint8_t> acc = MakeBytes(bytes, random_);
        auto a = OnDevice(acc, offset / 4 * 4);
        auto c = OnDevice(cells, offset);
        backend().AddCells(a.get(), c.get(), width, n, Sign::kAdd, nullptr);
        const std::vector<uint8_t> before = acc;
        reference_->AddCells(acc.data(), cells.data(), width, n, Sign::kAdd, nullptr);
        ASSERT_EQ(a.Read(), acc) << "width " << width << ", n " << n;
        backend().AddCells(a.get(), c.get(), width, n, Sign::kSubtract, nullptr);
        ASSERT_EQ(a.Read(), before);
      }
    }
  }
}

}  // namespace
}  // namespace gradwire::kernels::cuda
