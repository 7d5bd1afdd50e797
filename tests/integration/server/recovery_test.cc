// A server that comes back finds its jobs as anyone saw them, workers go on where they were, and nothing counts twice.
// A crash is a copy of the data directory while the server runs: what a killed process leaves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "server/daemon.h"
#include "tests/integration/server/raw_worker.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::DescribeJob;
using testing_support::RawWorker;
using testing_support::SmallSpec;

v1::JobSpec DurableSpec(const std::string& codec = "dense:values=fp32",
                        v1::DurabilityLevel level = v1::DURABILITY_FSYNC) {
  v1::JobSpec spec = SmallSpec("job", 2, codec);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
  spec.mutable_durability()->set_level(level);
  return spec;
}

class RecoveryTest : public testing::Test {
 protected:
  absl::Status TryStart(const std::string& directory) {
    ServerConfig config;
    config.listen = {absl::StrCat("inproc://recovery-test-", ++starts_)};
    config.backend = "cpu";
    config.data_dir = directory.empty() ? "" : absl::StrCat(root_, "/", directory);
    EXPECT_TRUE(config.Validate().ok());
    auto daemon = Daemon::Start(config, &clock_);
    if (!daemon.ok()) return daemon.status();
    daemon_ = *std::move(daemon);
    return absl::OkStatus();
  }
  void Start(const std::string& directory = "data") { ASSERT_EQ(TryStart(directory), absl::OkStatus()); }
  std::string address() const { return daemon_->addresses()[0]; }
  // The server dies; another one starts from what it left.
  void CrashAndRestart() {
    const std::string before = absl::StrCat("data-", ++crashes_);
    std::filesystem::copy(absl::StrCat(root_, "/", directory_), absl::StrCat(root_, "/", before),
                          std::filesystem::copy_options::recursive);
    directory_ = before;
    daemon_.reset();
    Start(directory_);
  }

  void StartTwo(const v1::JobSpec& spec) {
    a_ = std::make_unique<RawWorker>(address(), spec, "a", 11);
    b_ = std::make_unique<RawWorker>(address(), spec, "b", 12);
    ASSERT_EQ(a_->Start(1.0f), absl::OkStatus());
    ASSERT_EQ(b_->Start(1.0f), absl::OkStatus());
  }
  void Follow(uint64_t version) {
    ASSERT_EQ(a_->FollowUpdate(version).status(), absl::OkStatus());
    ASSERT_EQ(b_->FollowUpdate(version).status(), absl::OkStatus());
  }
  void Step(uint64_t round) {
    ASSERT_EQ(a_->PushAll(round, Value(round)), absl::OkStatus());
    ASSERT_EQ(b_->PushAll(round, -Value(round) / 3), absl::OkStatus());
    Follow(round + 1);
  }
  void Replace(uint64_t round, float value) {
    ASSERT_EQ(a_->ReplaceAll(round, value), absl::OkStatus());
    ASSERT_EQ(b_->ReplaceAll(round, value), absl::OkStatus());
    Follow(round + 1);
  }
  void ResumeBoth(uint64_t round) {
    ASSERT_EQ(a_->Resume(address(), round).status(), absl::OkStatus());
    ASSERT_EQ(b_->Resume(address(), round).status(), absl::OkStatus());
  }
  // Takes one of the idle job.
  void Snapshot(uint64_t version) {
    const uint64_t before = Status().durability().snapshots();
    ASSERT_EQ(daemon_->registry().RequestSnapshot("job"), absl::OkStatus());
    while (Status().durability().snapshots() == before) usleep(1000);
    EXPECT_EQ(Status().durability().snapshot_error(), "");
    EXPECT_EQ(Status().durability().snapshot_version(), version);
  }
  static float Value(uint64_t round) { return 0.25f * static_cast<float>(round + 1); }
  v1::JobStatus Status() {
    auto status = DescribeJob(a_->channel(), "job", true);
    EXPECT_TRUE(status.ok()) << status.status();
    return status.value_or(v1::JobStatus());
  }
  // What `rounds` rounds lead to when nothing happens.
  std::string Undisturbed(v1::JobSpec spec, uint64_t rounds) {
    spec.clear_durability();
    Start("");
    StartTwo(spec);
    for (uint64_t round = 0; round < rounds; ++round) Step(round);
    const std::string digest = Status().parameters_sha256();
    daemon_.reset();
    return digest;
  }
  std::vector<std::filesystem::path> Segments() const {
    std::vector<std::filesystem::path> segments;
    for (const auto& entry :
         std::filesystem::directory_iterator(absl::StrCat(root_, "/", directory_, "/jobs/job.job/journal"))) {
      segments.push_back(entry.path());
    }
    std::sort(segments.begin(), segments.end());
    return segments;
  }

  SteadyClock clock_;
  const testing_support::TemporaryFolder folder_{"recovery"};
  const std::string& root_ = folder_.path();
  std::string directory_ = "data";
  int starts_ = static_cast<int>(getpid()) * 100;
  int crashes_ = 0;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<RawWorker> a_, b_;
};

TEST_F(RecoveryTest, RestartedServerHasEveryVersionAndGoesOn) {
  for (const char* codec :
       {"dense:values=fp32", "dense:values=fixed16", "tagc:density=0.05,bits=2", "tagc:density=0.05,form=sketch"}) {
    for (const v1::DurabilityLevel level : {v1::DURABILITY_FSYNC, v1::DURABILITY_INTERVAL}) {
      SCOPED_TRACE(absl::StrCat(codec, " level ", level));
      const v1::JobSpec spec = DurableSpec(codec, level);
      const std::string expected = Undisturbed(spec, 8);
      std::filesystem::remove_all(absl::StrCat(root_, "/data"));
      directory_ = "data";
      Start();
      StartTwo(spec);
      for (uint64_t round = 0; round < 8; ++round) {
        if (round % 3 == 1) {
          const std::string before = Status().parameters_sha256();
          CrashAndRestart();
          ResumeBoth(round);
          EXPECT_EQ(Status().parameters_sha256(), before);
          EXPECT_EQ(Status().version(), round);
        }
        Step(round);
        if (HasFatalFailure()) return;
      }
      EXPECT_EQ(Status().parameters_sha256(), expected);
      if (level == v1::DURABILITY_FSYNC) {
        EXPECT_EQ(Status().durability().durable_version(), 8u);
      }
      a_.reset();
      b_.reset();
      daemon_.reset();
    }
  }
}

TEST_F(RecoveryTest, ReplacedParametersAreThoseOfTheRestartedServer) {
  for (const char* codec : {"dense:values=fp32", "tagc:density=0.05"}) {
    SCOPED_TRACE(codec);
    v1::JobSpec spec = DurableSpec(codec);
    std::string expected;
    for (const bool crashes : {false, true}) {
      directory_ = crashes ? "data" : "";
      if (crashes) std::filesystem::remove_all(absl::StrCat(root_, "/data"));
      if (!crashes) spec.clear_durability();
      if (crashes) spec = DurableSpec(codec);
      Start(directory_);
      StartTwo(spec);
      for (uint64_t round = 0; round < 3; ++round) Step(round);
      // Its record is the journal's last.
      Replace(3, 2.5f);
      if (crashes) {
        CrashAndRestart();
        ResumeBoth(4);
      }
      EXPECT_EQ(Status().rounds().nonfinite_rounds(), 1u);
      Step(4);
      // It is in the snapshot, and counted there.
      if (crashes) {
        Snapshot(5);
        CrashAndRestart();
        ResumeBoth(5);
      }
      Step(5);
      // One worker's frames came before the crash, the other's after it.
      ASSERT_EQ(a_->ReplaceAll(6, -1.5f), absl::OkStatus());
      if (crashes) {
        CrashAndRestart();
        ResumeBoth(6);
        ASSERT_EQ(a_->ReplaceAll(6, -1.5f), absl::OkStatus());
      }
      ASSERT_EQ(b_->ReplaceAll(6, -1.5f), absl::OkStatus());
      Follow(7);
      Step(7);
      EXPECT_EQ(Status().rounds().nonfinite_rounds(), 2u);
      if (!crashes) expected = Status().parameters_sha256();
      EXPECT_EQ(Status().parameters_sha256(), expected);
      a_.reset();
      b_.reset();
      daemon_.reset();
    }
  }
}

TEST_F(RecoveryTest, FramesThatWereMergedBeforeTheCrashAreDuplicates) {
  const v1::JobSpec spec = DurableSpec();
  const std::string expected = Undisturbed(spec, 4);
  Start();
  StartTwo(spec);
  for (uint64_t round = 0; round < 3; ++round) Step(round);
  // Bucket 0 of round 3 closes, bucket 1 has only a's frame.
  const auto a0 = a_->frames().Push(0, 3, Value(3)), a1 = a_->frames().Push(1, 3, Value(3));
  const auto b0 = b_->frames().Push(0, 3, -Value(3) / 3), b1 = b_->frames().Push(1, 3, -Value(3) / 3);
  for (const auto& frame : {a0, a1}) ASSERT_EQ(a_->Push(frame)->outcome(), v1::PUSH_INCLUDED);
  ASSERT_EQ(b_->Push(b0)->outcome(), v1::PUSH_INCLUDED);
  ASSERT_TRUE(a_->RequestPull(v1::PULL_UPDATE, 4).ok());
  ASSERT_EQ(a_->NextAnswer()->control.bucket(), 0u);  // it is on disk
  CrashAndRestart();
  EXPECT_EQ(a_->Resume(address(), 3)->start_version(), 3u);
  EXPECT_EQ(Status().version(), 3u);
  EXPECT_EQ(a_->Push(a0)->outcome(), v1::PUSH_DUPLICATE);
  EXPECT_EQ(a_->Push(a1)->outcome(), v1::PUSH_INCLUDED) << "it had been merged, but its bucket had not closed";
  EXPECT_EQ(a_->Push(a_->frames().Push(0, 3, 7.0f))->outcome(), v1::PUSH_REFUSED) << "other bytes";
  EXPECT_EQ(Status().version(), 3u) << "the round waits for b, which was in it";
  ASSERT_TRUE(b_->Resume(address(), 3).ok());
  EXPECT_EQ(b_->Push(b0)->outcome(), v1::PUSH_DUPLICATE);
  EXPECT_EQ(b_->Push(b1)->outcome(), v1::PUSH_INCLUDED);
  Follow(4);
  EXPECT_EQ(Status().parameters_sha256(), expected);
  // The round is over for all; a worker that has not heard of it learns it by sending again.
  CrashAndRestart();
  ASSERT_TRUE(a_->Resume(address(), 3).ok());
  EXPECT_EQ(a_->Push(a1)->outcome(), v1::PUSH_DUPLICATE);
  EXPECT_TRUE(a_->RequestPull(v1::PULL_UPDATE, 4).ok());
  EXPECT_EQ(a_->NextAnswer()->control.code(), 0);
  EXPECT_EQ(Status().parameters_sha256(), expected);
}

TEST_F(RecoveryTest, SnapshotAndJournalTogetherAreTheSame) {
  for (const char* codec : {"dense:values=fp32", "tagc:density=0.05"}) {
    SCOPED_TRACE(codec);
    const v1::JobSpec spec = DurableSpec(codec);
    const std::string expected = Undisturbed(spec, 12);
    std::filesystem::remove_all(absl::StrCat(root_, "/data"));
    directory_ = "data";
    Start();
    StartTwo(spec);
    for (uint64_t round = 0; round < 12; ++round) {
      if (round % 4 == 2) Snapshot(round);
      if (round % 4 == 3 || round == 6) {
        CrashAndRestart();
        ResumeBoth(round);
        EXPECT_EQ(Status().version(), round);
        EXPECT_EQ(Status().durability().snapshot_version(), round / 4 * 4 + 2);
        // A worker that has not heard of the last round gets its update.
        ASSERT_TRUE(a_->RequestPull(v1::PULL_UPDATE, round).ok());
        for (uint32_t k = 0; k < 2; ++k) EXPECT_EQ(a_->NextAnswer()->control.code(), 0);
      }
      Step(round);
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ(Status().parameters_sha256(), expected);
    a_.reset();
    b_.reset();
    daemon_.reset();
  }
}

TEST_F(RecoveryTest, DamagedSnapshotIsPassedOverForTheOneBefore) {
  Start();
  StartTwo(DurableSpec());
  for (uint64_t round = 0; round < 6; ++round) {
    Step(round);
    if (round == 1 || round == 3) Snapshot(round + 1);
  }
  const std::string digest = Status().parameters_sha256();
  daemon_.reset();
  std::fstream file(absl::StrCat(root_, "/data/jobs/job.job/snapshots/00000000000000000004/parameters.safetensors"),
                    std::ios::in | std::ios::out | std::ios::binary);
  ASSERT_TRUE(file.good());
  file.seekp(-5, std::ios::end);
  file.put('!');
  file.close();
  Start();
  ResumeBoth(6);
  EXPECT_EQ(Status().durability().snapshot_version(), 2u);
  EXPECT_EQ(Status().parameters_sha256(), digest);
}

TEST_F(RecoveryTest, AnEpochThatWasLostIsMadeAgainFromTheJournals) {
  const auto epoch = [this] { return daemon_->registry().environment().epochs->now(); };
  Start();
  StartTwo(DurableSpec());
  Step(0);
  for (uint64_t round = 1; round < 3; ++round) {
    CrashAndRestart();
    ResumeBoth(round);
    Step(round);
  }
  const uint64_t before = epoch();
  daemon_.reset();
  ASSERT_TRUE(std::filesystem::remove(absl::StrCat(root_, "/", directory_, "/EPOCH")));
  Start(directory_);
  EXPECT_GT(epoch(), before) << "no worker takes it for the server of before";
  ResumeBoth(3);
  Step(3);
  const std::string digest = Status().parameters_sha256();
  CrashAndRestart();
  ResumeBoth(4);
  EXPECT_EQ(Status().parameters_sha256(), digest);
}

TEST_F(RecoveryTest, WorkerThatDoesNotComeBackIsWaitedForUntilItsLeaseEnds) {
  v1::JobSpec spec = DurableSpec();
  spec.set_lease_ms(2000);  // both must be there after two rounds, whatever the disk takes for them
  Start();
  StartTwo(spec);
  for (uint64_t round = 0; round < 2; ++round) Step(round);
  CrashAndRestart();
  ASSERT_TRUE(a_->Resume(address(), 2).ok());
  ASSERT_EQ(a_->PushAll(2, 1.0f), absl::OkStatus());
  EXPECT_EQ(Status().version(), 2u);
  ASSERT_TRUE(a_->RequestPull(v1::PULL_UPDATE, 3).ok());
  for (int beat = 0; Status().version() == 2 && beat < 400; ++beat) {
    ASSERT_EQ(a_->Heartbeat(), absl::OkStatus());
    usleep(50'000);
  }
  const auto contributors = a_->FollowUpdate(3, true);
  ASSERT_TRUE(contributors.ok()) << contributors.status();
  EXPECT_EQ(*contributors, 1u);
}

TEST_F(RecoveryTest, WorkersThatLeftAreNotWaitedFor) {
  const auto status = [this] { return (*daemon_->registry().Find("job"))->Describe(false, false); };
  Start();
  StartTwo(DurableSpec());
  for (uint64_t round = 0; round < 2; ++round) Step(round);
  ASSERT_TRUE(a_->Leave().ok());
  CrashAndRestart();
  EXPECT_EQ(status().rounds().members(), 2u) << "as far as the journal says";
  ResumeBoth(2);
  ASSERT_TRUE(a_->Leave().ok());
  ASSERT_TRUE(b_->Leave().ok());
  for (int ms = 0; status().durability().records() == 0 && ms < 10'000; ++ms) usleep(1000);
  EXPECT_EQ(status().durability().records(), 1u);
  CrashAndRestart();
  EXPECT_EQ(status().version(), 2u);
  EXPECT_EQ(status().rounds().members(), 0u);
  EXPECT_FALSE(status().rounds().open()) << "the next run is begun by all workers";
  ResumeBoth(2);
  Step(2);
}

TEST_F(RecoveryTest, ServerDiesBeforeTheFirstRound) {
  Start();
  const v1::JobSpec spec = DurableSpec();
  a_ = std::make_unique<RawWorker>(address(), spec, "a", 11);
  ASSERT_TRUE(a_->Join()->must_initialize());
  ASSERT_TRUE(a_->Open().ok());
  ASSERT_EQ(a_->Push(a_->frames().Initialize(0, 1.0f))->outcome(), v1::PUSH_INCLUDED);
  CrashAndRestart();
  EXPECT_EQ(a_->Resume(address(), 0).status().code(), absl::StatusCode::kFailedPrecondition);
  StartTwo(spec);  // from the beginning
  Step(0);
  Step(1);
  CrashAndRestart();
  ResumeBoth(2);
  Step(2);
  EXPECT_EQ(Status().version(), 3u);
}

TEST_F(RecoveryTest, WorkerThatHasSeenMoreThanTheDiskHasIsTold) {
  Start();
  StartTwo(DurableSpec());
  for (uint64_t round = 0; round < 4; ++round) Step(round);
  daemon_.reset();
  const std::filesystem::path segment = Segments().back();
  std::filesystem::resize_file(segment, std::filesystem::file_size(segment) - 8);  // lost with the power
  Start();
  const absl::Status told = a_->Resume(address(), 4).status();
  EXPECT_EQ(told.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(told.message()), testing::AllOf(HasSubstr("version 4"), HasSubstr("version 3")));
}

TEST_F(RecoveryTest, DamagedJournalIsRefusedUntilTheJobIsDeleted) {
  Start();
  const v1::JobSpec spec = DurableSpec();
  StartTwo(spec);
  for (uint64_t round = 0; round < 4; ++round) Step(round);
  daemon_.reset();
  const std::filesystem::path segment = Segments().front();
  std::fstream file(segment, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(std::filesystem::file_size(segment) / 2));
  file.put('!');
  file.close();
  Start();
  RawWorker other(address(), spec, "c", 13);
  const absl::Status refused = other.Join().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(refused.message()), testing::AllOf(HasSubstr("journal damaged"), HasSubstr("offset")));
  EXPECT_EQ(DescribeJob(other.channel(), "job", false).status().code(), absl::StatusCode::kDataLoss);
  ASSERT_EQ(daemon_->registry().Delete("job"), absl::OkStatus());
  EXPECT_TRUE(other.Join().ok());
}

TEST_F(RecoveryTest, MissingJournalIsToldWithWhatToDo) {
  Start();
  StartTwo(DurableSpec());
  Step(0);
  daemon_.reset();
  std::filesystem::remove_all(root_ + "/data/jobs/job.job/journal");
  Start();
  const absl::Status refused = RawWorker(address(), DurableSpec(), "c", 13).Join().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(refused.message()),
              testing::AllOf(HasSubstr("data/jobs/job.job/journal' is missing"), HasSubstr("gradwire restore")));
  EXPECT_EQ(daemon_->registry().unrecovered(), 1u);
}

TEST_F(RecoveryTest, DeletedJobIsGoneForGood) {
  Start();
  StartTwo(DurableSpec());
  Step(0);
  ASSERT_EQ(daemon_->registry().Delete("job"), absl::OkStatus());
  EXPECT_TRUE(std::filesystem::is_empty(root_ + "/data/jobs"));
  CrashAndRestart();
  RawWorker other(address(), DurableSpec(), "c", 13);
  EXPECT_EQ(DescribeJob(other.channel(), "job", false).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(RecoveryTest, ServerThatWasReplacedIsFenced) {
  Start();
  StartTwo(DurableSpec());
  Step(0);
  EXPECT_THAT(std::string(TryStart("data").message()), HasSubstr("in use by another gradwire-server"));
  CrashAndRestart();
  const uint64_t epoch = a_->Resume(address(), 1)->server_epoch();
  EXPECT_EQ(epoch, 2u);
  const absl::Status fenced = a_->Resume(address(), 1, epoch + 1).status();
  EXPECT_EQ(fenced.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(fenced.message()), HasSubstr("was replaced"));
}

TEST_F(RecoveryTest, DurableJobNeedsADataDirectory) {
  Start("");
  RawWorker worker(address(), DurableSpec(), "a", 1);
  const absl::Status refused = worker.Join().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--data-dir"));
}

}  // namespace
}  // namespace gradwire
