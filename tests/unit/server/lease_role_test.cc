// What a server makes of a lease whose calls fail, and of jobs while it becomes a standby.
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <utility>

#include "server/lease/lease.h"
#include "server/replication/replication.h"
#include "tests/unit/server/registry_fixture.h"

namespace gradwire {
namespace {

using testing_support::RegistryTest;

// One that is always free for its only server, kept in memory.
struct LeaseObject {
  absl::Mutex mu;
  std::string last_primary ABSL_GUARDED_BY(mu);
  uint64_t last_epoch ABSL_GUARDED_BY(mu) = 0;
  int answers_to_lose ABSL_GUARDED_BY(mu) = 0;  // of Announce: it is done, and the caller is not told
};

class OnlyLease final : public Lease {
 public:
  OnlyLease(std::shared_ptr<LeaseObject> object, std::string name, Clock* clock)
      : object_(std::move(object)), name_(std::move(name)), clock_(clock) {}
  absl::StatusOr<State> Hold() override {
    absl::MutexLock lock(&object_->mu);
    return State{true, clock_->Now() + 1'000'000'000, "", object_->last_primary, object_->last_epoch};
  }
  absl::Status Announce(uint64_t epoch) override {
    absl::MutexLock lock(&object_->mu);
    object_->last_primary = name_;
    object_->last_epoch = epoch;
    if (object_->answers_to_lose == 0) return absl::OkStatus();
    --object_->answers_to_lose;
    return absl::UnavailableError("the answer is lost");
  }
  void Release() override {}

 private:
  const std::shared_ptr<LeaseObject> object_;
  const std::string name_;
  Clock* const clock_;
};

class LeaseRoleTest : public RegistryTest {
 protected:
  ~LeaseRoleTest() override {
    if (replication_ != nullptr) replication_->Stop();
  }
  void Run(uint32_t answers_to_lose) {
    {
      absl::MutexLock lock(&object_->mu);
      object_->answers_to_lose = static_cast<int>(answers_to_lose);
    }
    ReplicationOptions options{.follow = "inproc://nobody-is-here", .lease_ttl_ms = 60, .make_lease = {}};
    options.make_lease = [this](const std::string& name) {
      return std::make_unique<OnlyLease>(object_, name, &steady_);
    };
    replication_ = std::make_unique<Replication>(std::move(options), registry_.get(), data_.get(), &steady_);
    ASSERT_EQ(replication_->Start(), absl::OkStatus());
    ASSERT_EQ(replication_->Run("one", [](bool) {}), absl::OkStatus());
  }
  bool ServesSoon() const {
    for (int look = 0; look < 5000; ++look, usleep(1000)) {
      if (replication_->CheckServing().ok()) return true;
    }
    return false;
  }

  SteadyClock steady_;
  const std::shared_ptr<LeaseObject> object_ = std::make_shared<LeaseObject>();
  std::unique_ptr<Replication> replication_;
};

TEST_F(LeaseRoleTest, ServesAfterAnnouncementsWhoseAnswersAreLost) {
  Run(3);
  EXPECT_TRUE(ServesSoon()) << "nobody else may take this lease any more";
  absl::MutexLock lock(&object_->mu);
  EXPECT_EQ(object_->last_epoch, registry_->environment().epochs->now());
}

TEST_F(LeaseRoleTest, AnotherServersAnnouncementIsNotItsOwn) {
  {
    absl::MutexLock lock(&object_->mu);
    object_->last_primary = "two";
    object_->last_epoch = 1ull << 32 | 1;
  }
  Run(0);
  usleep(300'000);
  EXPECT_FALSE(replication_->CheckServing().ok()) << "it may lack versions of the other one";
}

TEST_F(LeaseRoleTest, NothingIsCreatedOnAStandby) {
  ASSERT_EQ(Create(Spec("before", true)).status(), absl::OkStatus());
  registry_->FenceAll(absl::UnavailableError("fenced"));
  ASSERT_EQ(registry_->BeginFollowing(), absl::OkStatus());
  EXPECT_EQ(Create(Spec("new", true)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(registry_->Find("before").ok());
  registry_->EndFollowing();
  EXPECT_EQ(Create(Spec("new", true)).status(), absl::OkStatus());
}

}  // namespace
}  // namespace gradwire
