// When snapshots are taken without anybody asking.
#include "server/snapshot/snapshotter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "server/journal/journal.h"
#include "tests/lib/fake_disk.h"
#include "tests/lib/manual_clock.h"
#include "tests/unit/server/frame_maker.h"
#include "tests/unit/server/small_environment.h"

namespace gradwire {
namespace {

using testing_support::FakeDisk;
using testing_support::FrameMaker;
using testing_support::ManualClock;
using testing_support::SmallSpec;

constexpr TimeNs kMs = 1'000'000;
constexpr char kJournal[] = "/journal";
constexpr char kSnapshots[] = "/data/snapshots";

// A job of one worker, which pushes without a transport. The journal is pumped by the test, on a disk of its own.
class SnapshotterTest : public testing::Test {
 protected:
  explicit SnapshotterTest(v1::DiskFailurePolicy policy = v1::DISK_FAILURE_CONTINUE)
      : spec_(Spec(policy)), frames_(spec_, 0, 1, 1) {
    EXPECT_TRUE(journal_disk_.CreateDirectory(kJournal).ok());
    EXPECT_TRUE(disk_.CreateDirectory("/data").ok());
    shard_ = *JobShard::Make(spec_, 0, 1, environment_);
    journal::JournalOptions options;
    options.job = "job";
    const bool wait = policy == v1::DISK_FAILURE_WAIT;
    options.on_failure = wait ? journal::OnFailure::kWait : journal::OnFailure::kContinue;
    options.backlog_limit_bytes = 20'000;  // two rounds
    auto writer = std::make_unique<journal::JournalWriter>(&journal_disk_, WriterOptions(), journal::ReadResult());
    auto journal = std::make_unique<journal::Journal>(options, std::move(writer), &clock_);
    journal_ = journal.get();
    shard_->log().SetSink(std::move(journal));
  }
  ~SnapshotterTest() override { shard_->log().Stop(); }

  static v1::JobSpec Spec(v1::DiskFailurePolicy policy) {
    v1::JobSpec spec = SmallSpec("job", 1);
    spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
    spec.mutable_durability()->set_on_failure(policy);
    return spec;
  }
  journal::JournalWriter::Options WriterOptions() const {
    journal::JournalWriter::Options options;
    options.directory = kJournal;
    options.identity = {shard_->job().digest(), shard_->layout().digest(), 0};
    return options;
  }
  void Join() {
    ASSERT_TRUE(shard_->Join(testing_support::IdentityOf("job", "a"), 0, true).ok());
    stream_.member = MakeMemberId("a", 1);
    stream_.incarnation = 1;
    stream_.worker = "a";
    for (uint32_t b = 0; b < frames_.buckets(); ++b) Push(frames_.Initialize(b, 1.0f));
  }
  void Round() {
    for (uint32_t b = 0; b < frames_.buckets(); ++b) Push(frames_.Push(b, round_, 1.0f));
    ++round_;
  }
  void Push(const std::vector<Bytes>& chunks) {
    for (const Bytes& chunk : chunks) {
      const auto ack = shard_->intake().Take(stream_, {&chunk, 1});
      ASSERT_TRUE(ack.ok()) << ack.status();
    }
    journal_->Pump();
  }
  v1::DurabilityStatus Durability() { return shard_->Describe(true, false).durability(); }

  const v1::JobSpec spec_;
  FrameMaker frames_;
  ManualClock clock_;
  const std::unique_ptr<kernels::Backend> backend_ = std::move(*kernels::MakeBackend("cpu"));
  const JobEnvironment environment_ = testing_support::SmallEnvironment(backend_.get(), &clock_);
  FakeDisk journal_disk_;
  FakeDisk disk_;  // of the snapshots; of their thread while one runs
  std::shared_ptr<JobShard> shard_;
  journal::Journal* journal_ = nullptr;
  PushStream stream_;
  uint64_t round_ = 0;
};

struct WaitingTest : SnapshotterTest {
  WaitingTest() : SnapshotterTest(v1::DISK_FAILURE_WAIT) {}
};

TEST_F(SnapshotterTest, RecordsThatWereGivenUpAreMadeGoodByASnapshot) {
  Join();
  Round();
  journal_disk_.set_write_error(absl::ResourceExhaustedError("no space left on device"));
  for (int i = 0; i < 6; ++i) Round();
  ASSERT_TRUE(Durability().hole());
  EXPECT_FALSE(shard_->log().WantsSnapshot()) << "the disk is still full";
  journal_disk_.set_write_error(absl::OkStatus());
  clock_.now += 3000 * kMs;
  journal_->Pump();
  ASSERT_FALSE(Durability().degraded());
  ASSERT_TRUE(Durability().hole());
  Round();
  {
    Snapshotter snapshotter(shard_, &disk_, kSnapshots, UINT64_MAX);
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (Durability().snapshots() == 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(Durability().snapshot_version(), round_);
  EXPECT_EQ(Durability().snapshot_error(), "");
  journal_->Pump();
  EXPECT_FALSE(Durability().hole());
  Round();
  const std::string digest = shard_->Describe(false, true).parameters_sha256();
  // What is on the two disks makes this very version again.
  const SnapshotFiles files(&disk_, kSnapshots, &shard_->job(), &shard_->layout(), 0);
  const absl::StatusOr<ShardState> snapshot = files.Load(round_ - 1);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  const std::shared_ptr<JobShard> again = *JobShard::Make(spec_, 0, 1, environment_);
  const absl::Status recovered = again->recovery().Recover(&*snapshot, [&](const Recovery::RecordVisitor& visit) {
    return journal::ReadJournal(journal_disk_, kJournal, WriterOptions().identity, false, visit).status();
  });
  ASSERT_EQ(recovered, absl::OkStatus());
  EXPECT_EQ(again->Describe(false, true).parameters_sha256(), digest);
  EXPECT_EQ(again->Describe(false, false).version(), round_);
}

TEST_F(WaitingTest, AVersionThatIsNotDurableYetIsNotTaken) {
  Join();
  Round();
  Push(frames_.Push(0, round_, 1.0f));
  journal_disk_.set_sync_error(absl::ResourceExhaustedError("no space left on device"));
  for (uint32_t b = 1; b < frames_.buckets(); ++b) Push(frames_.Push(b, round_, 1.0f));
  ++round_;
  SnapshotFiles files(&disk_, kSnapshots, &shard_->job(), &shard_->layout(), 0);
  const auto aside = [](const auto& work) { return work(); };
  EXPECT_EQ(TakeSnapshot(*shard_, files, absl::ZeroDuration(), aside).code(), absl::StatusCode::kDeadlineExceeded);
  journal_disk_.set_sync_error(absl::OkStatus());
  clock_.now += 3000 * kMs;
  journal_->Pump();
  EXPECT_EQ(TakeSnapshot(*shard_, files, absl::ZeroDuration(), aside), absl::OkStatus());
  EXPECT_EQ(Durability().snapshot_version(), round_);
}

TEST_F(SnapshotterTest, EveryCopyIsOfOneVersionWhileRoundsGoOn) {
  Join();
  Round();
  std::atomic<bool> done = false;
  std::thread taker([&] {
    SnapshotFiles files(&disk_, kSnapshots, &shard_->job(), &shard_->layout(), 0);
    for (int i = 0; i < 50; ++i) {
      const auto aside = [](const auto& work) { return work(); };
      ASSERT_EQ(TakeSnapshot(*shard_, files, absl::Seconds(60), aside), absl::OkStatus());
      const absl::StatusOr<ShardState> state = files.Load(Durability().snapshot_version());
      ASSERT_TRUE(state.ok()) << state.status();
      // SGD of learning rate 1/2 and gradients of 1; round 0 only calibrates.
      const float expected = 1.0f - 0.5f * static_cast<float>(state->version - 1);
      for (const ShardState::Bucket& bucket : state->buckets) EXPECT_THAT(bucket.parameter, testing::Each(expected));
    }
    done = true;
  });
  while (!done && !HasFailure()) Round();
  taker.join();
  EXPECT_GT(round_, 1u);
}

}  // namespace
}  // namespace gradwire
