// The fixture of the agreement tests: a subject, the reference backend, inputs by pattern, and comparison by bits.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/reference/reference_backend.h"
#include "tests/gpu/buffer.h"
#include "tests/gpu/subject.h"

namespace gradwire::kernels::cuda {

// Ragged around vectors, rows, blocks and tiles; a prime near 100,000.
inline constexpr size_t kLengths[] = {0, 1, 3, 63, 64, 65, 1023, 1024, 1025, 2047, 2049, 4095, 4096, 4097, 99'991};
inline constexpr size_t kFewLengths[] = {0, 1, 65, 1025, 4096, 99'991};

enum class Pattern { kNormal, kZeros, kTies, kClustered, kDenormal, kWide, kAlternating };
inline constexpr Pattern kPatterns[] = {Pattern::kNormal,   Pattern::kZeros, Pattern::kTies,       Pattern::kClustered,
                                        Pattern::kDenormal, Pattern::kWide,  Pattern::kAlternating};

// Finite values.
inline std::vector<float> MakeValues(Pattern pattern, size_t n, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) {
    switch (pattern) {
      case Pattern::kNormal:
        x[i] = normal(random);
        break;
      case Pattern::kZeros:
        x[i] = random() % 2 == 0 ? 0.0f : -0.0f;
        break;
      case Pattern::kTies:
        x[i] = random() % 2 == 0 ? 1.0f : -1.0f;
        break;
      case Pattern::kClustered:
        x[i] = i / 256 % 16 == 3 ? normal(random) * 100 : 0.0f;
        break;
      case Pattern::kDenormal:
        x[i] = std::bit_cast<float>(static_cast<uint32_t>(random()) & 0x80FFFFFFu);
        break;
      case Pattern::kWide: {
        const float v = std::bit_cast<float>(static_cast<uint32_t>(random()));
        x[i] = std::isfinite(v) ? v : -0.0f;
        break;
      }
      case Pattern::kAlternating:
        x[i] = std::ldexp(i % 2 == 0 ? 1.0f : -1.0f, static_cast<int>(i % 40) - 20);
        break;
    }
  }
  return x;
}

inline std::vector<uint8_t> MakeBytes(size_t n, std::mt19937_64& random) {
  std::vector<uint8_t> bytes(n);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  return bytes;
}

template <class T>
std::vector<uint8_t> BytesOf(const std::vector<T>& values) {
  const auto* p = reinterpret_cast<const uint8_t*>(values.data());
  return {p, p + values.size() * sizeof(T)};
}

// Same bits; NaN equals any NaN, because a GPU does not keep the payload that a CPU keeps.
inline ::testing::AssertionResult SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << a.size() << " values against " << b.size();
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<uint32_t>(a[i]) == std::bit_cast<uint32_t>(b[i]) || (std::isnan(a[i]) && std::isnan(b[i]))) {
      continue;
    }
    return ::testing::AssertionFailure() << "element " << i << ": " << a[i] << " against " << b[i];
  }
  return ::testing::AssertionSuccess();
}

class Agreement : public ::testing::TestWithParam<NamedSubject> {
 protected:
  AsyncBackend& backend() { return subject_->backend(); }
  template <class T>
  Buffer<T> OnDevice(const std::vector<T>& values, size_t offset_bytes = 0) {
    return Buffer<T>(backend().runtime(), values, offset_bytes);
  }

  const std::unique_ptr<Subject> subject_ = GetParam().make();
  const std::unique_ptr<Backend> reference_ = MakeReferenceBackend();
  std::mt19937_64 random_{17};
};

#define GW_AGREEMENT_SUITE(suite)                                        \
  INSTANTIATE_TEST_SUITE_P(Cuda, suite, ::testing::ValuesIn(Subjects()), \
                           [](const ::testing::TestParamInfo<NamedSubject>& info) { return info.param.name; })

}  // namespace gradwire::kernels::cuda
