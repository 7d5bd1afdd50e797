// What is noted, when, and how much of it.
#include "common/trace/recorder.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "tests/lib/manual_clock.h"

namespace gradwire {
namespace {

using testing_support::ManualClock;

TraceSubject SubjectOf(uint64_t round, uint32_t bucket = 0) {
  return {.stage = v1::TRACE_ENCODE, .round = round, .bucket = bucket};
}

TEST(TraceRecorder, NotesTheRoundsAskedForAlone) {
  ManualClock clock;
  TraceRecorder recorder(&clock);
  recorder.Note(SubjectOf(5));
  EXPECT_EQ(recorder.Read(0, 10).total, 0u) << "nothing was asked for";
  recorder.Record(5, 2);
  for (uint64_t round : {uint64_t{0}, uint64_t{4}, uint64_t{5}, uint64_t{6}, uint64_t{7}, UINT64_MAX})
    recorder.Note(SubjectOf(round));
  const TraceRecorder::Page page = recorder.Read(0, 10);
  ASSERT_EQ(page.notes.size(), 2u);
  EXPECT_EQ(page.notes[0].subject.round, 5u);
  EXPECT_EQ(page.notes[1].subject.round, 6u);
  EXPECT_EQ(page.first_round, 5u);
  EXPECT_EQ(page.rounds, 2u);
}

TEST(TraceRecorder, ASpanLastsAsLongAsItsScope) {
  ManualClock clock;
  TraceRecorder recorder(&clock);
  recorder.Record(1, 1);
  clock.now += 100;
  {
    TraceSpan span(&recorder, SubjectOf(1, 3));
    span.SetBytes(7);
    clock.now += 20;
  }
  { const TraceSpan other(&recorder, SubjectOf(2)); }
  { const TraceSpan nowhere(nullptr, SubjectOf(1)); }
  const TraceRecorder::Page page = recorder.Read(0, 10);
  ASSERT_EQ(page.notes.size(), 1u);
  EXPECT_EQ(page.notes[0].end_ns - page.notes[0].begin_ns, 20);
  EXPECT_EQ(page.notes[0].end_ns, clock.Now());
  EXPECT_EQ(page.notes[0].subject.bucket, 3u);
  EXPECT_EQ(page.notes[0].subject.bytes, 7u);
  EXPECT_NE(page.notes[0].thread, 0u);
}

TEST(TraceRecorder, TheSameRoundsGoOnAndOthersBeginAnew) {
  ManualClock clock;
  TraceRecorder recorder(&clock);
  recorder.Record(1, 1);
  recorder.Note(SubjectOf(1));
  recorder.Record(1, 1);
  EXPECT_EQ(recorder.Read(0, 10).total, 1u);
  recorder.Record(1, 2);
  EXPECT_EQ(recorder.Read(0, 10).total, 0u);
}

TEST(TraceRecorder, KeepsSoManyAndCountsTheOthers) {
  ManualClock clock;
  TraceRecorder recorder(&clock);
  recorder.Record(0, 1);
  for (size_t i = 0; i < TraceRecorder::kMaxNotes + 3; ++i) recorder.Note(SubjectOf(0, static_cast<uint32_t>(i)));
  const TraceRecorder::Page page = recorder.Read(TraceRecorder::kMaxNotes - 2, 10);
  EXPECT_EQ(page.total, TraceRecorder::kMaxNotes);
  EXPECT_EQ(page.dropped, 3u);
  ASSERT_EQ(page.notes.size(), 2u);
  EXPECT_EQ(page.notes[1].subject.bucket, TraceRecorder::kMaxNotes - 1);
  EXPECT_EQ(recorder.Read(UINT64_MAX, 10).notes.size(), 0u);
  EXPECT_EQ(recorder.Read(0, 5).notes.size(), 5u);
}

TEST(TraceRecorder, ThreadsNoteSideBySide) {
  SteadyClock clock;
  TraceRecorder recorder(&clock);
  recorder.Record(0, 1);
  constexpr size_t kThreads = 4;
  constexpr size_t kEach = 1000;
  {
    std::vector<std::jthread> threads;
    for (size_t t = 0; t < kThreads; ++t)
      threads.emplace_back([&recorder] {
        for (size_t i = 0; i < kEach; ++i) recorder.Note(SubjectOf(0));
      });
  }
  EXPECT_EQ(recorder.Read(0, 0).total, kThreads * kEach);
}

}  // namespace
}  // namespace gradwire
