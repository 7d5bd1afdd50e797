// In the place of a job's journal: keeps its records, which may be seen at once.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/journal/record.h"
#include "server/job/update_sink.h"

namespace gradwire::testing_support {

// Thread-safe; `records`, which outlives it, is read while no round is open.
class RecordingSink final : public UpdateSink {
 public:
  explicit RecordingSink(std::vector<journal::Record>* records) : records_(records) {}
  void Append(journal::Record record, std::function<void()> visible) override {
    {
      absl::MutexLock lock(&mu_);
      records_->push_back(std::move(record));
    }
    visible();
  }
  void Stop() override {}
  journal::JournalStatus status() const override { return {}; }
  void SnapshotTaken(uint64_t, uint64_t) override {}

 private:
  absl::Mutex mu_;
  std::vector<journal::Record>* const records_ ABSL_PT_GUARDED_BY(mu_);
};

}  // namespace gradwire::testing_support
