// How tasks are worked on, whatever they are: on which threads, in which order, and which no longer once the exchange
// has failed or ends.
#include "client/cpp/internal/tasked_exchanger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tests/unit/client/coalesced.h"
#include "tests/unit/client/one_worker.h"

namespace gradwire::client {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr uint32_t kTensors = 8;
constexpr uint32_t kHeld = 5;                               // the tensor whose task ends when the test lets it
constexpr uint32_t kShard = 1;                              // that all tasks are for
constexpr absl::Duration kNeverComes = absl::Seconds(120);  // what takes that long

v1::JobSpec SpecOf(uint64_t elements) {
  v1::JobSpec spec = SmallSpec("dense:fp32");
  spec.clear_tensors();
  for (uint32_t t = 0; t < kTensors; ++t) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("t", t));
    tensor->add_shape(elements / kTensors + (t == 0 ? elements % kTensors : 0));
  }
  return spec;
}

struct TensorTask {
  uint32_t tensor = 0;
  const float* gradient = nullptr;
};

// A shard that has room as the test says.
class RoomyLink final : public FrameLink {
 public:
  bool HasRoom() const override { return room; }
  absl::Status SendFrame(OutgoingFrame) override { return absl::UnimplementedError("nothing is sent here"); }
  absl::Status RequestPull(v1::PullKind, uint64_t, uint32_t, uint32_t) override {
    return absl::UnimplementedError("nothing is pulled here");
  }
  absl::StatusOr<uint64_t> CatchUp(uint64_t) override { return absl::UnimplementedError("nobody is behind"); }
  absl::Status Annotate(const absl::Status& status) const override { return status; }
  std::atomic<bool> room = true;
};

// Notes its tasks. Rounds open and never end.
class NotingExchanger final : public TaskedExchanger<TensorTask> {
 public:
  // `wants_room`: tasks wait for room on kShard.
  NotingExchanger(const SliceContext& slices, FrameLink* link, uint32_t threads = 1, bool wants_room = false,
                  const Coalescing& coalescing = Coalescing())
      : TaskedExchanger(slices, {link, link}, threads, coalescing), most_at_work_(threads), wants_room_(wants_room) {
    StartTasks();
  }
  ~NotingExchanger() override {
    Release();
    Join();
  }

  // Since the beginning.
  std::vector<uint32_t> worked() const {
    absl::MutexLock lock(&mu_);
    return worked_;
  }
  std::vector<const float*> gradients() const {
    absl::MutexLock lock(&mu_);
    return gradients_;
  }
  std::vector<std::thread::id> threads() const {
    absl::MutexLock lock(&mu_);
    return on_;
  }
  size_t queued() const {
    absl::MutexLock lock(&mu_);
    return tasks_.size();
  }

  bool AwaitWorked(size_t tasks) {
    const auto worked = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return worked_.size() >= tasks; };
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&worked), kNeverComes);
  }
  bool AwaitHeld() {
    const auto held = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return holds_; };
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&held), kNeverComes);
  }
  void Release() {
    absl::MutexLock lock(&mu_);
    released_ = true;
  }
  bool AwaitIdle() {
    const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return tasks_.empty() && !Encoding(); };
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&idle), kNeverComes);
  }
  // The first half of an exchange's Stop; Join has the other.
  void AskToEnd() {
    absl::MutexLock lock(&mu_);
    stop_ = true;
  }
  void Join() {
    AskToEnd();
    EndTasks();
  }

  absl::Status Begin(std::span<const float>) override {
    absl::MutexLock lock(&mu_);
    round_open_ = true;
    OpenReady(/*all_acknowledged=*/true);
    return absl::OkStatus();
  }
  // Until all of `tasks` were worked on.
  bool WaitAsACallerFor(size_t tasks) {
    absl::MutexLock lock(&mu_);
    const Waiter waiter(this);
    const auto worked = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return worked_.size() >= tasks; };
    return mu_.AwaitWithTimeout(absl::Condition(&worked), kNeverComes);
  }
  void OnLost(uint32_t, const absl::Status& status) override { Fail(status); }
  absl::Status BeginReplacement() override { return absl::UnimplementedError("no rounds here"); }
  absl::Status End(int64_t) override { return absl::UnimplementedError("no rounds here"); }
  absl::Status Drain(int64_t) override { return absl::UnimplementedError("no rounds here"); }
  absl::Status WaitPushed(uint32_t, int64_t) override { return absl::UnimplementedError("no rounds here"); }
  absl::Status WaitApplied(uint32_t, int64_t) override { return absl::UnimplementedError("no rounds here"); }
  void Stop(const absl::Status& reason) override { Fail(reason); }
  uint64_t version() const override { return 0; }
  absl::StatusOr<std::vector<PlanWindow>> Plans() const override { return absl::UnimplementedError("no rounds here"); }
  void OnAck(uint32_t, const v1::PushAck&) override {}
  void OnAnswer(uint32_t, PullAnswer) override {}
  void OnMustInitialize(uint32_t) override {}

 private:
  TensorTask TaskOf(uint32_t tensor, const GivenGradient& gradient) override { return {tensor, gradient.values}; }
  TaskPlace PlaceOf(const TensorTask& task) const override {
    return {TaskPlace::Rank::kEncode, 0, kShard, task.tensor, wants_room_};
  }
  void Work(const TensorTask& task) override {
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(Encoding());
    EXPECT_LT(at_work_, most_at_work_) << "tensor " << task.tensor << " beside others";
    ++at_work_;
    worked_.push_back(task.tensor);
    gradients_.push_back(task.gradient);
    on_.push_back(std::this_thread::get_id());
    if (task.tensor == kHeld) {
      holds_ = true;
      mu_.Await(absl::Condition(&released_));
    }
    --at_work_;
  }

  const uint32_t most_at_work_;
  const bool wants_room_;
  uint32_t at_work_ ABSL_GUARDED_BY(mu_) = 0;
  bool holds_ ABSL_GUARDED_BY(mu_) = false;
  bool released_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<uint32_t> worked_ ABSL_GUARDED_BY(mu_);
  std::vector<const float*> gradients_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread::id> on_ ABSL_GUARDED_BY(mu_);
};

class TaskedExchangerTest : public testing::TestWithParam<bool> {
 protected:
  explicit TaskedExchangerTest(bool threads = GetParam())
      : worker_(SpecOf(kThreadsAbove + (threads ? 1 : 0))), exchanger_(worker_.context, &link_) {}
  void TearDown() override {
    exchanger_.Release();
    if (caller_.joinable()) caller_.join();
  }

  absl::Status Ready(uint32_t tensor) { return exchanger_.Ready(tensor, worker_.parameters[tensor].data()); }
  // Someone is at the task of kHeld, and will be until Release.
  void Hold() {
    ASSERT_TRUE(exchanger_.Begin({}).ok());
    caller_ = std::thread([this] { EXPECT_EQ(Ready(kHeld), absl::OkStatus()); });
    ASSERT_TRUE(exchanger_.AwaitHeld());
  }
  void ReleaseCaller() {
    exchanger_.Release();
    caller_.join();
  }

  OneWorker worker_;
  RoomyLink link_;
  NotingExchanger exchanger_;
  std::thread caller_;
};

struct WithThreads : TaskedExchangerTest {
  WithThreads() : TaskedExchangerTest(true) {}
};
struct WithoutThreads : TaskedExchangerTest {
  WithoutThreads() : TaskedExchangerTest(false) {}
};
INSTANTIATE_TEST_SUITE_P(Threads, TaskedExchangerTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Own" : "None"; });

TEST_P(TaskedExchangerTest, WorksOnWhatIsReadyAndNothingElse) {
  EXPECT_THAT(std::string(Ready(1).message()), HasSubstr("call BeginRound first"));
  ASSERT_TRUE(exchanger_.Begin({}).ok());
  EXPECT_FALSE(exchanger_.IsReady(3));
  EXPECT_EQ(Ready(3), absl::OkStatus());
  EXPECT_TRUE(exchanger_.IsReady(3));
  EXPECT_THAT(std::string(Ready(3).message()), HasSubstr("ready twice"));
  EXPECT_TRUE(absl::IsInvalidArgument(exchanger_.Ready(kTensors, worker_.parameters[0].data())));
  EXPECT_EQ(Ready(0), absl::OkStatus());
  ASSERT_TRUE(exchanger_.AwaitIdle());
  EXPECT_THAT(exchanger_.worked(), ElementsAre(3, 0));
  EXPECT_THAT(exchanger_.gradients(), ElementsAre(worker_.parameters[3].data(), worker_.parameters[0].data()));
  EXPECT_FALSE(exchanger_.HasFailed());
}

TEST_P(TaskedExchangerTest, DropsWhatIsQueuedOnceItHasFailed) {
  ASSERT_NO_FATAL_FAILURE(Hold());
  EXPECT_EQ(Ready(1), absl::OkStatus());
  EXPECT_EQ(Ready(6), absl::OkStatus());
  EXPECT_FALSE(exchanger_.HasFailed());
  exchanger_.OnLost(1, absl::UnavailableError("shard 1 is gone"));
  exchanger_.OnLost(0, absl::InternalError("shard 0 as well"));
  EXPECT_TRUE(exchanger_.HasFailed());
  EXPECT_EQ(Ready(2), absl::UnavailableError("shard 1 is gone"));
  EXPECT_FALSE(exchanger_.IsReady(2));
  ReleaseCaller();
  ASSERT_TRUE(exchanger_.AwaitIdle());
  EXPECT_THAT(exchanger_.worked(), ElementsAre(kHeld)) << "the caller's gradients are read no more";
  EXPECT_EQ(Ready(7), absl::UnavailableError("shard 1 is gone"));
  EXPECT_TRUE(exchanger_.HasFailed());
  EXPECT_EQ(exchanger_.queued(), 0u);
}

TEST_P(TaskedExchangerTest, EndsWhileTasksAreQueued) {
  ASSERT_NO_FATAL_FAILURE(Hold());
  EXPECT_EQ(Ready(1), absl::OkStatus());
  EXPECT_EQ(Ready(6), absl::OkStatus());
  exchanger_.AskToEnd();
  ReleaseCaller();
  exchanger_.Join();
  EXPECT_THAT(exchanger_.worked(), ElementsAre(kHeld));
  EXPECT_EQ(exchanger_.queued(), 2u);
}

TEST_F(WithThreads, WorksOnAThreadOfItsOwnInOrder) {
  ASSERT_NO_FATAL_FAILURE(Hold());
  const std::thread::id caller = caller_.get_id();
  for (uint32_t t : {7u, 0u, 2u, 1u}) EXPECT_EQ(Ready(t), absl::OkStatus());
  EXPECT_THAT(exchanger_.worked(), ElementsAre(kHeld)) << "one at a time";
  ReleaseCaller();
  for (uint32_t t : {6u, 3u}) EXPECT_EQ(Ready(t), absl::OkStatus());
  ASSERT_TRUE(exchanger_.AwaitIdle());
  EXPECT_THAT(exchanger_.worked(), ElementsAre(kHeld, 7, 0, 2, 1, 6, 3));
  EXPECT_THAT(exchanger_.threads(), Each(exchanger_.threads()[0]));
  EXPECT_NE(exchanger_.threads()[0], std::this_thread::get_id());
  EXPECT_NE(exchanger_.threads()[0], caller);
}

TEST_F(WithThreads, AsManyAsAreGivenWorkBesideEachOther) {
  NotingExchanger two(worker_.context, &link_, /*threads=*/2);
  ASSERT_TRUE(two.Begin({}).ok());
  ASSERT_TRUE(two.Ready(kHeld, worker_.parameters[kHeld].data()).ok());
  ASSERT_TRUE(two.AwaitHeld());
  for (uint32_t t : {7u, 0u, 2u}) EXPECT_EQ(two.Ready(t, worker_.parameters[t].data()), absl::OkStatus());
  ASSERT_TRUE(two.AwaitWorked(4)) << "one of them is held, the other goes on";
  EXPECT_THAT(two.worked(), ElementsAre(kHeld, 7, 0, 2));
  two.Release();
  ASSERT_TRUE(two.AwaitIdle());
}

TEST_P(TaskedExchangerTest, WaitsForRoom) {
  NotingExchanger waits(worker_.context, &link_, 1, /*wants_room=*/true);
  ASSERT_TRUE(waits.Begin({}).ok());
  link_.room = false;
  EXPECT_EQ(waits.Ready(3, worker_.parameters[3].data()), absl::OkStatus());
  waits.OnRoom(kShard);  // for something else that was faster
  EXPECT_EQ(waits.queued(), 1u);
  link_.room = true;
  waits.OnRoom(kShard);
  ASSERT_TRUE(waits.AwaitIdle());
  EXPECT_THAT(waits.worked(), ElementsAre(3));
}

// Gradients of 400 kB each; one tensor is empty.
struct Coalesces : testing::Test {
  static v1::JobSpec Spec() {
    v1::JobSpec spec = SpecOf(kTensors * 100'000);
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name("empty");
    tensor->add_shape(0);
    return spec;
  }
  Coalesces() : worker(Spec()), exchanger(worker.context, &link, 1, false, Coalesced()) { exchanger.Release(); }
  absl::Status Ready(uint32_t tensor) { return exchanger.Ready(tensor, worker.parameters[tensor].data()); }
  void AllReady() {
    ASSERT_TRUE(exchanger.Begin({}).ok());
    for (uint32_t t = 0; t < kTensors; ++t) ASSERT_EQ(Ready(t), absl::OkStatus());
    ASSERT_TRUE(exchanger.AwaitIdle());
  }
  // Tensors of the next round that are worked on before all are ready.
  size_t WorkedEarly() {
    EXPECT_TRUE(exchanger.Begin({}).ok());
    const size_t before = exchanger.worked().size();
    for (uint32_t t = 0; t + 1 < kTensors; ++t) EXPECT_EQ(Ready(t), absl::OkStatus());
    EXPECT_TRUE(exchanger.AwaitIdle());
    const size_t worked = exchanger.worked().size() - before;
    EXPECT_EQ(Ready(kTensors - 1), absl::OkStatus());
    EXPECT_TRUE(exchanger.AwaitWorked(before + kTensors));
    return worked;
  }

  OneWorker worker;
  RoomyLink link;
  NotingExchanger exchanger;
};

TEST_F(Coalesces, WhatIsReadyWaitsForAsMuchAsThereIsToCome) {
  ASSERT_TRUE(exchanger.Begin({}).ok());
  for (uint32_t t : {7, 6, 5}) EXPECT_EQ(Ready(t), absl::OkStatus());
  EXPECT_EQ(exchanger.queued(), 0u);
  EXPECT_THAT(exchanger.worked(), ElementsAre());
  EXPECT_TRUE(exchanger.IsReady(6));
  EXPECT_EQ(Ready(4), absl::OkStatus());
  ASSERT_TRUE(exchanger.AwaitWorked(4)) << "as much is to come";
  for (uint32_t t : {3, 2}) EXPECT_EQ(Ready(t), absl::OkStatus());
  EXPECT_THAT(exchanger.worked(), ElementsAre(7, 6, 5, 4)) << "so little waits for the last";
  EXPECT_EQ(Ready(1), absl::OkStatus());
  ASSERT_TRUE(exchanger.AwaitWorked(7));
  EXPECT_EQ(Ready(0), absl::OkStatus());
  ASSERT_TRUE(exchanger.AwaitWorked(kTensors)) << "the one without elements need not be reported";
  EXPECT_THAT(exchanger.worked(), ElementsAre(7, 6, 5, 4, 3, 2, 1, 0));
  EXPECT_EQ(Ready(kTensors), absl::OkStatus());
  EXPECT_TRUE(exchanger.AwaitWorked(kTensors + 1)) << "and does not wait";
}

TEST_F(Coalesces, NoMoreThanMayWait) {
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(exchanger.Begin({}).ok());
  for (uint32_t t = 0; t < 3; ++t) EXPECT_EQ(Ready(t), absl::OkStatus());
  EXPECT_THAT(exchanger.worked(), ElementsAre()) << "1.42 MiB may wait";
  EXPECT_EQ(Ready(6), absl::OkStatus());
  ASSERT_TRUE(exchanger.AwaitWorked(4));
  EXPECT_EQ(Ready(7), absl::OkStatus());
  EXPECT_EQ(exchanger.queued(), 0u) << "the next ones wait anew";
  EXPECT_THAT(exchanger.worked(), ElementsAre(0, 1, 2, 6));
}

TEST_F(Coalesces, NothingWhileSomeoneWaitsForIt) {
  ASSERT_TRUE(exchanger.Begin({}).ok());
  EXPECT_EQ(Ready(3), absl::OkStatus());
  EXPECT_THAT(exchanger.worked(), ElementsAre());
  EXPECT_TRUE(exchanger.WaitAsACallerFor(1));
  std::thread waits([this] { EXPECT_TRUE(exchanger.WaitAsACallerFor(3)); });
  EXPECT_EQ(Ready(1), absl::OkStatus());
  ASSERT_TRUE(exchanger.AwaitWorked(2)) << "there is a waiter, or one comes";
  EXPECT_EQ(Ready(4), absl::OkStatus());
  waits.join();
  EXPECT_EQ(Ready(2), absl::OkStatus());
  EXPECT_THAT(exchanger.worked(), ElementsAre(3, 1, 4));
}

TEST_F(Coalesces, WhereTheThreadThatReportsIsKeptFromItsCore) {
  ScriptedTimes::step = 0;
  for (int i = 0; i < 80; ++i) ASSERT_NO_FATAL_FAILURE(AllReady());
  EXPECT_EQ(WorkedEarly(), kTensors - 1) << "cores are idle";
  ScriptedTimes::step = TimeNs{3600} * 1'000'000'000;
  ASSERT_NO_FATAL_FAILURE(AllReady());
  EXPECT_EQ(WorkedEarly(), 6u) << "1 MiB may wait: twice three do, and one";
}

TEST_F(WithoutThreads, NothingWaits) {
  NotingExchanger waits(worker_.context, &link_, 1, false, Coalesced());
  ASSERT_TRUE(waits.Begin({}).ok());
  EXPECT_EQ(waits.Ready(3, worker_.parameters[3].data()), absl::OkStatus());
  EXPECT_THAT(waits.worked(), ElementsAre(3));
}

TEST_F(WithoutThreads, WorksOnItsCallers) {
  ASSERT_TRUE(exchanger_.Begin({}).ok());
  EXPECT_EQ(Ready(3), absl::OkStatus());
  EXPECT_THAT(exchanger_.worked(), ElementsAre(3)) << "done on return";
  EXPECT_EQ(Ready(1), absl::OkStatus());
  EXPECT_THAT(exchanger_.worked(), ElementsAre(3, 1));
  EXPECT_THAT(exchanger_.threads(), Each(std::this_thread::get_id()));
}

TEST_F(WithoutThreads, OneOfTwoCallersDoesAll) {
  ASSERT_NO_FATAL_FAILURE(Hold());
  const std::thread::id caller = caller_.get_id();
  EXPECT_EQ(Ready(1), absl::OkStatus());
  EXPECT_EQ(Ready(6), absl::OkStatus());
  EXPECT_THAT(exchanger_.worked(), ElementsAre(kHeld));
  EXPECT_EQ(exchanger_.queued(), 2u);
  ReleaseCaller();
  EXPECT_THAT(exchanger_.worked(), ElementsAre(kHeld, 1, 6));
  EXPECT_THAT(exchanger_.threads(), Each(caller));
  EXPECT_EQ(exchanger_.queued(), 0u);
  EXPECT_EQ(Ready(0), absl::OkStatus());
  EXPECT_EQ(exchanger_.threads().back(), std::this_thread::get_id()) << "the next one to come is at them again";
}

}  // namespace
}  // namespace gradwire::client
