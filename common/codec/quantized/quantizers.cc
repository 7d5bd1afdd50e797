// See quantizer.h.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/draw.h"
#include "common/codec/index_code.h"
#include "common/codec/quantized/quantizer.h"
#include "common/codec/value_format.h"
#include "kernels/math/math.h"

namespace gradwire::quantized {
namespace {

using Scheme = QuantizedSpec::Scheme;

void Store(uint8_t* out, float value) { std::memcpy(out, &value, sizeof(value)); }
float Load(const uint8_t* in) {
  float value;
  std::memcpy(&value, in, sizeof(value));
  return value;
}

absl::Status CheckScale(float scale) {
  if (std::isfinite(scale) && !std::signbit(scale)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("quantized run: scale %g is not a finite, non-negative number", scale));
}

float LargestMagnitude(const float* x, size_t n) {
  float largest = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

// Sums in float64, in order: a run is short.
double SumOfSquares(const float* x, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

// Uniform in [0, 1), 24 bits.
float Draw(uint64_t salt, size_t index) { return static_cast<float>(DrawBits(salt, index) >> 8) * 0x1p-24f; }

// Signs, one bit each: 1 where x >= 0 (so is -0).
size_t SignBytes(size_t n) { return (n + 7) / 8; }
void WriteSigns(const float* x, size_t n, uint8_t* out) {
  for (size_t byte = 0; byte < SignBytes(n); ++byte) {
    uint32_t bits = 0;
    const size_t count = std::min<size_t>(8, n - 8 * byte);
    for (size_t i = 0; i < count; ++i) bits |= static_cast<uint32_t>(x[8 * byte + i] >= 0) << i;
    out[byte] = static_cast<uint8_t>(bits);
  }
}
absl::Status ReadSigns(const uint8_t* in, size_t n, float positive, float negative, float* out) {
  if (n % 8 != 0 && in[n / 8] >> (n % 8) != 0) return absl::InvalidArgumentError("quantized run: padding is not 0");
  for (size_t i = 0; i < n; ++i) out[i] = (in[i / 8] >> (i % 8) & 1) != 0 ? positive : negative;
  return absl::OkStatus();
}

// binary16, nearest.
class Fp16 final : public Quantizer {
 public:
  Rest rest() const override { return Rest::kResidual; }
  size_t BytesOf(size_t n) const override { return 2 * n; }
  void Encode(const float* x, size_t n, uint64_t, uint8_t* out) const override {
    WriteValues(ValueFormat::kFp16, x, n, out);
  }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override {
    return ReadValues(ValueFormat::kFp16, {in, 2 * n}, n, out);
  }
};

// 1-bit SGD (Seide et al. 2014): the sign, and for each sign the mean of the values that have it.
class OneBit final : public Quantizer {
 public:
  Rest rest() const override { return Rest::kResidual; }
  size_t BytesOf(size_t n) const override { return 8 + SignBytes(n); }
  void Encode(const float* x, size_t n, uint64_t, uint8_t* out) const override {
    double sums[2] = {0, 0};
    size_t counts[2] = {0, 0};
    for (size_t i = 0; i < n; ++i) {
      const bool positive = x[i] >= 0;
      sums[positive] += static_cast<double>(x[i]);
      ++counts[positive];
    }
    for (const int positive : {1, 0}) {
      const double mean = counts[positive] == 0 ? 0 : sums[positive] / static_cast<double>(counts[positive]);
      Store(out + (positive == 1 ? 0 : 4), static_cast<float>(std::fabs(mean)));
    }
    WriteSigns(x, n, out + 8);
  }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override {
    GW_RETURN_IF_ERROR(CheckScale(Load(in)));
    GW_RETURN_IF_ERROR(CheckScale(Load(in + 4)));
    return ReadSigns(in + 8, n, Load(in), -Load(in + 4), out);
  }
};

// SignSGD and Signum (Bernstein et al. 2018): the sign of the gradient, or of its momentum.
class Sign final : public Quantizer {
 public:
  explicit Sign(Rest rest) : rest_(rest) {}
  Rest rest() const override { return rest_; }
  size_t BytesOf(size_t n) const override { return SignBytes(n); }
  void Encode(const float* x, size_t n, uint64_t, uint8_t* out) const override { WriteSigns(x, n, out); }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override { return ReadSigns(in, n, 1, -1, out); }

 private:
  const Rest rest_;
};

// EF-SignSGD (Karimireddy et al. 2019, algorithm 1): the sign times the mean magnitude, the rest fed back.
class ScaledSign final : public Quantizer {
 public:
  Rest rest() const override { return Rest::kResidual; }
  size_t BytesOf(size_t n) const override { return 4 + SignBytes(n); }
  void Encode(const float* x, size_t n, uint64_t, uint8_t* out) const override {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += static_cast<double>(std::fabs(x[i]));
    Store(out, static_cast<float>(sum / static_cast<double>(n)));
    WriteSigns(x, n, out + 4);
  }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override {
    GW_RETURN_IF_ERROR(CheckScale(Load(in)));
    return ReadSigns(in + 4, n, Load(in), -Load(in), out);
  }
};

// TernGrad (Wen et al. 2017, eq. 1-4): s * sign(x) * b, b = 1 with probability |x| / s, s the largest magnitude. Five
// digits of base 3 are a byte.
class TernGrad final : public Quantizer {
 public:
  explicit TernGrad(float clip) : clip_(clip) {}
  Rest rest() const override { return Rest::kDropped; }
  bool stochastic() const override { return true; }
  size_t BytesOf(size_t n) const override { return 4 + (n + 4) / 5; }
  void Encode(const float* x, size_t n, uint64_t salt, uint8_t* out) const override {
    float scale = LargestMagnitude(x, n);
    if (clip_ > 0) {
      double sum = 0;
      for (size_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]);
      const double mean = sum / static_cast<double>(n);
      const double variance = std::max(0.0, SumOfSquares(x, n) / static_cast<double>(n) - mean * mean);
      scale = std::min(scale, clip_ * static_cast<float>(std::sqrt(variance)));
    }
    Store(out, scale);
    for (size_t byte = 0; byte < (n + 4) / 5; ++byte) {
      uint32_t packed = 0;
      uint32_t power = 1;
      for (size_t i = 5 * byte; i < 5 * byte + 5; ++i, power *= 3)
        packed += power * (i < n ? Digit(x[i], scale, salt, i) : 1);
      out[4 + byte] = static_cast<uint8_t>(packed);
    }
  }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override {
    const float scale = Load(in);
    GW_RETURN_IF_ERROR(CheckScale(scale));
    const float values[3] = {-scale, 0.0f, scale};
    for (size_t byte = 0; byte < (n + 4) / 5; ++byte) {
      uint32_t packed = in[4 + byte];
      if (packed >= 243) return absl::InvalidArgumentError("quantized run: a byte that is not five ternary digits");
      for (size_t i = 5 * byte; i < 5 * byte + 5; ++i, packed /= 3) {
        if (i < n) {
          out[i] = values[packed % 3];
        } else if (packed % 3 != 1) {
          return absl::InvalidArgumentError("quantized run: padding is not 0");
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  static uint32_t Digit(float x, float scale, uint64_t salt, size_t index) {
    // scale * Draw < |x|: never true where x is 0, always where |x| is the scale or was clipped to it.
    if (!(scale * Draw(salt, index) < std::fabs(x))) return 1;
    return x > 0 ? 2 : 0;
  }

  const float clip_;
};

// Levels of a run's norm, sign and level as one zigzag integer of `bits` bits. Stochastic rounding to the neighbouring
// level keeps the expectation.
class Dithering : public Quantizer {
 public:
  Dithering(uint32_t bits, QuantizedSpec::Norm norm)
      : bits_(static_cast<int>(bits)), levels_((1 << (bits - 1)) - 1), norm_(norm) {}
  Rest rest() const override { return Rest::kDropped; }
  bool stochastic() const override { return true; }
  size_t BytesOf(size_t n) const override { return 4 + (n * static_cast<size_t>(bits_) + 7) / 8; }
  void Encode(const float* x, size_t n, uint64_t salt, uint8_t* out) const override {
    const float norm =
        norm_ == QuantizedSpec::Norm::kMax ? LargestMagnitude(x, n) : static_cast<float>(std::sqrt(SumOfSquares(x, n)));
    Store(out, norm);
    std::vector<int32_t> codes(n);
    for (size_t i = 0; i < n && norm > 0; ++i) {
      const int32_t level = LevelOf(std::min(1.0f, std::fabs(x[i]) / norm), Draw(salt, i));
      codes[i] = x[i] < 0 ? -level : level;
    }
    const std::vector<uint8_t> packed = PackIntegers(codes, bits_);
    std::memcpy(out + 4, packed.data(), packed.size());
  }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override {
    const float norm = Load(in);
    GW_RETURN_IF_ERROR(CheckScale(norm));
    std::vector<int32_t> codes(n);
    GW_RETURN_IF_ERROR(UnpackIntegers({in + 4, BytesOf(n) - 4}, bits_, n, codes.data()));
    for (size_t i = 0; i < n; ++i) {
      const int32_t level = std::abs(codes[i]);
      if (level > levels_) return absl::InvalidArgumentError("quantized run: a level that does not exist");
      const float magnitude = norm * FractionOf(level);
      out[i] = codes[i] < 0 ? -magnitude : magnitude;
    }
    return absl::OkStatus();
  }

 protected:
  // The level of a fraction y in [0, 1], drawn by u in [0, 1).
  virtual int32_t LevelOf(float y, float u) const = 0;
  virtual float FractionOf(int32_t level) const = 0;
  int32_t levels() const { return levels_; }

 private:
  const int bits_;
  const int32_t levels_;  // above 0
  const QuantizedSpec::Norm norm_;
};

// QSGD (Alistarh et al. 2017, section 3.1) with the Euclidean norm; linear dithering of BytePS-Compress with either.
class Linear final : public Dithering {
 public:
  using Dithering::Dithering;

 private:
  int32_t LevelOf(float y, float u) const override {
    const float scaled = y * static_cast<float>(levels());
    const int32_t low = static_cast<int32_t>(scaled);
    return low + static_cast<int32_t>(u < scaled - static_cast<float>(low));
  }
  float FractionOf(int32_t level) const override { return static_cast<float>(level) / static_cast<float>(levels()); }
};

// Natural dithering (Horvath et al. 2019, definition 2): levels 0 and 2^(1 - s), ..., 1/2, 1.
class Natural final : public Dithering {
 public:
  using Dithering::Dithering;

 private:
  int32_t LevelOf(float y, float u) const override {
    const float lowest = FractionOf(1);
    if (y < lowest) return static_cast<int32_t>(u * lowest < y);
    const int exponent = static_cast<int>(kernels::FloatBits(y) >> 23) - 127;  // y is normal: lowest is
    const float low = kernels::PowerOfTwo(exponent);
    return exponent + levels() + static_cast<int32_t>(low + u * low < y);
  }
  float FractionOf(int32_t level) const override { return level == 0 ? 0.0f : kernels::PowerOfTwo(level - levels()); }
};

}  // namespace

std::unique_ptr<Quantizer> MakeQuantizer(const QuantizedSpec& spec) {
  switch (spec.scheme) {
    case Scheme::kFp16:
      return std::make_unique<Fp16>();
    case Scheme::kOneBit:
      return std::make_unique<OneBit>();
    case Scheme::kSignSgd:
      return std::make_unique<Sign>(Rest::kDropped);
    case Scheme::kSigNum:
      return std::make_unique<Sign>(Rest::kMomentum);
    case Scheme::kEfSignSgd:
      return std::make_unique<ScaledSign>();
    case Scheme::kTernGrad:
      return std::make_unique<TernGrad>(spec.clip);
    case Scheme::kQsgd:
    case Scheme::kLinear:
      return std::make_unique<Linear>(spec.bits, spec.norm);
    case Scheme::kNatural:
      return std::make_unique<Natural>(spec.bits, spec.norm);
  }
  return nullptr;
}

}  // namespace gradwire::quantized
