// A worker's checkpoint goes on in the job that it was written in, and in no other of that name.
#include <gmock/gmock.h>

#include "tests/integration/client/cluster.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kShards = 2;

// A job of one worker, on servers that keep it in memory or on disk.
class CheckpointOfAJob : public ::testing::TestWithParam<std::pair<v1::RoundMode, bool>> {
 protected:
  static v1::JobSpec Spec() {
    v1::JobSpec spec = MakeSpec("checkpoint", "tagc:density=0.1", v1::OPTIMIZER_ADAMW, 1);
    spec.mutable_rounds()->set_mode(GetParam().first);
    if (GetParam().first == v1::ROUNDS_BOUNDED) spec.mutable_rounds()->set_staleness(2);
    if (GetParam().second) spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
    return spec;
  }
  // From the job's beginning; leaves it with its last step.
  void Train(uint64_t steps, bool save) {
    Worker worker(spec_, 0);
    ASSERT_EQ(worker.Join(cluster_.addresses()), absl::OkStatus());
    ASSERT_EQ(worker.session().start_version(), 0u);
    for (uint64_t step = 0; step < steps; ++step) {
      worker.Fill(save ? step : 100 + step);
      ASSERT_EQ(worker.Step(0.01f), absl::OkStatus());
    }
    ASSERT_EQ(worker.session().Drain(), absl::OkStatus());
    if (save) {
      ASSERT_EQ(worker.session().Save(path_), absl::OkStatus());
    }
  }
  absl::Status Resume(std::unique_ptr<Session>* session) {
    SessionOptions options = again_.Options(cluster_.addresses());
    options.resume.from = path_;
    return JoinInto(session, std::move(options));
  }

  const testing_support::TemporaryFolder folder_{"checkpoint"};
  const std::string path_ = folder_.path() + "/worker.checkpoint";
  const v1::JobSpec spec_ = Spec();
  Cluster cluster_{kShards, "inproc", {}, 0, GetParam().second ? folder_.path() : ""};
  Worker again_{spec_, 0};
};

TEST_P(CheckpointOfAJob, ThatWasDeletedIsNotGoneOnWithInTheNextOneOfItsName) {
  Train(5, /*save=*/true);
  for (const uint64_t steps : {5, 9}) {  // as far as the file, or further
    for (uint32_t s = 0; s < kShards; ++s) ASSERT_EQ(cluster_.Delete(s, "checkpoint"), absl::OkStatus());
    Train(steps, /*save=*/false);
    std::unique_ptr<Session> session;
    const absl::Status refused = Resume(&session);
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << steps << ": " << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("without the checkpoint"));
  }
}

TEST_P(CheckpointOfAJob, ThatIsStillThereIsGoneOnWith) {
  Train(5, /*save=*/true);
  std::unique_ptr<Session> session;
  ASSERT_EQ(Resume(&session), absl::OkStatus());
  EXPECT_EQ(session->resumed(), GetParam().first == v1::ROUNDS_SYNC);
}

// It went with its servers, and others have made it anew, from their checkpoints.
TEST_P(CheckpointOfAJob, ThatOthersHaveMadeAnewInMemoryIsJoined) {
  if (GetParam().second) GTEST_SKIP() << "a durable job comes back with its server";
  Train(5, /*save=*/true);
  for (uint32_t s = 0; s < kShards; ++s) {
    cluster_.Kill(s);
    cluster_.Restart(s);
  }
  Train(3, /*save=*/false);
  std::unique_ptr<Session> session;
  EXPECT_EQ(Resume(&session).code(), absl::StatusCode::kDataLoss) << "they are behind it";
  for (uint32_t s = 0; s < kShards; ++s) ASSERT_EQ(cluster_.Delete(s, "checkpoint"), absl::OkStatus());
  Train(5, /*save=*/false);
  ASSERT_EQ(Resume(&session), absl::OkStatus());
  EXPECT_FALSE(session->resumed()) << "with the parameters of the shards";
}

INSTANTIATE_TEST_SUITE_P(Jobs, CheckpointOfAJob,
                         ::testing::Values(std::pair(v1::ROUNDS_SYNC, false), std::pair(v1::ROUNDS_SYNC, true),
                                           std::pair(v1::ROUNDS_BOUNDED, false)));

}  // namespace
}  // namespace gradwire::testing
