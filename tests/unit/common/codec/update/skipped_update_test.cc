// The update frame of a skipped round: what it says, and what is refused of one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "common/codec/frame/parameters.h"
#include "common/codec/update/update.h"
#include "common/job/norms.h"
#include "common/optimizer/optimizer.h"

namespace gradwire {
namespace {

class SkippedUpdateTest : public ::testing::TestWithParam<const char*> {
 protected:
  static Job MakeJob(v1::NonFinitePolicy policy) {
    v1::JobSpec spec;
    spec.set_name("job");
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
    spec.set_codec(GetParam());
    spec.set_max_workers(2);
    spec.set_nonfinite(policy);
    auto* t = spec.add_tensors();
    t->set_name("w");
    t->add_shape(50'000);
    return *Job::Make(spec);
  }
  SkippedUpdateTest() {
    codec_ = *MakeCodec({&job_, &at(), backend_.get()});
    id_.shard = 1;
    id_.round = 7;
    id_.learning_rates = rates_;
    id_.nonfinite_rounds = 3;
  }
  const BucketLayout& at() const { return layout_.at(0, 1); }
  RoundPlan Plan() const {
    RoundPlan plan = codec_->InitialPlan();
    for (int8_t& exponent : plan.exponents) exponent = -9;
    if (std::string(GetParam()).starts_with("tagc")) {
      plan.sketch_groups = 1;
      plan.cells_per_group = 1200;
    }
    return plan;
  }

  const Job job_ = MakeJob(v1::NONFINITE_SKIP);
  const Layout layout_ = *Layout::Make(job_, 2);
  const std::unique_ptr<kernels::Backend> backend_ = *kernels::MakeBackend("cpu");
  std::unique_ptr<Codec> codec_;
  const std::vector<float> rates_ = {0.25f};
  FrameIdentity id_;
};

TEST_P(SkippedUpdateTest, KeepsThePlanAndAppliesNothing) {
  const UpdateFrame frame = SkippedUpdate(id_, at(), Plan());
  EXPECT_TRUE(frame.skipped);
  const auto update = DecodeUpdate(frame.chunks, job_, at(), Plan());
  ASSERT_TRUE(update.ok()) << update.status();
  EXPECT_TRUE(update->skipped);
  EXPECT_EQ(update->nonfinite_rounds, 3u);
  EXPECT_EQ(update->round, 7u);
  EXPECT_EQ(update->contributors, 0u);
  EXPECT_EQ(update->learning_rates, rates_);
  EXPECT_EQ(update->next, Plan());
  EXPECT_EQ(update->body, Update::Body::kEmpty);
}

TEST_P(SkippedUpdateTest, IsRefusedWhereItCannotBe) {
  const auto refused = [&](const UpdateFrame& frame, const Job& job) {
    return DecodeUpdate(frame.chunks, job, at(), Plan()).status().code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused(SkippedUpdate(id_, at(), Plan()), MakeJob(v1::NONFINITE_REFUSE)));
  id_.nonfinite_rounds = 0;
  EXPECT_TRUE(refused(SkippedUpdate(id_, at(), Plan()), job_)) << "this one counts";
  id_.nonfinite_rounds = 8;
  EXPECT_TRUE(refused(SkippedUpdate(id_, at(), Plan()), job_)) << "more than there were";
}

TEST_P(SkippedUpdateTest, ParametersSayHowManyThereWere) {
  const std::vector<float> p(at().elements, 0.5f);
  const PlanWindow window(1, 7, {Plan()}, 3);
  const auto chunks = EncodeParameters(at(), window, ParameterContent::kFloat32, {.parameter = p.data()});
  std::vector<float> out(p.size());
  const auto plans = DecodeParameters(chunks, job_, at(), 7, {.parameter = out.data()});
  ASSERT_TRUE(plans.ok()) << plans.status();
  EXPECT_EQ(*plans, window);
  // Rounds that replaced parameters count in every job.
  EXPECT_TRUE(DecodeParameters(chunks, MakeJob(v1::NONFINITE_REFUSE), at(), 7, {.parameter = out.data()}).ok());
  const PlanWindow more(1, 7, {Plan()}, 8);
  const auto refused = EncodeParameters(at(), more, ParameterContent::kFloat32, {.parameter = p.data()});
  EXPECT_EQ(DecodeParameters(refused, job_, at(), 7, {.parameter = out.data()}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Codecs, SkippedUpdateTest,
                         ::testing::Values("dense:values=fp32", "dense:values=fixed16", "tagc:density=0.05", "thc"));

// As torch's optimizers, which a GradScaler does not call for a step that it skips.
TEST(SkippedRounds, DoNotCountForTheBiasCorrection) {
  v1::JobSpec spec;
  spec.set_name("job");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
  spec.set_nonfinite(v1::NONFINITE_SKIP);
  spec.add_tensors()->set_name("w");
  const Job job = *Job::Make(spec);
  const Layout layout = *Layout::Make(job, 1);
  const auto backend = *kernels::MakeBackend("cpu");
  const auto stepped = [&](uint64_t round, uint32_t nonfinite_rounds) {
    float p = 1, m = 0, v = 0;
    const float gradient = 0.5f;
    const RunState run = {&p, &m, &v};
    Update update;
    update.round = round;
    update.nonfinite_rounds = nonfinite_rounds;
    update.contributors = 1;
    update.learning_rates = {0.1f};
    update.body = Update::Body::kDenseFloat;
    update.dense.push_back({0, 1, Bytes::Borrow({reinterpret_cast<const uint8_t*>(&gradient), sizeof(gradient)})});
    EXPECT_TRUE(ApplyUpdate(job, layout.at(0, 0), update, {&run, 1}, *backend).ok());
    return p;
  };
  EXPECT_EQ(stepped(5, 4), stepped(1, 0));
  EXPECT_NE(stepped(5, 0), stepped(1, 0));
}

}  // namespace
}  // namespace gradwire
