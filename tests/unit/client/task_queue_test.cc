// Which task is next.
#include "client/cpp/internal/task_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace gradwire::client {
namespace {

using testing::ElementsAre;
using Rank = TaskPlace::Rank;

class TaskQueueTest : public testing::Test {
 protected:
  void Add(std::string name, const TaskPlace& place) { queue_.Add(place, std::move(name)); }
  // The name of the next one, which is at work now; empty: none may begin.
  std::string Begin() {
    const auto has_room = [this](uint32_t shard) { return !full_.contains(shard); };
    const bool can = queue_.CanBegin(has_room);
    const auto entry = queue_.Begin(has_room);
    EXPECT_EQ(entry.has_value(), can);
    if (!entry) return "";
    at_work_.push_back(entry->place);
    return entry->task;
  }
  // The one that began first.
  void End() {
    queue_.End(at_work_.front());
    at_work_.erase(at_work_.begin());
  }
  std::vector<std::string> BeginAll() {
    std::vector<std::string> names;
    for (std::string name = Begin(); !name.empty(); name = Begin()) names.push_back(name);
    return names;
  }

  TaskQueue<std::string> queue_;
  std::set<uint32_t> full_;
  std::vector<TaskPlace> at_work_;
};

TEST_F(TaskQueueTest, WhatLeavesSoonestGoesFirst) {
  Add("take in 2", {Rank::kTakeIn, 2});
  Add("take in 1", {Rank::kTakeIn, 1});
  Add("encode late", {Rank::kEncode, 7, 0, 3});
  Add("encode first", {Rank::kEncode, 4, 0, 1});
  Add("encode second", {Rank::kEncode, 4, 1, 2});
  Add("message", {Rank::kMessage, 9, 0, 0});
  EXPECT_THAT(BeginAll(),
              ElementsAre("message", "encode first", "encode second", "encode late", "take in 1", "take in 2"));
  EXPECT_EQ(queue_.at_work(), 6u);
  EXPECT_TRUE(queue_.empty());
}

TEST_F(TaskQueueTest, AShardWithoutRoomHoldsNoOther) {
  full_ = {0};
  Add("shard 0", {Rank::kEncode, 1, 0, 0, true});
  Add("shard 1", {Rank::kEncode, 2, 1, 1, true});
  Add("message to 0", {Rank::kMessage, 3, 0, 2});
  EXPECT_THAT(BeginAll(), ElementsAre("message to 0", "shard 1"));
  full_.clear();
  EXPECT_EQ(Begin(), "shard 0");
}

TEST_F(TaskQueueTest, ASliceHasOneTaskAtATime) {
  Add("encode", {Rank::kEncode, 1, 0, 5});
  EXPECT_EQ(Begin(), "encode");
  Add("again", {Rank::kMessage, 1, 0, 5});
  Add("another slice", {Rank::kEncode, 1, 0, 6});
  EXPECT_EQ(Begin(), "another slice");
  EXPECT_EQ(Begin(), "");
  End();
  EXPECT_EQ(Begin(), "again");
}

TEST_F(TaskQueueTest, ATaskOfAWholeShardIsAloneThereAndNotOvertaken) {
  Add("encode", {Rank::kEncode, 1, 0, 5});
  EXPECT_EQ(Begin(), "encode");
  Add("all of it", {Rank::kMessage, 0, 0});
  Add("encode later", {Rank::kEncode, 1, 0, 6});
  Add("of another", {Rank::kEncode, 1, 1, 7});
  EXPECT_EQ(Begin(), "of another");
  EXPECT_EQ(Begin(), "") << "else the shard would never be free";
  End();
  EXPECT_EQ(Begin(), "all of it");
  EXPECT_EQ(Begin(), "");
  End();
  End();
  EXPECT_EQ(Begin(), "encode later");
}

TEST_F(TaskQueueTest, ClearLeavesWhatIsAtWork) {
  Add("a", {Rank::kTakeIn, 1});
  Add("b", {Rank::kTakeIn, 2});
  EXPECT_EQ(Begin(), "a");
  queue_.Clear();
  EXPECT_EQ(Begin(), "");
  EXPECT_EQ(queue_.at_work(), 1u);
  End();
  EXPECT_EQ(queue_.at_work(), 0u);
}

}  // namespace
}  // namespace gradwire::client
