// What of a link's frames is given to its stream, and in which order.
#include "client/cpp/internal/frame_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradwire::client {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Takes as many messages as the test lets it.
class CountingStream final : public transport::Stream {
 public:
  absl::Status Send(transport::Message) override { return absl::UnimplementedError("it would block"); }
  absl::StatusOr<bool> TrySend(transport::Message& message) override {
    if (!ended.ok()) return ended;
    if (room == 0) return false;
    --room;
    v1::PushMessage control;
    EXPECT_TRUE(control.ParseFromString(message.control));
    pulls.push_back(control.pull_size());
    const Bytes& chunk = message.frame.at(0);
    taken.emplace_back(chunk.span().begin(), chunk.span().end());
    if (on_taken) on_taken();
    return true;
  }
  void Finish(absl::Status) override {}
  void Cancel() override {}

  int room = 0;
  absl::Status ended;
  std::function<void()> on_taken;
  std::vector<std::string> taken;
  std::vector<int> pulls;  // kinds asked for with each
};

OutgoingFrame FrameOf(std::vector<std::string> chunks, uint64_t round = 0, uint32_t turn = 0) {
  OutgoingFrame frame;
  for (std::string& chunk : chunks) frame.chunks.push_back(Bytes::FromString(std::move(chunk)));
  frame.pull = {v1::PULL_UPDATE};
  frame.round = round;
  frame.turn = turn;
  return frame;
}

class FrameQueueTest : public testing::Test {
 protected:
  CountingStream stream_;
  FrameQueue::Totals totals_;
  std::optional<FrameQueue> queue_{std::in_place, &stream_, &totals_};
};

TEST_F(FrameQueueTest, WhatThereIsRoomForLeavesAtOnce) {
  stream_.room = 5;
  EXPECT_EQ(queue_->Add(FrameOf({"a1", "a2"})), absl::OkStatus());
  EXPECT_THAT(stream_.taken, ElementsAre("a1", "a2"));
  EXPECT_THAT(stream_.pulls, ElementsAre(0, 1)) << "asked for with the last chunk";
  EXPECT_EQ(totals_.unsent, 0u);
  EXPECT_EQ(totals_.sent, 4u);
}

TEST_F(FrameQueueTest, OldRoundsAndLowTurnsOvertakeButBreakIntoNoFrame) {
  stream_.room = 1;
  EXPECT_EQ(queue_->Add(FrameOf({"a1", "a2"}, 1, 9)), absl::OkStatus());
  EXPECT_EQ(queue_->Add(FrameOf({"late"}, 2, 0)), absl::OkStatus());
  EXPECT_EQ(queue_->Add(FrameOf({"large"}, 1, 8)), absl::OkStatus());
  EXPECT_EQ(queue_->Add(FrameOf({"small"}, 1, 3)), absl::OkStatus());
  EXPECT_EQ(queue_->Add(FrameOf({"same"}, 1, 3)), absl::OkStatus());
  EXPECT_EQ(queue_->Add(FrameOf({"old"}, 0, 7)), absl::OkStatus());
  EXPECT_THAT(stream_.taken, ElementsAre("a1"));
  stream_.room = 3;
  EXPECT_EQ(queue_->Pump(), absl::OkStatus());
  EXPECT_THAT(stream_.taken, ElementsAre("a1", "a2", "old", "small"));
  EXPECT_EQ(totals_.unsent, 13u);
  stream_.room = 9;
  EXPECT_EQ(queue_->Pump(), absl::OkStatus());
  EXPECT_THAT(stream_.taken, ElementsAre("a1", "a2", "old", "small", "same", "large", "late"));
  EXPECT_EQ(totals_.unsent, 0u);
}

TEST_F(FrameQueueTest, AStreamThatTellsOfRoomWhileItTakesIsHeard) {
  stream_.room = 1;
  bool told = false;
  stream_.on_taken = [&] {  // as a transport does that writes on the sender's thread
    if (std::exchange(told, true)) return;
    stream_.room = 2;
    EXPECT_EQ(queue_->Pump(), absl::OkStatus());
  };
  EXPECT_EQ(queue_->Add(FrameOf({"1", "2", "3"})), absl::OkStatus());
  EXPECT_THAT(stream_.taken, ElementsAre("1", "2", "3"));
}

TEST_F(FrameQueueTest, AStreamThatHasEndedTakesNothing) {
  EXPECT_EQ(queue_->Add(FrameOf({"a"})), absl::OkStatus());
  stream_.ended = absl::UnavailableError("it broke");
  stream_.room = 1;
  EXPECT_EQ(queue_->Pump(), stream_.ended);
  EXPECT_EQ(queue_->Add(FrameOf({"b"})), absl::UnavailableError("it broke"));
  EXPECT_THAT(stream_.taken, IsEmpty());
}

TEST_F(FrameQueueTest, WhatWasNotSentIsForgottenWithTheQueue) {
  stream_.room = 1;
  EXPECT_EQ(queue_->Add(FrameOf({"a1", "a2"})), absl::OkStatus());
  EXPECT_EQ(queue_->Add(FrameOf({"b"})), absl::OkStatus());
  EXPECT_EQ(totals_.unsent, 3u);
  queue_.reset();
  EXPECT_EQ(totals_.unsent, 0u);
  EXPECT_EQ(totals_.sent, 2u);
}

}  // namespace
}  // namespace gradwire::client
