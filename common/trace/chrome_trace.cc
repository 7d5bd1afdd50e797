// See chrome_trace.h.
#include "common/trace/chrome_trace.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/base/hash.h"

namespace gradwire {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kNumbers = uint64_t{1} << 53;  // those that a double holds: viewers in JavaScript read doubles
constexpr uint64_t kWaits = uint64_t{1} << 32;    // above all threads: tracks of buckets that wait, on no thread

double Microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

uint64_t PidOf(const TracedProcess& process) {
  // By name: files of several workers can be put together.
  return process.worker.empty() ? process.shard + 1 : 0x10000 + HashString(process.worker) % 0x10000;
}

bool IsOfTensor(v1::TraceStage stage) { return stage == v1::TRACE_READY || stage == v1::TRACE_TAKE_IN; }

// Waits begin on one thread and end on another, beside what these do.
bool IsWait(v1::TraceStage stage) { return stage == v1::TRACE_TURN || stage == v1::TRACE_AGREEMENT; }

class Writer {
 public:
  explicit Writer(const std::vector<std::string>& tensors) : tensors_(tensors) {}

  void Add(const TracedProcess& process) {
    const uint64_t pid = PidOf(process);
    Name("process_name", pid, 0, process.name);
    std::map<uint64_t, std::pair<std::string, std::set<v1::TraceStage>>> threads;
    for (const v1::TraceEvent& event : process.events) {
      const uint64_t tid = IsWait(event.stage()) ? kWaits + event.bucket() : event.thread();
      AddEvent(process, event, pid, tid);
      auto& [name, stages] = threads[tid];
      if (stages.insert(event.stage()).second)
        absl::StrAppend(&name, name.empty() ? "" : ", ", TraceStageName(event.stage()));
    }
    for (const auto& [tid, thread] : threads) Name("thread_name", pid, tid, thread.first);
    Json about = {{"name", process.name},
                  {"pid", pid},
                  {"clock_offset_us", Microseconds(process.offset_ns)},
                  {"clock_error_us", Microseconds(process.clock_error_ns)},
                  {"events", process.events.size()},
                  {"dropped_events", process.dropped}};
    if (!process.missing.empty()) about["missing"] = process.missing;
    if (process.missing.empty() && process.offset_ns == 0) clock_ = absl::StrCat("the steady clock of ", process.name);
    processes_.push_back(std::move(about));
  }

  std::string Finish() {
    Json file = {{"traceEvents", std::move(events_)},
                 {"displayTimeUnit", "ms"},
                 {"otherData", {{"clock", std::move(clock_)}, {"processes", std::move(processes_)}}}};
    return file.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

 private:
  void Name(const char* kind, uint64_t pid, uint64_t tid, const std::string& name) {
    events_.push_back({{"ph", "M"}, {"name", kind}, {"pid", pid}, {"tid", tid}, {"args", {{"name", name}}}});
  }

  void AddEvent(const TracedProcess& process, const v1::TraceEvent& event, uint64_t pid, uint64_t tid) {
    const double begin_us = Microseconds(event.begin_ns() + process.offset_ns);
    Json args = {{"round", event.round()}};
    if (IsOfTensor(event.stage())) {
      args["tensor"] =
          event.bucket() < tensors_.size() ? tensors_[event.bucket()] : absl::StrCat("tensor ", event.bucket());
    } else if (event.stage() != v1::TRACE_END_ROUND) {
      args["bucket"] = event.bucket();
      args["shard"] = process.worker.empty() ? process.shard : event.shard();
    }
    std::string worker = process.worker;
    if (event.member() != 0) {
      const auto member = process.members.find(event.member());
      worker = member != process.members.end() ? member->second : absl::StrCat("member ", event.member());
      args["worker"] = worker;
    }
    if (event.bytes() != 0) args["bytes"] = event.bytes();
    events_.push_back({{"ph", "X"},
                       {"name", TraceStageName(event.stage())},
                       {"cat", process.worker.empty() ? "shard" : "worker"},
                       {"pid", pid},
                       {"tid", tid},
                       {"ts", begin_us},
                       {"dur", Microseconds(event.end_ns() - event.begin_ns())},
                       {"args", std::move(args)}});
    const uint32_t shard = process.worker.empty() ? process.shard : event.shard();
    const auto arrow = [&](const char* phase, const char* name) {
      const std::string of = absl::StrCat(name, " ", event.round(), " ", event.bucket(), " ", shard, " ", worker);
      const uint64_t id = HashString(of) % kNumbers;
      if (!arrows_.emplace(*phase, id).second) return;  // another chunk of the same frame
      Json end = {{"ph", phase}, {"name", name}, {"cat", "network"}, {"id", id},
                  {"pid", pid},  {"tid", tid},   {"ts", begin_us}};
      if (*phase == 'f') end["bp"] = "e";  // to the event that encloses this time, not to the next one
      events_.push_back(std::move(end));
    };
    if (event.stage() == v1::TRACE_SEND) arrow("s", "frame");
    if (event.stage() == v1::TRACE_MERGE) arrow("f", "frame");
    if (event.stage() == v1::TRACE_ANSWER) arrow("s", "answer");
    if (event.stage() == v1::TRACE_RECEIVED) arrow("f", "answer");
  }

  const std::vector<std::string>& tensors_;
  std::set<std::pair<char, uint64_t>> arrows_;  // their ends, so far
  std::string clock_;
  Json events_ = Json::array();
  Json processes_ = Json::array();
};

}  // namespace

std::string TraceStageName(v1::TraceStage stage) {
  std::string name = absl::AsciiStrToLower(v1::TraceStage_Name(stage));
  constexpr std::string_view kPrefix = "trace_";
  if (!name.starts_with(kPrefix)) return absl::StrCat("stage ", static_cast<int>(stage));
  return absl::StrReplaceAll(name.substr(kPrefix.size()), {{"_", " "}});
}

std::string ChromeTrace(const std::vector<TracedProcess>& processes, const std::vector<std::string>& tensors) {
  Writer writer(tensors);
  for (const TracedProcess& process : processes) writer.Add(process);
  return writer.Finish();
}

}  // namespace gradwire
