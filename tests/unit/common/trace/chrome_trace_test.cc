// The file that a viewer opens.
#include "common/trace/chrome_trace.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

namespace gradwire {
namespace {

using Json = nlohmann::json;

v1::TraceEvent EventOf(v1::TraceStage stage, int64_t begin_ns, int64_t end_ns, uint64_t thread) {
  v1::TraceEvent event;
  event.set_stage(stage);
  event.set_round(3);
  event.set_bucket(1);
  event.set_begin_ns(begin_ns);
  event.set_end_ns(end_ns);
  event.set_thread(thread);
  return event;
}

Json Of(const std::vector<TracedProcess>& processes) { return Json::parse(ChromeTrace(processes, {"a", "b"})); }

std::vector<Json> Named(const Json& file, const std::string& name, const std::string& phase) {
  std::vector<Json> found;
  for (const Json& event : file["traceEvents"])
    if (event["name"] == name && event["ph"] == phase) found.push_back(event);
  return found;
}

TracedProcess Shard() {
  TracedProcess shard;
  shard.name = "shard 1";
  shard.shard = 1;
  shard.members[9] = "worker-0";
  return shard;
}

TracedProcess Worker() {
  TracedProcess worker;
  worker.name = worker.worker = "worker-0";
  return worker;
}

TEST(ChromeTrace, AnEventSaysWhenWhereAndOfWhat) {
  TracedProcess worker = Worker();
  worker.offset_ns = 500'000;
  v1::TraceEvent encode = EventOf(v1::TRACE_ENCODE, 1'000'000, 1'002'500, 77);
  encode.set_shard(1);
  encode.set_bytes(64);
  worker.events = {encode, EventOf(v1::TRACE_TAKE_IN, 0, 1, 77), EventOf(v1::TRACE_END_ROUND, 0, 1, 78)};
  const Json file = Of({worker});
  const std::vector<Json> found = Named(file, "encode", "X");
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0]["ts"], 1500.0);
  EXPECT_EQ(found[0]["dur"], 2.5);
  EXPECT_EQ(found[0]["tid"], 77);
  EXPECT_EQ(found[0]["args"], (Json{{"round", 3}, {"bucket", 1}, {"shard", 1}, {"bytes", 64}}));
  EXPECT_EQ(Named(file, "take in", "X").at(0)["args"], (Json{{"round", 3}, {"tensor", "b"}}));
  EXPECT_EQ(Named(file, "end round", "X").at(0)["args"], (Json{{"round", 3}}));
  std::set<std::string> threads;
  for (const Json& name : Named(file, "thread_name", "M")) threads.insert(name["args"]["name"]);
  EXPECT_EQ(threads, (std::set<std::string>{"encode, take in", "end round"}));
}

TEST(ChromeTrace, ArrowsGoFromTheFrameToWhereItIsMerged) {
  TracedProcess shard = Shard();
  TracedProcess worker = Worker();
  v1::TraceEvent merge = EventOf(v1::TRACE_MERGE, 20'000, 30'000, 5);
  merge.set_member(9);
  v1::TraceEvent answer = EventOf(v1::TRACE_ANSWER, 40'000, 41'000, 5);
  answer.set_member(9);
  shard.events = {merge, merge, answer};  // two chunks
  v1::TraceEvent send = EventOf(v1::TRACE_SEND, 1'000, 2'000, 6);
  send.set_shard(1);
  v1::TraceEvent received = EventOf(v1::TRACE_RECEIVED, 50'000, 50'000, 7);
  received.set_shard(1);
  worker.events = {send, received};
  const Json file = Of({shard, worker});
  for (const std::string name : {"frame", "answer"}) {
    const std::vector<Json> begin = Named(file, name, "s");
    const std::vector<Json> end = Named(file, name, "f");
    ASSERT_EQ(begin.size(), 1u) << name;
    ASSERT_EQ(end.size(), 1u) << name;
    EXPECT_EQ(begin[0]["id"], end[0]["id"]);
    EXPECT_NE(begin[0]["pid"], end[0]["pid"]);
  }
  EXPECT_EQ(Named(file, "merge", "X").at(0)["args"]["worker"], "worker-0");
}

TEST(ChromeTrace, BucketsThatWaitHaveTracksOfTheirOwn) {
  TracedProcess shard = Shard();
  shard.events = {EventOf(v1::TRACE_AGREEMENT, 0, 9, 5), EventOf(v1::TRACE_FINISH, 4, 5, 5)};
  const Json file = Of({shard});
  EXPECT_NE(Named(file, "agreement", "X").at(0)["tid"], Named(file, "finish", "X").at(0)["tid"]);
}

TEST(ChromeTrace, SaysWhatItDoesNotKnow) {
  TracedProcess shard = Shard();
  shard.clock_error_ns = 1'500;
  shard.dropped = 4;
  shard.missing = "gone \xff";
  const Json about = Of({shard})["otherData"]["processes"].at(0);
  EXPECT_EQ(about["clock_error_us"], 1.5);
  EXPECT_EQ(about["dropped_events"], 4);
  EXPECT_EQ(about["missing"].get<std::string>().substr(0, 5), "gone ");
}

TEST(ChromeTrace, StagesHaveNames) {
  EXPECT_EQ(TraceStageName(v1::TRACE_END_ROUND), "end round");
  EXPECT_EQ(TraceStageName(static_cast<v1::TraceStage>(99)), "stage 99");
}

}  // namespace
}  // namespace gradwire
