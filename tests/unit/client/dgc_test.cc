// Deep Gradient Compression on one worker (Lin et al. 2017, arXiv 1712.01887, sections 3.2 and 3.3, appendix B) next to
// its definition in float64: velocity, residual, clipping, masking; and what becomes of a frame that was not merged.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "common/codec/select/select.h"
#include "tests/unit/client/one_tensor.h"

namespace gradwire::client {
namespace {

constexpr uint64_t kElements = 5000;
constexpr float kRate = 0.1f;

class DgcTest : public OneTensorTest {
 protected:
  void Prepare(const std::string& codec, uint32_t workers = 1) {
    v1::JobSpec spec = Spec(kElements, codec);
    spec.set_max_workers(workers);
    Make(spec);
  }

  std::vector<float> Gradient(uint64_t round) const {
    std::mt19937 random(static_cast<uint32_t>(round));
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> g(kElements);
    for (float& x : g) x = normal(random) * std::exp(normal(random));
    return g;
  }

  // One round; which elements were sent.
  EncodedFrame Push(uint64_t round, std::vector<bool>* sent) {
    const std::vector<float> g = Gradient(round);
    EXPECT_TRUE(store_->Ingest(0, g.data(), round).ok());
    store_->Select(0, round);
    const std::vector<float> formed = Pending();
    FrameIdentity id;
    id.round = round;
    id.learning_rates = {&kRate, 1};
    auto frame = encoder_->Encode(id, codec_->InitialPlan(), store_->InputsOf(slice()));
    EXPECT_TRUE(frame.ok()) << frame.status();
    store_->Encoded(slice());
    store_->EndRound();
    sent->assign(kElements, false);
    for (size_t i = 0; i < kElements; ++i) (*sent)[i] = Pending()[i] != formed[i];
    return *std::move(frame);
  }
  std::span<const float> PendingSpan() const { return store_->KeptOf(0).pending.values; }
  std::vector<float> Pending() const { return {PendingSpan().begin(), PendingSpan().end()}; }
  std::span<const float> Velocity() const { return store_->KeptOf(0).velocity.values; }
};

TEST_F(DgcTest, IsItsDefinition) {
  struct Case {
    const char* codec;
    bool nesterov;
    double clip;
  };
  for (const Case& c :
       {Case{"dgc:density=0.05,momentum=0.9", false, 0}, Case{"dgc:density=0.05,nesterov=true", true, 0},
        Case{"dgc:density=0.05,clip=100", false, 100}}) {
    SCOPED_TRACE(c.codec);
    constexpr uint32_t kWorkers = 4;
    Prepare(c.codec, kWorkers);
    std::vector<double> u(kElements), v(kElements);
    for (uint64_t round = 1; round <= 8; ++round) {
      const std::vector<float> g = Gradient(round);
      double squares = 0;
      for (const float x : g) squares += static_cast<double>(x) * static_cast<double>(x);
      const double threshold = c.clip / std::sqrt(kWorkers);
      const double scale = c.clip > 0 && std::sqrt(squares) > threshold ? threshold / std::sqrt(squares) : 1;
      EXPECT_EQ(scale<1, c.clip> 0) << "the case is none";
      for (size_t i = 0; i < kElements; ++i) {
        const double x = scale * static_cast<double>(g[i]);
        u[i] = 0.9 * u[i] + x;
        v[i] += c.nesterov ? 0.9 * u[i] + x : u[i];
      }
      std::vector<bool> sent;
      Push(round, &sent);
      double least_sent = 1e30, largest_kept = 0;
      for (size_t i = 0; i < kElements; ++i) {
        if (sent[i]) {
          least_sent = std::min(least_sent, std::fabs(v[i]));
          u[i] = v[i] = 0;
        } else {
          largest_kept = std::max(largest_kept, std::fabs(v[i]));
        }
        ASSERT_NEAR(Velocity()[i], u[i], 1e-5 * (1 + std::fabs(u[i]))) << "round " << round << ", element " << i;
        ASSERT_NEAR(PendingSpan()[i], v[i], 1e-5 * (1 + std::fabs(v[i]))) << "round " << round << ", element " << i;
        ASSERT_EQ(sent[i] && Velocity()[i] != 0, false) << "masked exactly";
      }
      EXPECT_GT(least_sent, 0.99 * largest_kept) << "the largest are sent";
      EXPECT_NEAR(std::count(sent.begin(), sent.end(), true), 0.05 * kElements, 0.005 * kElements);
    }
  }
}

TEST_F(DgcTest, AFrameThatWasNotMergedComesBackWithoutItsMomentum) {
  Prepare("dgc:density=0.05");
  std::vector<bool> sent;
  Push(1, &sent);
  const EncodedFrame late = Push(2, &sent);
  const std::vector<float> velocity(Velocity().begin(), Velocity().end());
  const std::vector<float> kept = Pending();
  ASSERT_TRUE(store_->Returned(slice(), *codec_, late).ok());
  EXPECT_EQ(std::vector<float>(Velocity().begin(), Velocity().end()), velocity);
  for (size_t i = 0; i < kElements; ++i) {
    ASSERT_EQ(PendingSpan()[i] != kept[i], sent[i]) << "element " << i;
    if (sent[i]) {
      ASSERT_EQ(Velocity()[i], 0) << "element " << i;
    }
  }
}

TEST_F(DgcTest, JobsWithAnotherMomentumAreRefused) {
  v1::JobSpec spec;
  spec.set_name("unit");
  spec.add_tensors()->set_name("weight");
  spec.mutable_tensors(0)->add_shape(10);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.set_codec("dgc");
  ASSERT_TRUE(Job::Make(spec).ok());
  v1::JobSpec twice = spec;
  twice.mutable_optimizer()->add_groups()->set_momentum(0.5f);
  EXPECT_NE(std::string(Job::Make(twice).status().message()).find("momentum=M in the codec"), std::string::npos);
  v1::JobSpec steps = spec;
  steps.mutable_optimizer()->set_kind(v1::OPTIMIZER_STEP);
  steps.set_push(v1::PUSH_STEP);
  EXPECT_NE(std::string(Job::Make(steps).status().message()).find("codec topk"), std::string::npos);
}

}  // namespace
}  // namespace gradwire::client
