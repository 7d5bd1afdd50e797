#include "server/job/traffic_accounts.h"

#include <gtest/gtest.h>

namespace gradwire {
namespace {

TEST(TrafficAccounts, WhatIsCountedOfAWorkerGoesWithIt) {
  TrafficAccounts traffic;
  traffic.NoteChunk(7, 100);  // not a member
  traffic.Open(7);
  traffic.NoteChunk(7, 10);
  traffic.NoteChunk(7, 20);
  traffic.NoteFrame(7);
  traffic.NoteNotIncluded(7);
  v1::WorkerStatus worker;
  traffic.DescribeWorker(7, &worker);
  EXPECT_EQ(worker.frame_bytes(), 30u);
  EXPECT_EQ(worker.frames(), 1u);
  EXPECT_EQ(worker.not_included_frames(), 1u);
  EXPECT_EQ(traffic.workers(), 1u);
  traffic.Close(7);
  v1::WorkerStatus gone;
  traffic.DescribeWorker(7, &gone);
  EXPECT_EQ(gone.frame_bytes(), 0u);
  EXPECT_EQ(gone.not_included_frames(), 0u);
  EXPECT_EQ(traffic.workers(), 0u);
}

TEST(TrafficAccounts, TotalsThatAWorkerTellsOnlyGrow) {
  TrafficAccounts traffic;
  traffic.Open(1);
  traffic.Open(2);
  traffic.NoteSanitized(1, 5);
  traffic.NoteSanitized(1, 3);  // came late
  traffic.NoteSanitized(2, 4);
  traffic.NoteSanitized(9, 1000);  // not a member
  traffic.Close(1);
  v1::JobStatus status;
  traffic.Describe(&status);
  EXPECT_EQ(status.sanitized_elements(), 9u) << "what the job has seen stays when the worker goes";
}

TEST(TrafficAccounts, DeferredOfReplayedRoundsDoNotCount) {
  TrafficAccounts traffic;
  FinishStats stats;
  stats.elements = 10;
  stats.deferred = 2;
  traffic.NoteUpdate(stats);
  traffic.ForgetReplayed();
  traffic.NoteUpdate(stats);
  v1::JobStatus status;
  traffic.Describe(&status);
  EXPECT_EQ(status.deferred_elements(), 2u);
  EXPECT_EQ(status.update_elements(), 20u);
}

}  // namespace
}  // namespace gradwire
