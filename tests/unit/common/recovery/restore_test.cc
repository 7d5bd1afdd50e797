// What was trained on some shards goes on, on others, with the very same bits; and what cannot be restored is said.
#include "common/recovery/restore.h"

#include <gmock/gmock.h>

#include "common/recovery/verify.h"
#include "tests/unit/common/recovery/trained_job.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::FakeDisk;
using testing_support::TrainedJob;
using testing_support::TrainedSpec;

std::vector<std::string> Paths(const std::string& root, uint32_t count) {
  std::vector<std::string> paths;
  for (uint32_t i = 0; i < count; ++i) paths.push_back(absl::StrCat(root, "/", i));
  return paths;
}

RestoreOptions Onto(uint32_t shards, uint32_t from = 4) {
  RestoreOptions options;
  options.from = Paths("/old", from);
  options.to = Paths("/new", shards);
  options.shards = shards;
  for (uint32_t s = 0; s < shards; ++s) options.write.push_back(s);
  return options;
}

struct Case {
  const char* codec;
  v1::OptimizerKind optimizer;
  uint32_t staleness = 0;  // the plans of so many more versions go with the buckets
  const char* update_codec = "";
  int version = 10;
};

class RestoreTest : public testing::TestWithParam<Case> {
 protected:
  void ExpectSame(const TrainedJob& a, const TrainedJob& b) {
    for (const auto array : {&ShardState::Bucket::parameter, &ShardState::Bucket::first_moment,
                             &ShardState::Bucket::second_moment, &ShardState::Bucket::update_residual}) {
      EXPECT_TRUE(a.Gathered(array) == b.Gathered(array));
    }
  }
};

TEST_P(RestoreTest, GoesOnWithTheSameBitsOnAnyNumberOfShards) {
  v1::JobSpec spec = TrainedSpec(GetParam().codec, GetParam().optimizer);
  spec.set_update_codec(GetParam().update_codec);
  if (GetParam().staleness > 0) spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
  spec.mutable_rounds()->set_staleness(GetParam().staleness);
  FakeDisk undisturbed_disk;
  TrainedJob undisturbed(spec);
  undisturbed.Begin(&undisturbed_disk, "/old", 4);
  undisturbed.Rounds(20);
  // Where elements are deferred, which ones depends on the shards: slack leaves room for all of them.
  EXPECT_EQ(undisturbed.deferred(), 0u);
  for (const uint32_t shards : {1u, 3u, 4u, 7u}) {
    SCOPED_TRACE(shards);
    FakeDisk disk;
    TrainedJob job(spec);
    job.Begin(&disk, "/old", 4);
    job.Rounds(6);
    for (uint32_t s : {0u, 2u}) job.Snapshot(s);  // others are behind, or have none: their journals bring them there
    job.Rounds(1);
    job.Snapshot(3);
    job.Rounds(GetParam().version - 7);
    ASSERT_TRUE(disk.CreateDirectory("/new").ok());
    const auto restored = RestoreJob(disk, Onto(shards), job.backend());
    ASSERT_TRUE(restored.ok()) << restored.status();
    EXPECT_EQ(restored->version, static_cast<uint64_t>(GetParam().version));
    EXPECT_TRUE(restored->warnings.empty());
    job.GoOn(&disk, Paths("/new", shards), restored->version);
    job.Rounds(20 - GetParam().version);
    EXPECT_EQ(job.deferred(), 0u);
    ExpectSame(undisturbed, job);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, RestoreTest,
    testing::Values(Case{"dense:values=fp32", v1::OPTIMIZER_ADAMW}, Case{"dense:values=fixed16", v1::OPTIMIZER_SGD, 3},
                    Case{"tagc:density=0.05,form=sketch,slack=4", v1::OPTIMIZER_ADAMW, 2},
                    Case{"dense:values=fixed16", v1::OPTIMIZER_SGD}, Case{"tagc:density=0.05", v1::OPTIMIZER_STEP},
                    Case{"tagc:density=0.02,form=sketch,warmup_rounds=15,slack=2", v1::OPTIMIZER_ADAMW},
                    Case{"dense:values=fp32", v1::OPTIMIZER_NONE},
                    // Behind a step, and in the middle of one.
                    Case{"powersgd:rank=2", v1::OPTIMIZER_ADAMW},
                    Case{"powersgd:rank=3", v1::OPTIMIZER_STEP, 0, "", 11},
                    // Update codecs that look at one run alone, or at no value.
                    Case{"dense:values=fp32", v1::OPTIMIZER_ADAMW, 0, "onebit"},
                    Case{"onebit", v1::OPTIMIZER_NONE, 0, "fp16"},
                    Case{"dense:fixed16", v1::OPTIMIZER_SGD, 2, "threshold:value=0.5"},
                    Case{"randomk:density=0.1", v1::OPTIMIZER_STEP, 0, "randomk:density=0.02"},
                    Case{"dense:values=fp32", v1::OPTIMIZER_SGD, 0, "qsgd:bits=2"}));

// Which elements top-k sends depends on the shards: on as many of them the bits stay, on others nothing is lost.
TEST(TwoWayRestore, TopKGoesOnWithTheSameBitsOnTheSameNumberOfShards) {
  v1::JobSpec spec = TrainedSpec("topk:density=0.05,values=fp16", v1::OPTIMIZER_ADAMW);
  spec.set_update_codec("topk:density=0.02,values=fp16");
  FakeDisk undisturbed_disk;
  TrainedJob undisturbed(spec);
  undisturbed.Begin(&undisturbed_disk, "/old", 4);
  undisturbed.Rounds(20);
  for (const uint32_t shards : {1u, 4u}) {
    SCOPED_TRACE(shards);
    FakeDisk disk;
    TrainedJob job(spec);
    job.Begin(&disk, "/old", 4);
    job.Rounds(6);
    for (uint32_t s : {0u, 2u}) job.Snapshot(s);
    job.JournalState(&disk, 1);
    job.Rounds(4);
    const auto before = job.Gathered(&ShardState::Bucket::update_residual);
    ASSERT_TRUE(disk.CreateDirectory("/new").ok());
    const auto restored = RestoreJob(disk, Onto(shards), job.backend());
    ASSERT_TRUE(restored.ok()) << restored.status();
    EXPECT_EQ(restored->version, 10u);
    job.GoOn(&disk, Paths("/new", shards), 10);
    EXPECT_TRUE(before == job.Gathered(&ShardState::Bucket::update_residual));
    job.Rounds(10);
    for (const auto array : {&ShardState::Bucket::parameter, &ShardState::Bucket::update_residual}) {
      EXPECT_EQ(undisturbed.Gathered(array) == job.Gathered(array), shards == 4);
    }
  }
}

class RestoreErrors : public testing::Test {
 protected:
  RestoreErrors() : job_(TrainedSpec("dense:values=fp32", v1::OPTIMIZER_ADAMW)) {
    job_.Begin(&disk_, "/old", 4);
    job_.Rounds(5);
    EXPECT_TRUE(disk_.CreateDirectory("/new").ok());
  }
  absl::StatusOr<RestoreReport> Restore(const RestoreOptions& options) {
    return RestoreJob(disk_, options, job_.backend());
  }
  static std::string Segment(uint32_t shard, uint64_t sequence) {
    return journal::SegmentPath(absl::StrCat("/old/", shard, "/jobs/job.job/journal"), sequence);
  }

  FakeDisk disk_;
  TrainedJob job_;
};

TEST_F(RestoreErrors, AnyVersionOfTheJournalCanBeChosen) {
  RestoreOptions options = Onto(2);
  options.version = 3;
  const auto restored = Restore(options);
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->version, 3u);
  EXPECT_EQ(restored->sources[1].newest, 5u);
  TrainedJob again(TrainedSpec("dense:values=fp32", v1::OPTIMIZER_ADAMW));
  FakeDisk other;
  again.Begin(&other, "/old", 1);
  again.Rounds(3);
  job_.GoOn(&disk_, Paths("/new", 2), 3);
  EXPECT_TRUE(again.Gathered(&ShardState::Bucket::parameter) == job_.Gathered(&ShardState::Bucket::parameter));
  options = Onto(2);
  options.to = Paths("/other", 2);
  options.version = 6;
  const absl::Status missing = Restore(options).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("shard 3 in '/old/3/jobs/job.job': 0 to 5"));
}

TEST_F(RestoreErrors, JournalsOfStandbysBeginWithTheirState) {
  job_.JournalState(&disk_, 1);
  job_.Rounds(2);
  const auto verified = VerifyDirectory(disk_, "/old/1", job_.backend());
  ASSERT_TRUE(verified.ok());
  EXPECT_FALSE(verified->damaged());
  EXPECT_EQ(verified->shards[0].version, 7u);
  const auto restored = Restore(Onto(3));
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->version, 7u);
  const auto expected = job_.Gathered(&ShardState::Bucket::second_moment);
  job_.GoOn(&disk_, Paths("/new", 3), 7);
  EXPECT_TRUE(expected == job_.Gathered(&ShardState::Bucket::second_moment));
  RestoreOptions options = Onto(3);
  options.to = Paths("/other", 3);
  options.version = 4;
  EXPECT_EQ(Restore(options).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(RestoreErrors, EachShardCanBeWrittenByItself) {
  ASSERT_TRUE(Restore(Onto(3)).ok());
  RestoreOptions options = Onto(3);
  options.write = {1};
  options.to = {"/new/alone"};
  ASSERT_TRUE(Restore(options).ok());
  const Layout layout = *Layout::Make(job_.job(), 3);
  for (const char* path : {"/new/1", "/new/alone"}) {
    SnapshotFiles files(&disk_, absl::StrCat(path, "/jobs/job.job/snapshots"), &job_.job(), &layout, 1);
    EXPECT_TRUE(files.Load(5).ok()) << files.Load(5).status();
  }
}

TEST_F(RestoreErrors, CopiedSnapshotsNeedOneVersionInCommon) {
  for (uint32_t s = 0; s < 4; ++s) job_.Snapshot(s);
  job_.Rounds(2);
  job_.Snapshot(1);
  RestoreOptions options = Onto(3);
  options.from.clear();
  for (uint32_t s = 0; s < 4; ++s) options.from.push_back(absl::StrCat("/old/", s, "/jobs/job.job/snapshots"));
  options.from[2] += "/00000000000000000005";
  const auto restored = Restore(options);
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->version, 5u);
  options.from[1] += "/00000000000000000007";
  options.to = Paths("/other", 3);
  const absl::Status none = Restore(options).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kNotFound) << none;
  EXPECT_THAT(std::string(none.message()), HasSubstr("gradwire snapshot job"));
}

TEST_F(RestoreErrors, MissingShardsAndForeignOnesAreNamed) {
  RestoreOptions options = Onto(2);
  options.from.erase(options.from.begin() + 1);
  EXPECT_THAT(std::string(Restore(options).status().message()), HasSubstr("shard 1 of 4 is in none"));
  TrainedJob other(TrainedSpec("dense:values=fp32", v1::OPTIMIZER_SGD));
  other.Begin(&disk_, "/else", 4);
  options.from.insert(options.from.begin() + 1, "/else/1");
  EXPECT_EQ(Restore(options).status().code(), absl::StatusCode::kFailedPrecondition);
  options = Onto(2);
  options.job = "jib";
  EXPECT_EQ(Restore(options).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(RestoreErrors, TargetsAreNeverOverwritten) {
  ASSERT_TRUE(Restore(Onto(2)).ok());
  const absl::Status again = Restore(Onto(2)).status();
  EXPECT_EQ(again.code(), absl::StatusCode::kAlreadyExists) << again;
  RestoreOptions options = Onto(2);
  options.to = {"/new/2", "/old/0/jobs"};
  EXPECT_EQ(Restore(options).status().code(), absl::StatusCode::kAlreadyExists);
  options.to = {"/new/2", "/new/2"};
  EXPECT_EQ(Restore(options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(RestoreErrors, FullDiskLeavesNoTarget) {
  uint64_t used = 0;
  for (const std::string& file : disk_.Files()) used += disk_.SizeOf(file);
  disk_.set_capacity(used + 400'000);  // room for the first of two, not for the second
  EXPECT_EQ(Restore(Onto(2)).status().code(), absl::StatusCode::kResourceExhausted);
  for (const std::string& file : disk_.Files()) {
    EXPECT_FALSE(file.starts_with("/new/") && file.ends_with("/job")) << file;
  }
  disk_.set_capacity(UINT64_MAX);
  EXPECT_TRUE(Restore(Onto(2)).ok());
}

TEST_F(RestoreErrors, DamagedJournalGivesWhatLiesBeforeTheDamage) {
  uint64_t last = 1;
  while (disk_.Open(Segment(2, last + 1)).ok()) ++last;
  disk_.FlipBit(Segment(2, last - 2), disk_.SizeOf(Segment(2, last - 2)) * 4);
  const auto restored = Restore(Onto(3));
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_LT(restored->version, 5u);
  EXPECT_GT(restored->version, 1u);
  EXPECT_THAT(restored->warnings, testing::Contains(HasSubstr(Segment(2, last - 2))));
}

TEST_F(RestoreErrors, DamagedSnapshotIsPassedOver) {
  job_.Snapshot(1);
  job_.Rounds(1);
  disk_.FlipBit("/old/1/jobs/job.job/snapshots/00000000000000000005/state.safetensors", 90'000);
  const auto restored = Restore(Onto(3));
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->version, 6u);
  EXPECT_THAT(restored->warnings, testing::ElementsAre(HasSubstr("state.safetensors")));
}

// Servers that start there must be later than all that workers have seen.
TEST_F(RestoreErrors, EpochsGrow) {
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(DataDirectory::Open(&disk_, "/old/3").ok());
  const uint64_t seen = *ReadEpoch(disk_, "/old/3");
  ASSERT_TRUE(Restore(Onto(2)).ok());
  EXPECT_GE(*ReadEpoch(disk_, "/new/0"), seen);
}

TEST_F(RestoreErrors, OfTwoHistoriesOfAShardTheLaterServersIsUsed) {
  RestoreOptions options = Onto(2);
  for (const int later : {0, 1}) {
    SCOPED_TRACE(later);
    const std::string root = absl::StrCat("/else-", later);
    TrainedJob other(TrainedSpec("dense:values=fp32", v1::OPTIMIZER_ADAMW));
    ASSERT_TRUE(disk_.CreateDirectory(root).ok());
    for (int i = 0; i < later; ++i) ASSERT_TRUE(DataDirectory::Open(&disk_, root + "/1").ok());
    other.Begin(&disk_, root, 4);
    other.Rounds(3);
    options.from.push_back(root + "/1");
    if (later == 0) {
      ASSERT_TRUE(Restore(options).ok()) << "it is behind";
      options.to = Paths("/newer", 2);
      ASSERT_TRUE(disk_.CreateDirectory("/newer").ok());
    }
    other.set_seed(1);
    other.Rounds(4);
    const auto restored = Restore(options);
    if (later == 0) {
      EXPECT_EQ(restored.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(restored.status().message()), HasSubstr("/else-0/1/jobs/job.job' went apart"));
      options.from.pop_back();
    } else {
      ASSERT_TRUE(restored.ok()) << restored.status();
      EXPECT_EQ(restored->version, 5u);
      EXPECT_THAT(restored->sources[1].path, HasSubstr("/else-1/1"));
      EXPECT_THAT(restored->warnings, testing::ElementsAre(HasSubstr("'/old/1/jobs/job.job' went apart")));
    }
  }
}

// Sources that are directories of the job, not of a server, have no EPOCH.
TEST_F(RestoreErrors, EpochsOfTheJournalsCountToo) {
  RestoreOptions options = Onto(2);
  TrainedJob other(TrainedSpec("dense:values=fp32", v1::OPTIMIZER_ADAMW));
  ASSERT_TRUE(disk_.CreateDirectory("/else").ok());
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(DataDirectory::Open(&disk_, "/else/2").ok());
  other.Begin(&disk_, "/else", 4);
  other.Rounds(2);
  for (uint32_t s = 0; s < 4; ++s) other.Snapshot(s);
  options.from = Paths("/else", 4);
  for (std::string& path : options.from) path += "/jobs/job.job";
  ASSERT_TRUE(Restore(options).ok());
  EXPECT_GT(*ReadEpoch(disk_, "/new/0"), 6u);
}

TEST_F(RestoreErrors, AShardWhoseDirectoryCannotBeSyncedDoesNotStay) {
  for (const std::string jobs : {"/new/0/jobs", "/new/1/jobs"}) {
    disk_.set_directory_error(jobs, absl::DataLossError("input/output error"), /*passing=*/1);
    EXPECT_EQ(Restore(Onto(2)).status().code(), absl::StatusCode::kDataLoss);
    disk_.set_directory_error("", absl::OkStatus());
    for (const std::string& file : disk_.Files()) {
      EXPECT_FALSE(file.starts_with("/new/") && file.find("/jobs/job.job/") != std::string::npos) << file;
    }
  }
  EXPECT_TRUE(Restore(Onto(2)).ok());
}

}  // namespace
}  // namespace gradwire
