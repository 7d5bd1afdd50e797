#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/codec/quantized/quantizer.h"

namespace gradwire::quantized {
namespace {

// What a run becomes on its way.
std::vector<float> Sent(const QuantizedSpec& spec, const std::vector<float>& run) {
  const std::unique_ptr<Quantizer> quantizer = MakeQuantizer(spec);
  std::vector<uint8_t> bytes(quantizer->BytesOf(run.size()));
  quantizer->Encode(run.data(), run.size(), /*salt=*/1, bytes.data());
  std::vector<float> sent(run.size());
  EXPECT_TRUE(quantizer->Decode(bytes.data(), run.size(), sent.data()).ok());
  return sent;
}

QuantizedSpec Clipped(float clip) { return {.scheme = QuantizedSpec::Scheme::kTernGrad, .clip = clip}; }

TEST(TernGrad, RunsWithoutDeviationAreSent) {
  for (const float clip : {0.5f, 1.0f, 2.5f, 100.0f}) {
    for (const size_t n : {1u, 2u, 3u, 64u, 4095u}) {
      for (const float value : {0.1f, -3.7f, 1e-20f}) {
        EXPECT_EQ(Sent(Clipped(clip), std::vector<float>(n, value)), std::vector<float>(n, value)) << clip << ", " << n;
      }
    }
  }
  EXPECT_EQ(Sent(Clipped(2.5f), {0, 0, 0}), std::vector<float>(3, 0.0f));
}

TEST(TernGrad, WhatHardlyDeviatesIsSent) {
  std::vector<float> run(1000, 1.0f);
  run[7] = 1.0001f;
  for (const float x : Sent(Clipped(2.5f), run)) EXPECT_TRUE(x == 0 || x == 1.0001f) << x;
}

TEST(TernGrad, TailsAreClipped) {
  std::vector<float> run(1000);
  for (size_t i = 0; i < run.size(); ++i) run[i] = i % 2 == 0 ? 1.0f : -1.0f;
  run[7] = -50;
  const std::vector<float> sent = Sent(Clipped(2.5f), run);
  const double mean = (0.0 - 50 + 1) / 1000;
  const double deviation = std::sqrt((999.0 + 2500) / 1000 - mean * mean);
  EXPECT_NEAR(static_cast<double>(sent[7]), -2.5 * deviation, 1e-5);
  EXPECT_EQ(Sent(Clipped(0), run)[7], -50);
}

}  // namespace
}  // namespace gradwire::quantized
