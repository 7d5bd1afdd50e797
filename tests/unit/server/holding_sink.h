// In the place of a job's journal: keeps its records, which are safe, and seen, when the test says so.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "common/journal/record.h"
#include "server/job/job_log.h"
#include "server/job/update_sink.h"

namespace gradwire::testing_support {

// Not thread-safe.
class HoldingSink final : public UpdateSink {
 public:
  void Append(journal::Record record, std::function<void()> visible) override {
    records.push_back(std::move(record));
    if (appended) std::exchange(appended, nullptr)();
    held.push_back(std::move(visible));
    if (!holds) Release();
  }
  void Stop() override { stopped = true; }
  journal::JournalStatus status() const override { return state; }
  void SnapshotTaken(uint64_t version, uint64_t keep_from) override {
    snapshot = version;
    kept_from = keep_from;
    records_before_cut = records.size();
  }
  // All that is held becomes safe.
  void Release() {
    const std::vector<std::function<void()>> now = std::exchange(held, {});
    for (const auto& visible : now) visible();
  }

  bool holds = true;               // false: records are safe at once
  std::function<void()> appended;  // called once, behind the next record
  journal::JournalStatus state;    // what it says of itself
  std::vector<journal::Record> records;
  std::vector<std::function<void()>> held;
  uint64_t snapshot = 0;
  uint64_t kept_from = 0;
  size_t records_before_cut = 0;  // that were there when the last snapshot was taken
  bool stopped = false;
};

// The log writes to this one from here on, and owns it.
inline HoldingSink& SetHoldingSink(JobLog& log) {
  auto sink = std::make_unique<HoldingSink>();
  HoldingSink& made = *sink;
  log.SetSink(std::move(sink));
  return made;
}

}  // namespace gradwire::testing_support
