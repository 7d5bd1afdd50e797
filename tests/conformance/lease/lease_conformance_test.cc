// One suite for every Lease: what proto/REPLICATION.md, "Leases", rests on. Against a real etcd, an API server that
// behaves like that of Kubernetes, and the real one where there is one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "server/lease/lease.h"
#include "tests/lib/lease_services.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire {
namespace {

using testing_support::LeaseService;
using testing_support::LeaseServices;
using testing_support::StartLeaseService;
using testing_support::TcpProxy;

constexpr int64_t kTtlMs = 2000;
constexpr int64_t kLongMs =
    60'000;  // of leases whose end no test waits for: a busy machine's service may take its time

bool Eventually(const std::function<bool()>& done) {
  for (int look = 0; look < 600; ++look) {
    if (done()) return true;
    usleep(50'000);
  }
  return false;
}

class LeaseConformance : public testing::TestWithParam<std::string> {
 protected:
  static void TearDownTestSuite() { Services().clear(); }

  void SetUp() override {
    auto& service = Services()[GetParam()];
    const std::string folder = absl::StrCat(testing::TempDir(), "/lease-", getpid(), "-", GetParam());
    if (service == nullptr) service = StartLeaseService(GetParam(), folder);
    if (!service->why_not().empty()) GTEST_SKIP() << service->why_not();
    service_ = service.get();
    proxy_ = std::make_unique<TcpProxy>(absl::StrCat("grpc://127.0.0.1:", service_->port()));
    static int keys = 0;
    key_ = absl::StrCat("lease-", ++keys);
    const auto probe = Make("probe", "probe");
    ASSERT_TRUE(Eventually([&] { return probe->Hold().ok(); })) << "it does not answer";
  }

  std::unique_ptr<Lease> Make(const std::string& holder, const std::string& key) {
    auto lease = MakeLease(service_->AddressOf(key, service_->port()), {holder, ttl_ms_}, &clock_);
    EXPECT_EQ(lease.status(), absl::OkStatus());
    return *std::move(lease);
  }
  std::unique_ptr<Lease> Make(const std::string& holder) { return Make(holder, key_); }
  // Through a way that can be cut.
  std::unique_ptr<Lease> MakeBehindProxy(const std::string& holder) {
    const std::string address = proxy_->address();
    const int port = std::stoi(address.substr(address.rfind(':') + 1));
    auto lease = MakeLease(service_->AddressOf(key_, port), {holder, ttl_ms_}, &clock_);
    EXPECT_EQ(lease.status(), absl::OkStatus());
    return *std::move(lease);
  }
  // Asks again, as a server does, where a busy machine's service was too late to answer.
  static Lease::State HoldNow(Lease& lease) {
    absl::StatusOr<Lease::State> state = lease.Hold();
    for (int again = 0; again < 5 && absl::IsDeadlineExceeded(state.status()); ++again) state = lease.Hold();
    EXPECT_EQ(state.status(), absl::OkStatus());
    return state.ok() ? *state : Lease::State();
  }
  static bool Holds(Lease& lease) {
    const absl::StatusOr<Lease::State> state = lease.Hold();
    return state.ok() && state->held;
  }

  // Started once for all tests.
  static std::map<std::string, std::unique_ptr<LeaseService>>& Services() {
    static std::map<std::string, std::unique_ptr<LeaseService>> services;
    return services;
  }

  int64_t ttl_ms_ = kTtlMs;
  SteadyClock clock_;
  LeaseService* service_ = nullptr;
  std::unique_ptr<TcpProxy> proxy_;
  std::string key_;
};

TEST_P(LeaseConformance, TakenWhereItIsFreeAndRenewed) {
  ttl_ms_ = kLongMs;
  const auto one = Make("one");
  const auto two = Make("two");
  const TimeNs before = clock_.Now();
  const Lease::State first = HoldNow(*one);
  EXPECT_TRUE(first.held);
  EXPECT_GT(first.until, before);
  EXPECT_LE(first.until, clock_.Now() + ttl_ms_ * 1'000'000);
  EXPECT_EQ(first.last_epoch, 0u);
  const Lease::State other = HoldNow(*two);
  EXPECT_FALSE(other.held);
  EXPECT_EQ(other.holder, "one");
  const Lease::State renewed = HoldNow(*one);
  EXPECT_TRUE(renewed.held);
  EXPECT_GT(renewed.until, first.until);
  EXPECT_FALSE(HoldNow(*two).held);
}

TEST_P(LeaseConformance, ReleasedItIsFreeAtOnce) {
  ttl_ms_ = kLongMs;
  const auto one = Make("one");
  const auto two = Make("two");
  ASSERT_TRUE(HoldNow(*one).held);
  EXPECT_FALSE(HoldNow(*two).held);
  one->Release();
  EXPECT_TRUE(HoldNow(*two).held);
  one->Release();  // of what it does not hold: nothing
  EXPECT_FALSE(HoldNow(*one).held);
  EXPECT_TRUE(HoldNow(*two).held);
}

TEST_P(LeaseConformance, ReleasedWhenItIsDestroyed) {
  ttl_ms_ = kLongMs;
  const auto two = Make("two");
  {
    const auto one = Make("one");
    ASSERT_TRUE(HoldNow(*one).held);
  }
  EXPECT_TRUE(HoldNow(*two).held);
}

TEST_P(LeaseConformance, WithoutRenewalItGoesToAnotherButNotBeforeItEnds) {
  const auto one = Make("one");
  const auto two = Make("two");
  const Lease::State held = HoldNow(*one);
  ASSERT_TRUE(held.held);
  ASSERT_TRUE(Eventually([&] { return Holds(*two); }));
  EXPECT_GE(clock_.Now(), held.until);
  EXPECT_FALSE(HoldNow(*one).held);
}

TEST_P(LeaseConformance, NeverTwoHoldersAtOnce) {
  // What the others must know: until when anybody was told that it holds the lease.
  absl::Mutex mu;
  std::string holder;
  TimeNs until = 0;
  int changes = 0;
  constexpr int kChanges = 6;
  const auto contend = [&](const std::string& name, unsigned seed) {
    const auto lease = Make(name);
    while (true) {
      const absl::StatusOr<Lease::State> state = lease->Hold();
      const TimeNs now = clock_.Now();
      seed = seed * 1103515245 + 12345;
      const unsigned choice = seed >> 16 & 7;
      {
        absl::MutexLock lock(&mu);
        if (state.ok() && state->held) {
          if (holder != name) {
            EXPECT_LE(until, now) << name << " was given what " << holder << " held";
            ++changes;
          }
          holder = name;
          until = state->until;
        } else if (state.ok() && holder == name && until > now) {
          ADD_FAILURE() << name << " lost what it held until " << until << " at " << now;
        }
        if (holder == name && (choice < 2 || changes >= kChanges)) until = 0;  // before it is given back
        if (changes >= kChanges) return;
      }
      if (choice < 2) lease->Release();
      usleep(choice == 2 ? 2'600'000 : 60'000);  // longer than it lives, or not
    }
  };
  std::thread one(contend, "one", 1), two(contend, "two", 2), three(contend, "three", 3);
  one.join();
  two.join();
  three.join();
}

TEST_P(LeaseConformance, WhatWasAnnouncedStaysWhenTheLeaseEnds) {
  ttl_ms_ = kLongMs;
  const auto one = Make("host:7070,unix:///run/gradwire.sock");
  ASSERT_TRUE(HoldNow(*one).held);
  ASSERT_EQ(one->Announce(0xffff'ffff'ffff'fff7), absl::OkStatus());
  const auto two = Make("two");
  const Lease::State seen = HoldNow(*two);
  EXPECT_FALSE(seen.held);
  EXPECT_EQ(seen.holder, "host:7070,unix:///run/gradwire.sock");
  EXPECT_EQ(seen.last_epoch, 0xffff'ffff'ffff'fff7);
  EXPECT_TRUE(HoldNow(*one).held) << "an announcement is no release";
  one->Release();
  const Lease::State taken = HoldNow(*two);
  EXPECT_TRUE(taken.held);
  EXPECT_EQ(taken.last_epoch, 0xffff'ffff'ffff'fff7);
  EXPECT_EQ(taken.last_primary, "host:7070,unix:///run/gradwire.sock");
}

TEST_P(LeaseConformance, WhoHasLostItAnnouncesNothing) {
  const auto one = Make("one");
  ASSERT_TRUE(HoldNow(*one).held);
  const auto two = Make("two");
  ASSERT_TRUE(Eventually([&] { return Holds(*two); }));
  ASSERT_EQ(two->Announce(2), absl::OkStatus());
  EXPECT_EQ(one->Announce(1).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(HoldNow(*two).last_epoch, 2u);
}

TEST_P(LeaseConformance, ANewProcessDoesNotHoldWhatItsPredecessorHeld) {
  const auto before = Make("one");
  const Lease::State held = HoldNow(*before);
  ASSERT_TRUE(held.held);
  const auto after = Make("one");
  EXPECT_FALSE(HoldNow(*after).held);
  EXPECT_EQ(after->Announce(1).code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(Eventually([&] { return Holds(*after); }));
  EXPECT_GE(clock_.Now(), held.until);
}

TEST_P(LeaseConformance, AwayItIsAnErrorAndBackItGoesOn) {
  const auto one = MakeBehindProxy("one");
  ASSERT_TRUE(HoldNow(*one).held);
  proxy_->Cut();
  EXPECT_FALSE(one->Hold().ok());
  const absl::Status announced = one->Announce(1);
  EXPECT_FALSE(announced.ok());
  EXPECT_NE(announced.code(), absl::StatusCode::kAborted) << "nobody said that it is lost";
  one->Release();  // in vain
  const auto two = Make("two");
  ASSERT_TRUE(Eventually([&] { return Holds(*two); }));
  two->Release();
  proxy_->Heal();
  ASSERT_TRUE(Eventually([&] { return Holds(*one); }));
}

INSTANTIATE_TEST_SUITE_P(Every, LeaseConformance, testing::ValuesIn(LeaseServices()),
                         [](const auto& info) { return info.param == "kube-apiserver" ? "apiserver" : info.param; });

}  // namespace
}  // namespace gradwire
