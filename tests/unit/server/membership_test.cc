// Names, incarnations and leases.
#include "server/rounds/membership.h"

#include <gtest/gtest.h>

#include "common/base/hash.h"

namespace gradwire {
namespace {

constexpr TimeNs kLeaseNs = 1000;

// Mix64 backwards.
uint64_t Unmix64(uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3ull;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089ull;
  return (x ^ (x >> 30) ^ (x >> 60)) - 0x9E3779B97F4A7C15ull;
}

Membership TwoWorkers() { return Membership({.max_workers = 2, .lease_ns = kLeaseNs}); }

TEST(Membership, JoinAgainOfOneIncarnationIsIdempotentAndRenews) {
  Membership m = TwoWorkers();
  const auto first = m.Join("a", 1, 0, 100);
  ASSERT_TRUE(first.ok());
  EXPECT_FALSE(first->again);
  const auto second = m.Join("a", 1, 7, 600);
  ASSERT_TRUE(second.ok());
  EXPECT_TRUE(second->again);
  EXPECT_EQ(second->id, first->id);
  EXPECT_EQ(m.Get(first->id)->start_round, 0u);
  EXPECT_EQ(m.Get(first->id)->lease_end, 1600);
}

TEST(Membership, NewIncarnationSupersedes) {
  Membership m = TwoWorkers();
  const MemberId old_id = m.Join("a", 1, 0, 0)->id;
  const auto joined = m.Join("a", 2, 3, 0);
  ASSERT_TRUE(joined.ok());
  EXPECT_EQ(joined->superseded, old_id);
  EXPECT_EQ(m.members().size(), 1u);
  const auto old_find = m.Find("a", 1);
  EXPECT_EQ(old_find.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(old_find.status().message().find("join again"), absl::string_view::npos);
  EXPECT_TRUE(m.Find("a", 2).ok());
}

TEST(Membership, WhoHasTheNumberOfAnotherWorkerDoesNotTakeItsPlace) {
  Membership m = TwoWorkers();
  const MemberId id = m.Join("a", 1, 0, 0)->id;
  const uint64_t same = Unmix64(HashString("a") ^ Mix64(1) ^ HashString("b"));
  ASSERT_EQ(MakeMemberId("b", same), id);
  EXPECT_EQ(m.Join("b", same, 0, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(m.CheckNotSuperseded("b", same).code(), absl::StatusCode::kInvalidArgument) << "on its way back";
  EXPECT_FALSE(m.Find("b", same).ok());
  EXPECT_EQ(m.Get(id)->worker, "a");
  EXPECT_EQ(m.Find("a", 2).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(m.Find("a", 1).ok());
}

// Journals say 0 of what nobody uploaded.
TEST(Membership, RefusesIncarnation0) {
  Membership m = TwoWorkers();
  EXPECT_EQ(m.Join("a", 0, 0, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(m.members().empty());
}

TEST(Membership, RefusesMoreThanMaxWorkersButLetsOneReplaceItself) {
  Membership m = TwoWorkers();
  ASSERT_TRUE(m.Join("a", 1, 0, 0).ok());
  ASSERT_TRUE(m.Join("b", 1, 0, 0).ok());
  EXPECT_EQ(m.Join("c", 1, 0, 0).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(m.Join("a", 2, 0, 0).ok());
}

TEST(Membership, RefusesNamesThatAreNotNames) {
  Membership m = TwoWorkers();
  for (const std::string& name : {std::string(), std::string("a b"), std::string(129, 'x'), std::string("\xff")}) {
    EXPECT_EQ(m.Join(name, 1, 0, 0).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

TEST(Membership, LeaseEndsExactlyThen) {
  Membership m = TwoWorkers();
  const MemberId id = m.Join("a", 1, 0, 0)->id;
  EXPECT_EQ(m.NextExpiry(), kLeaseNs);
  EXPECT_TRUE(m.Expire(kLeaseNs - 1).empty());
  EXPECT_EQ(m.Expire(kLeaseNs), std::vector<MemberId>{id});
  EXPECT_EQ(m.Find("a", 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(m.NextExpiry().has_value());
}

TEST(Membership, RenewNeverShortensALease) {
  Membership m = TwoWorkers();
  const MemberId id = m.Join("a", 1, 0, 500)->id;
  m.Renew(id, 100);
  EXPECT_EQ(m.Get(id)->lease_end, 1500);
}

TEST(Membership, FirstIsTheOneThatJoinedFirstOfThoseStillHere) {
  Membership m = TwoWorkers();
  const MemberId a = m.Join("z", 1, 0, 0)->id;
  const MemberId b = m.Join("b", 1, 0, 0)->id;
  EXPECT_EQ(m.FirstInitializer(), nullptr);
  m.SetMayInitialize(a, true);
  m.SetMayInitialize(b, true);
  EXPECT_EQ(m.FirstInitializer()->id, a);
  m.Remove(a);
  EXPECT_EQ(m.FirstInitializer()->id, b);
}

}  // namespace
}  // namespace gradwire
