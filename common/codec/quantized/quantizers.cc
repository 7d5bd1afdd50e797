// See quantizer.h.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/level_bits.h"
#include "common/codec/bits/reductions.h"
#include "common/codec/bits/value_format.h"
#include "common/codec/quantized/loops.h"
#include "common/codec/quantized/quantizer.h"

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

size_t SignBytes(size_t n) { return (n + 7) / 8; }

absl::Status DecodeSigns(const uint8_t* in, size_t n, float positive, float negative, float* out) {
  if (n % 8 != 0 && in[n / 8] >> (n % 8) != 0) return absl::InvalidArgumentError("quantized run: padding is not 0");
  ReadSigns(in, n, positive, negative, out);
  return absl::OkStatus();
}

// Elements whose codes are made before they are packed: whole bytes, however many bits each has.
constexpr size_t kPiece = 1000;

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
    const SignedSums sums = SumsBySign(x, n);
    const size_t negatives = n - sums.positives;
    Store(out, MeanOf(sums.positive, sums.positives));
    Store(out + 4, MeanOf(-sums.negative, negatives));
    WriteSigns(x, n, out + 8);
  }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override {
    GW_RETURN_IF_ERROR(CheckScale(Load(in)));
    GW_RETURN_IF_ERROR(CheckScale(Load(in + 4)));
    return DecodeSigns(in + 8, n, Load(in), -Load(in + 4), out);
  }

 private:
  static float MeanOf(double sum, size_t count) {
    return count == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(count));
  }
};

// SignSGD and Signum (Bernstein et al. 2018): the sign of the gradient, or of its momentum.
class Sign final : public Quantizer {
 public:
  explicit Sign(Rest rest) : rest_(rest) {}
  Rest rest() const override { return rest_; }
  bool sends_magnitudes() const override { return false; }
  size_t BytesOf(size_t n) const override { return SignBytes(n); }
  void Encode(const float* x, size_t n, uint64_t, uint8_t* out) const override { WriteSigns(x, n, out); }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override { return DecodeSigns(in, n, 1, -1, out); }

 private:
  const Rest rest_;
};

// EF-SignSGD (Karimireddy et al. 2019, algorithm 1): the sign times the mean magnitude, the rest fed back.
class ScaledSign final : public Quantizer {
 public:
  Rest rest() const override { return Rest::kResidual; }
  size_t BytesOf(size_t n) const override { return 4 + SignBytes(n); }
  void Encode(const float* x, size_t n, uint64_t, uint8_t* out) const override {
    Store(out, static_cast<float>(SumOfMagnitudes(x, n) / static_cast<double>(n)));
    WriteSigns(x, n, out + 4);
  }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override {
    GW_RETURN_IF_ERROR(CheckScale(Load(in)));
    return DecodeSigns(in + 4, n, Load(in), -Load(in), out);
  }
};

// TernGrad (Wen et al. 2017, eq. 1-5): s * sign(x) * b, b = 1 with probability |x| / s, s the largest magnitude, or
// what it is clipped to. Five digits of base 3 are a byte.
class TernGrad final : public Quantizer {
 public:
  explicit TernGrad(float clip) : clip_(clip) {}
  Rest rest() const override { return Rest::kDropped; }
  bool stochastic() const override { return true; }
  size_t BytesOf(size_t n) const override { return 4 + (n + 4) / 5; }
  void Encode(const float* x, size_t n, uint64_t salt, uint8_t* out) const override {
    float scale = LargestMagnitude(x, n);
    if (clip_ > 0) {
      const double mean = Sum(x, n) / static_cast<double>(n);
      const double variance = std::max(0.0, SumOfSquares(x, n) / static_cast<double>(n) - mean * mean);
      const float bound = clip_ * static_cast<float>(std::sqrt(variance));
      // It is meant for tails. Of a run that hardly deviates from its mean (of one element, of equal ones) it would
      // take most or all, and nothing keeps that.
      if (std::fabs(mean) < static_cast<double>(bound)) scale = std::min(scale, bound);
    }
    Store(out, scale);
    uint8_t* byte = out + 4;
    for (size_t first = 0; first < n; first += kPiece) {
      uint8_t digits[kPiece];
      const size_t count = std::min(kPiece, n - first);
      TernaryDigits(x + first, count, scale, salt, first, digits);
      std::fill(digits + count, digits + (count + 4) / 5 * 5, uint8_t{1});
      for (const uint8_t* d = digits; d < digits + count; d += 5)
        *byte++ = static_cast<uint8_t>(d[0] + 3 * d[1] + 9 * d[2] + 27 * d[3] + 81 * d[4]);
    }
  }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override {
    const float scale = Load(in);
    GW_RETURN_IF_ERROR(CheckScale(scale));
    const float values[3] = {-scale, 0.0f, scale};
    in += 4;
    if (LargestCode(in, (n + 4) / 5) >= kBytes)
      return absl::InvalidArgumentError("quantized run: a byte that is not five ternary digits");
    const size_t whole = n / 5;
    for (size_t byte = 0; byte < whole; ++byte) {
      const uint8_t* const digits = kDigits[in[byte]].data();
      for (size_t i = 0; i < 5; ++i) out[5 * byte + i] = values[digits[i]];
    }
    for (size_t i = 5 * whole; i < (n + 4) / 5 * 5; ++i) {
      const uint8_t digit = kDigits[in[whole]][i % 5];
      if (i < n) {
        out[i] = values[digit];
      } else if (digit != 1) {
        return absl::InvalidArgumentError("quantized run: padding is not 0");
      }
    }
    return absl::OkStatus();
  }

 private:
  static constexpr uint8_t kBytes = 243;  // 3^5
  static constexpr std::array<std::array<uint8_t, 5>, kBytes> kDigits = [] {
    std::array<std::array<uint8_t, 5>, kBytes> all{};
    for (size_t byte = 0; byte < kBytes; ++byte)
      for (size_t i = 0, rest = byte; i < 5; ++i, rest /= 3) all[byte][i] = static_cast<uint8_t>(rest % 3);
    return all;
  }();

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
  size_t BytesOf(size_t n) const override { return 4 + LevelBytes(n, bits_); }
  void Encode(const float* x, size_t n, uint64_t salt, uint8_t* out) const override {
    // A Euclidean norm that is no float32 becomes the largest one, which no element is above.
    constexpr double kLargest = static_cast<double>(std::numeric_limits<float>::max());
    const float norm = norm_ == QuantizedSpec::Norm::kMax
                           ? LargestMagnitude(x, n)
                           : static_cast<float>(std::min(std::sqrt(SumOfSquares(x, n)), kLargest));
    Store(out, norm);
    uint8_t codes[kPiece] = {};
    for (size_t first = 0; first < n; first += kPiece) {
      const size_t count = std::min(kPiece, n - first);
      if (norm > 0) CodesOf(x + first, count, norm, salt, first, codes);
      PackLevels(codes, count, bits_, out + 4 + LevelBytes(first, bits_));
    }
  }
  absl::Status Decode(const uint8_t* in, size_t n, float* out) const override {
    const float norm = Load(in);
    GW_RETURN_IF_ERROR(CheckScale(norm));
    for (size_t first = 0; first < n; first += kPiece) {
      uint8_t codes[kPiece];
      const size_t count = std::min(kPiece, n - first);
      if (!UnpackLevels(in + 4 + LevelBytes(first, bits_), count, bits_, codes))
        return absl::InvalidArgumentError("quantized run: padding is not 0");
      if (LargestCode(codes, count) > 2 * levels_)
        return absl::InvalidArgumentError("quantized run: a level that does not exist");
      ValuesOf(codes, count, norm, out + first);
    }
    return absl::OkStatus();
  }

 protected:
  // Zigzag codes of the levels of elements first .. first + n.
  virtual void CodesOf(const float* x, size_t n, float norm, uint64_t salt, size_t first, uint8_t* codes) const = 0;
  virtual void ValuesOf(const uint8_t* codes, size_t n, float norm, float* out) const = 0;
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
  void CodesOf(const float* x, size_t n, float norm, uint64_t salt, size_t first, uint8_t* codes) const override {
    LinearCodes(x, n, norm, levels(), salt, first, codes);
  }
  void ValuesOf(const uint8_t* codes, size_t n, float norm, float* out) const override {
    LinearValues(codes, n, norm, levels(), out);
  }
};

// Natural dithering (Horvath et al. 2019, definition 2): levels 0 and 2^(1 - s), ..., 1/2, 1.
class Natural final : public Dithering {
 public:
  using Dithering::Dithering;

 private:
  void CodesOf(const float* x, size_t n, float norm, uint64_t salt, size_t first, uint8_t* codes) const override {
    NaturalCodes(x, n, norm, levels(), salt, first, codes);
  }
  void ValuesOf(const uint8_t* codes, size_t n, float norm, float* out) const override {
    NaturalValues(codes, n, norm, levels(), out);
  }
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
