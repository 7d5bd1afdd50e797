// Snapshots are there whole or not at all, come back bit for bit, and damage is found.
#include "common/snapshot/snapshot_files.h"

#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "common/storage/files.h"
#include "tests/lib/fake_disk.h"

namespace gradwire {
namespace {

using testing_support::FakeDisk;

constexpr char kDirectory[] = "/data/snapshots";

class SnapshotFilesTest : public testing::Test {
 protected:
  SnapshotFilesTest() : job_(*Job::Make(Spec())), layout_(*Layout::Make(job_, 2)) { MakeDirectory(disk_); }
  static void MakeDirectory(FakeDisk& disk) {
    ASSERT_TRUE(disk.CreateDirectory("/data").ok());
    ASSERT_TRUE(disk.SyncDirectory("").ok());
  }
  static v1::JobSpec Spec() {
    v1::JobSpec spec;
    spec.set_name("job");
    const std::pair<const char*, std::vector<uint64_t>> tensors[] = {
        {"embed", {97, 31}}, {"bias", {65}}, {"scale", {}}, {"none", {0, 3}}, {"head", {31, 97}}};
    for (const auto& [name, shape] : tensors) {
      v1::TensorSpec* tensor = spec.add_tensors();
      tensor->set_name(name);
      for (uint64_t d : shape) tensor->add_shape(d);
    }
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
    spec.set_codec("tagc:density=0.05");
    spec.set_update_codec("fp16");  // the shards keep what it drops, of all tensors but one
    v1::CodecRule& rule = *spec.add_rules();
    rule.set_pattern("embed");
    rule.set_codec("tagc:density=0.05");
    spec.set_bucket_bytes(8192);
    spec.set_run_elements(256);
    spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
    spec.mutable_rounds()->set_staleness(2);  // three plans of every bucket
    return spec;
  }
  ShardState State(uint64_t version, uint32_t shard = 0) const {
    std::mt19937 random(static_cast<uint32_t>(version));
    ShardState state;
    state.version = version;
    for (uint32_t b = 0; b < layout_.bucket_count(); ++b) {
      const BucketLayout& slice = layout_.at(b, shard);
      ShardState::Bucket bucket;
      bucket.Allocate(job_, slice);
      for (auto* array : {&bucket.parameter, &bucket.first_moment, &bucket.second_moment, &bucket.update_residual}) {
        for (float& x : *array) x = static_cast<float>(random()) * 1e-9f;
      }
      std::deque<RoundPlan> plans(std::min<uint64_t>(PlansKept(job_), version + 1));
      for (RoundPlan& plan : plans) {
        for (size_t r = 0; r < slice.runs.size(); ++r)
          plan.exponents.push_back(static_cast<int8_t>(-20 + random() % 7));
      }
      bucket.plans = PlanWindow(PlansKept(job_), version, plans);
      state.buckets.push_back(std::move(bucket));
    }
    return state;
  }
  SnapshotFiles Files(FakeDisk& disk, uint32_t shard = 0) const {
    return SnapshotFiles(&disk, kDirectory, &job_, &layout_, shard);
  }
  static void ExpectSame(const ShardState& a, const ShardState& b) {
    EXPECT_EQ(a.version, b.version);
    ASSERT_EQ(a.buckets.size(), b.buckets.size());
    for (size_t i = 0; i < a.buckets.size(); ++i) {
      EXPECT_EQ(a.buckets[i].parameter, b.buckets[i].parameter);
      EXPECT_EQ(a.buckets[i].first_moment, b.buckets[i].first_moment);
      EXPECT_EQ(a.buckets[i].second_moment, b.buckets[i].second_moment);
      EXPECT_EQ(a.buckets[i].update_residual, b.buckets[i].update_residual);
      EXPECT_EQ(a.buckets[i].plans, b.buckets[i].plans);
    }
  }

  const Job job_;
  const Layout layout_;
  FakeDisk disk_;
};

TEST_F(SnapshotFilesTest, ComesBack) {
  for (uint32_t shard : {0u, 1u}) {
    FakeDisk disk;
    MakeDirectory(disk);
    SnapshotFiles files = Files(disk, shard);
    EXPECT_TRUE(files.Versions()->empty());
    ASSERT_EQ(files.Write(State(7, shard)), absl::OkStatus());
    EXPECT_EQ(*files.Versions(), (std::vector<uint64_t>{7}));
    const auto loaded = files.Load(7);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    ExpectSame(State(7, shard), *loaded);
    EXPECT_EQ(Files(disk, 1 - shard).Load(7).status().code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST_F(SnapshotFilesTest, SaysHowManyRoundsWereSkipped) {
  MakeDirectory(disk_);
  SnapshotFiles files = Files(disk_);
  ShardState state = State(7);
  for (ShardState::Bucket& bucket : state.buckets) {
    bucket.plans = PlanWindow(PlansKept(job_), 7, bucket.plans.newest_first(), 2);
  }
  ASSERT_EQ(files.Write(state), absl::OkStatus());
  const auto loaded = files.Load(7);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ExpectSame(state, *loaded);
  EXPECT_EQ(loaded->buckets[0].plans.nonfinite_rounds(), 2u);
}

TEST_F(SnapshotFilesTest, TheNextOneBeginsWithTheRoomOfUnfinishedOnes) {
  FakeDisk disk;
  MakeDirectory(disk);
  SnapshotFiles files = Files(disk);
  ASSERT_TRUE(files.Write(State(7)).ok());
  const uint64_t one = disk.TotalBytes();
  disk.CrashAt(disk.calls() + 8);  // in the middle of the files
  ASSERT_FALSE(files.Write(State(9)).ok());
  std::mt19937 random(1);
  disk.PowerCycle(random);
  ASSERT_GT(disk.TotalBytes(), one) << "something was left";
  disk.set_capacity(2 * one + 64);  // the version has a digit more
  EXPECT_EQ(files.Write(State(11)), absl::OkStatus());
  EXPECT_EQ(*files.Versions(), (std::vector<uint64_t>{7, 11}));
}

TEST_F(SnapshotFilesTest, PowerLossAtAnyCallLeavesTheOldOneOrBoth) {
  for (uint64_t call = 0;; ++call) {
    SCOPED_TRACE(call);
    FakeDisk disk;
    MakeDirectory(disk);
    SnapshotFiles files = Files(disk);
    ASSERT_TRUE(files.Write(State(7)).ok());
    disk.CrashAt(disk.calls() + call);
    const bool written = files.Write(State(9)).ok();
    const bool over = !disk.crashed();
    std::mt19937 random(static_cast<uint32_t>(call));
    disk.PowerCycle(random);
    const std::vector<uint64_t> versions = *files.Versions();
    EXPECT_EQ(versions[0], 7u);
    EXPECT_TRUE(!written || versions.size() == 2);
    for (uint64_t version : versions) {
      const auto loaded = files.Load(version);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      ExpectSame(State(version), *loaded);
    }
    ASSERT_TRUE(files.Write(State(11)).ok()) << "what was left is in nobody's way";
    EXPECT_EQ(*files.RemoveOld(1), 11u);
    for (const std::string& file : disk.Files())
      EXPECT_NE(file.find("00000000000000000011/"), std::string::npos) << file;
    if (over) break;
  }
}

TEST_F(SnapshotFilesTest, ADamagedOneDoesNotCount) {
  FakeDisk disk;
  MakeDirectory(disk);
  SnapshotFiles files = Files(disk);
  ASSERT_TRUE(files.Write(State(7)).ok());
  EXPECT_EQ(*files.RemoveOld(2), 0u) << "the journal has to reach back to its beginning";
  ASSERT_TRUE(files.Write(State(9)).ok());
  EXPECT_EQ(*files.RemoveOld(2), 7u);
  ASSERT_TRUE(files.SetAside(9).ok());
  ASSERT_TRUE(files.Write(State(11)).ok());
  EXPECT_EQ(*files.RemoveOld(2), 7u);
  EXPECT_EQ(*files.Versions(), (std::vector<uint64_t>{7, 11}));
  ASSERT_TRUE(files.Write(State(9)).ok()) << "it may be taken once more";
}

TEST_F(SnapshotFilesTest, EveryDamagedByteIsFound) {
  SnapshotFiles files = Files(disk_);
  ASSERT_TRUE(files.Write(State(7)).ok());
  std::mt19937 random(3);
  for (const std::string& file : disk_.Files()) {
    const bool manifest = file.ends_with("manifest.json");
    const uint64_t bits = disk_.SizeOf(file) * 8;
    for (uint64_t i = 0; i < (manifest ? bits : 100); ++i) {
      const uint64_t bit = manifest ? i : random() % bits;
      disk_.FlipBit(file, bit);
      const auto loaded = files.Load(7);
      // Under another name the digest is not known, and nothing else has changed.
      if (loaded.ok() && manifest) {
        const std::vector<uint8_t> bytes = *ReadWholeFile(disk_, file, 1 << 20);
        EXPECT_EQ(std::string(bytes.begin(), bytes.end()).find("\"manifest_sha256\""), std::string::npos) << bit;
        ExpectSame(State(7), *loaded);
      } else {
        EXPECT_EQ(loaded.status().code(), absl::StatusCode::kDataLoss) << file << " bit " << bit;
      }
      disk_.FlipBit(file, bit);
    }
  }
  ASSERT_TRUE(disk_.Remove(absl::StrCat(kDirectory, "/00000000000000000007/state.safetensors")).ok());
  EXPECT_EQ(files.Load(7).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(SnapshotFilesTest, ManifestMayHoldAnyJson) {
  SnapshotFiles files = Files(disk_);
  ASSERT_TRUE(files.Write(State(7)).ok());
  const std::string path = absl::StrCat(kDirectory, "/00000000000000000007");
  const auto good = ReadWholeFile(disk_, path + "/manifest.json", 1 << 20);
  ASSERT_TRUE(good.ok());
  std::string text(good->begin(), good->end());
  // As manifests of before, which have no digest.
  text.erase(text.find('\n') + 1, text.find('\n', text.find("\"manifest_sha256\"")) - text.find('\n'));
  ASSERT_TRUE(
      WriteFileAtomically(disk_, path, "manifest.json", {reinterpret_cast<const uint8_t*>(text.data()), text.size()})
          .ok());
  const auto loaded = files.Load(7);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ExpectSame(State(7), *loaded);
  const size_t begin = text.find("\"files\""), end = text.find("\"spec\"");
  for (const char* value :
       {"5", "[]", "{\"parameters.safetensors\": 5}", "{\"parameters.safetensors\": {\"sha256\": 5}}"}) {
    const std::string bad = absl::StrCat(text.substr(0, begin), "\"files\": ", value, ",", text.substr(end));
    const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(bad.data()), bad.size());
    ASSERT_TRUE(WriteFileAtomically(disk_, path, "manifest.json", bytes).ok());
    EXPECT_EQ(files.Load(7).status().code(), absl::StatusCode::kDataLoss) << value;
  }
}

TEST_F(SnapshotFilesTest, FullDiskLeavesNothing) {
  SnapshotFiles files = Files(disk_);
  ASSERT_TRUE(files.Write(State(7)).ok());
  const size_t before = disk_.Files().size();
  uint64_t used = 0;
  for (const std::string& file : disk_.Files()) used += disk_.SizeOf(file);
  disk_.set_capacity(used + 30'000);
  EXPECT_EQ(files.Write(State(9)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(disk_.Files().size(), before);
  EXPECT_EQ(*files.Versions(), (std::vector<uint64_t>{7}));
}

}  // namespace
}  // namespace gradwire
