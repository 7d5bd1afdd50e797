// What PowerSGD promises beyond what every codec does: a matrix of low rank travels exactly, factors get better from
// step to step, what is left comes later, and the two rounds of a step stand each for itself.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "tests/conformance/codec/codec_harness.h"

namespace gradwire::testing {
namespace {

constexpr uint64_t kRows = 48;
constexpr uint64_t kCols = 50;

ClusterOptions MatrixOf(uint32_t rank, uint32_t workers) {
  ClusterOptions options;
  options.codec = "powersgd:rank=" + std::to_string(rank);
  options.workers = workers;
  options.elements = kRows * kCols;
  options.run_elements = 256;  // rows cross runs
  return options;
}

double NormOf(const std::vector<double>& values) {
  double square = 0;
  for (const double x : values) square += x * x;
  return std::sqrt(square);
}

// sum over k of scales[k] * u_k v_k^T, of columns that oscillate: orthogonal to each other.
std::vector<float> Spectrum(const std::vector<double>& scales) {
  std::vector<float> matrix(kRows * kCols);
  const auto column = [](size_t k, uint64_t i, uint64_t n) {
    return std::sqrt(2.0 / static_cast<double>(n)) *
           std::cos(std::numbers::pi * static_cast<double>((2 * i + 1) * (k + 1)) / static_cast<double>(2 * n));
  };
  for (uint64_t i = 0; i < kRows; ++i) {
    for (uint64_t j = 0; j < kCols; ++j) {
      double sum = 0;
      for (size_t k = 0; k < scales.size(); ++k) sum += scales[k] * column(k, i, kRows) * column(k, j, kCols);
      matrix[i * kCols + j] = static_cast<float>(sum);
    }
  }
  return matrix;
}

GradientFn Always(const std::vector<float>& matrix) {
  return [&matrix](uint32_t, uint64_t, std::vector<float>* out) { *out = matrix; };
}

double DistanceOf(const std::vector<double>& applied, const std::vector<float>& matrix) {
  std::vector<double> difference(applied);
  for (size_t i = 0; i < difference.size(); ++i) difference[i] -= static_cast<double>(matrix[i]);
  return NormOf(difference);
}

TEST(PowerSgd, AMeanOfItsRankTravelsExactly) {
  Cluster cluster(MatrixOf(2, 3));
  // Different matrices whose sum has rank 2.
  const std::vector<float> a = Spectrum({4}), b = Spectrum({0, 1}), noise = Spectrum({1, 2, 3, 4, 5, 6});
  const GradientFn gradient = [&](uint32_t worker, uint64_t, std::vector<float>* out) {
    for (size_t i = 0; i < out->size(); ++i) {
      (*out)[i] = worker == 0 ? a[i] + noise[i] : worker == 1 ? b[i] - noise[i] : 0.0f;
    }
  };
  cluster.Calibrate(gradient);
  const RoundResult result = cluster.Round(gradient);
  std::vector<float> sum(a.size());
  for (size_t i = 0; i < sum.size(); ++i) sum[i] = a[i] + b[i];
  EXPECT_LT(DistanceOf(result.applied, sum), 1e-4);
}

// Power iteration: from the factors of the step before to the best ones that there are.
TEST(PowerSgd, WarmStartFindsTheBestFactors) {
  const std::vector<float> matrix = Spectrum({8, 4, 2, 1});
  const double best = std::sqrt(2.0 * 2.0 + 1.0);
  Cluster cluster(MatrixOf(2, 1));
  double first = 0, last = 0;
  for (int round = 0; round < 40; ++round) {
    std::fill(cluster.pending(0).begin(), cluster.pending(0).end(), 0.0f);  // without what was left over
    std::vector<EncodedFrame> frames = cluster.EncodeAll(Always(matrix));
    auto accumulator = cluster.OpenAccumulator();
    MergeShuffled(frames, cluster.random(), accumulator.get());
    const RoundResult result = cluster.Close(std::move(frames), *accumulator->Finish(cluster.Identity(0), 1));
    if (round % 2 == 1) last = DistanceOf(result.applied, matrix);
    if (round == 1) first = last;
  }
  EXPECT_GT(first, 1.01 * best) << "a single step from drawn factors";
  EXPECT_NEAR(last, best, 1e-4 * best);
}

TEST(PowerSgd, WhatIsLeftComesLater) {
  constexpr int kSteps = 200;
  const std::vector<float> matrix = Spectrum({5, 4, 3, 3, 2, 2, 1, 1});
  Cluster cluster(MatrixOf(1, 2));
  cluster.Calibrate(Always(matrix));
  for (int step = 0; step < kSteps; ++step) cluster.Round(Always(matrix));
  EXPECT_LT(cluster.LargestLoss(), 1e-2);
  std::vector<double> mean(cluster.applied());
  for (double& x : mean) x /= 2 * kSteps;
  const double norm = DistanceOf(std::vector<double>(matrix.size()), matrix);
  EXPECT_LT(DistanceOf(mean, matrix), 0.1 * norm);
}

TEST(PowerSgd, BeginsAnewBehindGradientsOfZero) {
  const std::vector<float> zeros(kRows * kCols), matrix = Spectrum({3, 2});
  Cluster cluster(MatrixOf(2, 2));
  cluster.Calibrate(Always(zeros));
  for (int step = 0; step < 2; ++step) {
    const RoundResult result = cluster.Round(Always(zeros));
    EXPECT_EQ(NormOf(result.applied), 0);
  }
  cluster.Round(Always(matrix));  // its first round was made with zeros
  for (uint32_t w = 0; w < 2; ++w) {
    std::vector<double> rest(cluster.pending(w).begin(), cluster.pending(w).end());
    EXPECT_NEAR(NormOf(rest), std::sqrt(13.0), 1e-4) << "nothing was lost";
  }
  const RoundResult result = cluster.Round(Always(zeros));
  std::vector<double> mean(result.applied);
  for (double& x : mean) x /= 2;
  EXPECT_LT(DistanceOf(mean, matrix), 1e-4);
}

TEST(PowerSgd, PlansAreTheFactorsOfTheRoundBefore) {
  const std::vector<float> matrix = Spectrum({8, 4, 2, 1});
  Cluster cluster(MatrixOf(3, 2));
  EXPECT_EQ(cluster.plan().factors, std::vector<float>(3 * kCols));
  cluster.Calibrate(Always(matrix));
  const std::vector<float> p = cluster.plan().factors;
  ASSERT_EQ(p.size(), 3 * kRows);
  for (size_t a = 0; a < 3; ++a) {
    for (size_t b = 0; b < 3; ++b) {
      double product = 0;
      for (size_t i = 0; i < kRows; ++i) {
        product += static_cast<double>(p[a * kRows + i]) * static_cast<double>(p[b * kRows + i]);
      }
      EXPECT_NEAR(product, a == b ? 1 : 0, 1e-6);
    }
  }
  std::vector<EncodedFrame> frames = cluster.EncodeAll(Always(matrix));
  auto accumulator = cluster.OpenAccumulator();
  MergeShuffled(frames, cluster.random(), accumulator.get());
  const RoundResult result = cluster.Close(std::move(frames), *accumulator->Finish(cluster.Identity(0), 2));
  EXPECT_EQ(cluster.plan().factors.size(), 3 * kCols);
  EXPECT_EQ(result.update.body, Update::Body::kDenseFloat);
}

// The frames of a step are of the bytes of its factors, headers counted.
TEST(PowerSgd, FramesAreAsLargeAsTheirFactors) {
  const std::vector<float> matrix = Spectrum({8, 4, 2, 1});
  Cluster cluster(MatrixOf(2, 1));
  EXPECT_EQ(cluster.EncodeAll(Always(matrix))[0].bytes, 64 + 24 + 8 + 24 + 4 * 2 * kRows);
  cluster.Calibrate(Always(matrix));
  EXPECT_EQ(cluster.EncodeAll(Always(matrix))[0].bytes, 64 + 24 + 8 + 24 + 4 * 2 * kCols);
}

// A worker that is lost between the rounds has had its say in P; the mean of Q is that of those who are left.
TEST(PowerSgd, RoundsOfAStepMayHaveDifferentWorkers) {
  const std::vector<float> a = Spectrum({3}), b = Spectrum({0, 2});
  const GradientFn gradient = [&](uint32_t worker, uint64_t, std::vector<float>* out) { *out = worker == 0 ? a : b; };
  Cluster cluster(MatrixOf(2, 2));
  cluster.Calibrate(gradient);
  std::vector<EncodedFrame> frames = cluster.EncodeAll(gradient);
  auto accumulator = cluster.OpenAccumulator();
  MergeShuffled({frames[0]}, cluster.random(), accumulator.get());
  const auto update = accumulator->Finish(cluster.Identity(0), 1);
  ASSERT_TRUE(update.ok());
  const auto decoded = DecodeUpdate(update->chunks, cluster.job(), cluster.layout(), cluster.plan());
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_LT(DistanceOf(SumsOf(*decoded, cluster.layout()), a), 1e-4);
  // What the other one has sent comes back.
  std::vector<float*> runs;
  for (size_t i = 0; i < cluster.layout().runs.size(); ++i) {
    runs.push_back(cluster.pending(1).data() + cluster.layout().run_begin[i]);
  }
  ASSERT_TRUE(cluster.codec().Return(frames[1], nullptr, runs).ok());
  for (size_t i = 0; i < b.size(); ++i) ASSERT_NEAR(cluster.pending(1)[i], b[i], 1e-6);
}

TEST(PowerSgd, RefusesWhatDoesNotBelongToTheRound) {
  const std::vector<float> matrix = Spectrum({8, 4, 2, 1});
  Cluster cluster(MatrixOf(2, 1));
  const std::vector<EncodedFrame> first = cluster.EncodeAll(Always(matrix));
  const RoundPlan start = cluster.plan();
  cluster.Calibrate(Always(matrix));
  RoundPlan wrong = cluster.plan();
  wrong.factors.pop_back();
  const auto encode = [&](const RoundPlan& plan) {
    std::vector<RunInput> runs;
    for (size_t i = 0; i < cluster.layout().runs.size(); ++i) {
      float* const at = cluster.pending(0).data() + cluster.layout().run_begin[i];
      runs.push_back({at, at, {}});
    }
    return cluster.codec().NewEncoder()->Encode(cluster.Identity(1), plan, runs).status().code();
  };
  EXPECT_EQ(encode(wrong), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(encode(start), absl::StatusCode::kFailedPrecondition) << "the plan of another kind of round";
  EXPECT_EQ(encode(cluster.plan()), absl::StatusCode::kOk);
  // The update frame of the second round says nothing without the factors of the first.
  std::vector<EncodedFrame> frames = cluster.EncodeAll(Always(matrix));
  auto accumulator = cluster.OpenAccumulator();
  MergeShuffled(frames, cluster.random(), accumulator.get());
  const auto update = accumulator->Finish(cluster.Identity(0), 1);
  ASSERT_TRUE(update.ok());
  EXPECT_TRUE(
      absl::IsFailedPrecondition(DecodeUpdate(update->chunks, cluster.job(), cluster.layout(), RoundPlan()).status()));
  EXPECT_TRUE(DecodeUpdate(update->chunks, cluster.job(), cluster.layout(), cluster.plan()).ok());
  // What has no factors stays where it is.
  std::vector<float>& pending = cluster.pending(0);
  pending[5] = std::numeric_limits<float>::infinity();
  const std::vector<float> before = pending;
  EXPECT_EQ(encode(cluster.plan()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(pending, before);
}

}  // namespace
}  // namespace gradwire::testing
