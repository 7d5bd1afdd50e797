// A shard server, its standby and two raw workers, in one process.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/daemon.h"
#include "tests/integration/server/raw_worker.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire::testing_support {

class StandbyFixture : public testing::Test {
 protected:
  struct Node {
    std::string address;
    std::string directory;
    std::string follow;
    std::string lease = {};
    std::unique_ptr<Daemon> daemon = nullptr;
  };

  ~StandbyFixture() override {
    a_.reset();
    b_.reset();
    standby_.daemon.reset();
    primary_.daemon.reset();
  }

  static v1::JobSpec Spec(const std::string& codec = "dense:values=fp32",
                          v1::DurabilityLevel level = v1::DURABILITY_FSYNC) {
    v1::JobSpec spec = SmallSpec("job", 2, codec);
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
    spec.mutable_durability()->set_level(level);
    return spec;
  }

  absl::Status TryStart(Node& node) {
    static int names = static_cast<int>(getpid()) * 1000;
    ServerConfig config;
    if (node.address.empty()) node.address = absl::StrCat("inproc://standby-test-", ++names);
    config.listen = {node.address};
    config.backend = "cpu";
    config.data_dir = node.directory.empty() ? "" : absl::StrCat(root_, "/", node.directory);
    config.follow = node.follow;
    config.follower_timeout_ms = timeout_ms_;
    config.max_standbys = max_standbys_;
    config.lease = node.lease;
    config.lease_ttl_ms = 2000;
    if (!node.lease.empty()) config.name = node.directory;
    EXPECT_TRUE(config.Validate().ok());
    if (standby_queue_bytes_ != 0) config.standby_queue_bytes = standby_queue_bytes_;
    node.daemon.reset();
    auto daemon = Daemon::Start(config, &clock_);
    if (!daemon.ok()) return daemon.status();
    node.daemon = *std::move(daemon);
    return absl::OkStatus();
  }
  void Start(Node& node) { ASSERT_EQ(TryStart(node), absl::OkStatus()); }
  void StartPair() {
    primary_.directory = "primary";
    Start(primary_);
    StartStandby();
  }
  void StartStandby() {
    standby_.directory = "standby";
    standby_.follow = primary_.address;
    Start(standby_);
  }
  void StartWorkers(const v1::JobSpec& spec) {
    a_ = std::make_unique<RawWorker>(primary_.address, spec, "a", 11);
    b_ = std::make_unique<RawWorker>(primary_.address, spec, "b", 12);
    ASSERT_EQ(a_->Start(1.0f), absl::OkStatus());
    ASSERT_EQ(b_->Start(1.0f), absl::OkStatus());
  }
  void Follow(uint64_t version) {
    ASSERT_EQ(a_->FollowUpdate(version).status(), absl::OkStatus());
    ASSERT_EQ(b_->FollowUpdate(version).status(), absl::OkStatus());
  }
  static float Value(uint64_t round) { return 0.25f * static_cast<float>(round + 1); }
  void Step(uint64_t round) {
    ASSERT_EQ(a_->PushAll(round, Value(round)), absl::OkStatus());
    ASSERT_EQ(b_->PushAll(round, -Value(round) / 3), absl::OkStatus());
    Follow(round + 1);
  }
  void ResumeBoth(const Node& node, uint64_t round) {
    ASSERT_EQ(a_->Resume(node.address, round).status(), absl::OkStatus());
    ASSERT_EQ(b_->Resume(node.address, round).status(), absl::OkStatus());
  }
  // What `rounds` rounds lead to when nothing happens.
  std::string Undisturbed(v1::JobSpec spec, uint64_t rounds) {
    spec.clear_durability();
    Node alone;
    Start(alone);
    std::swap(primary_.address, alone.address);
    StartWorkers(spec);
    std::swap(primary_.address, alone.address);
    for (uint64_t round = 0; round < rounds; ++round) Step(round);
    const std::string digest = Status(alone).parameters_sha256();
    a_.reset();
    b_.reset();
    return digest;
  }
  // Without the job an empty one.
  v1::JobStatus Status(const Node& node) {
    auto shard = node.daemon->registry().Find("job");
    return shard.ok() ? (*shard)->Describe(true, true) : v1::JobStatus();
  }
  v1::ShardStatus Shard(const Node& node) {
    v1::ShardStatus status;
    node.daemon->replication().Describe(&status);
    return status;
  }
  bool InSync() {
    const v1::JobStatus status = Status(primary_);
    return status.followers_size() == 1 && status.followers(0).in_sync();
  }
  // For what another thread does: false where it has not after 20 s.
  static bool Eventually(const std::function<bool()>& done) {
    for (int look = 0; look < 20'000; ++look) {
      if (done()) return true;
      usleep(1000);
    }
    return false;
  }
  // What Promote says once the standby has heard that it is in sync.
  absl::StatusOr<uint64_t> PromoteInSync() {
    absl::StatusOr<uint64_t> promoted;
    Eventually([&] {
      promoted = standby_.daemon->replication().Promote(false);
      return promoted.ok();
    });
    return promoted;
  }

  SteadyClock clock_;
  const TemporaryFolder folder_{"standby"};
  const std::string& root_ = folder_.path();
  uint32_t timeout_ms_ = 5000;
  uint32_t max_standbys_ = 4;
  uint64_t standby_queue_bytes_ = 0;  // 0: the default
  Node primary_;
  Node standby_;
  std::unique_ptr<RawWorker> a_, b_;
};

}  // namespace gradwire::testing_support
