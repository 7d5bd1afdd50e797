// Which plans are kept, and which one the frames of a round are encoded by.
#include "common/codec/plan/plan_window.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace gradwire {
namespace {

RoundPlan PlanOf(uint64_t version) {
  RoundPlan plan;
  plan.sketch_groups = static_cast<uint32_t>(version);
  return plan;
}

TEST(PlanWindow, KeepsTheLastOnes) {
  for (uint32_t depth : {1u, 2u, 5u}) {
    PlanWindow window(depth, PlanOf(0));
    for (uint64_t version = 0; version < 12; ++version) {
      EXPECT_EQ(window.version(), version);
      EXPECT_EQ(window.newest(), PlanOf(version));
      for (uint64_t asked = 0; asked < 14; ++asked) {
        const bool kept = asked <= version && asked + depth > version;
        const RoundPlan* plan = window.Find(asked);
        ASSERT_EQ(plan != nullptr, kept) << "depth " << depth << " at version " << version << ": " << asked;
        if (kept) {
          EXPECT_EQ(*plan, PlanOf(asked));
        }
      }
      window.Push(PlanOf(version + 1));
    }
  }
}

TEST(PlanWindow, APlanStaysWhereItIsUntilItIsDropped) {
  PlanWindow window(3, PlanOf(0));
  const RoundPlan* const first = window.Find(0);
  window.Push(PlanOf(1));
  window.Push(PlanOf(2));
  EXPECT_EQ(window.Find(0), first);
  EXPECT_EQ(*first, PlanOf(0));
}

TEST(PlanWindow, CountsTheRoundsThatWereSkipped) {
  PlanWindow window(2, 5, {PlanOf(5), PlanOf(4)}, 3);
  window.Push(PlanOf(6));
  EXPECT_EQ(window.nonfinite_rounds(), 3u);
  window.Push(PlanOf(7), /*no_step=*/true);
  EXPECT_EQ(window.nonfinite_rounds(), 4u);
  EXPECT_EQ(window.version(), 7u);
}

TEST(PlanWindow, IsMadeOfWhatAnotherOneKeeps) {
  PlanWindow window(3, PlanOf(0));
  for (uint64_t version = 1; version < 8; ++version) window.Push(PlanOf(version));
  PlanWindow copy(3, 7, window.newest_first());
  EXPECT_EQ(copy, window);
  copy.Push(PlanOf(8));
  EXPECT_EQ(copy.Find(5), nullptr);
  EXPECT_EQ(*copy.Find(6), PlanOf(6));
}

}  // namespace
}  // namespace gradwire
