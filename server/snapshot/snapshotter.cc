// See snapshotter.h.
#include "server/snapshot/snapshotter.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/time/time.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

constexpr absl::Duration kLook = absl::Seconds(1);
constexpr absl::Duration kPatience = absl::Seconds(60);  // for the round to end
constexpr absl::Duration kRetry = absl::Seconds(10);

}  // namespace

Snapshotter::Snapshotter(std::shared_ptr<JobShard> shard, Disk* disk, const std::string& directory,
                         uint64_t journal_bytes)
    : shard_(std::move(shard)),
      files_(disk, directory, &shard_->job(), &shard_->layout(), shard_->shard_index()),
      journal_bytes_(journal_bytes),
      thread_([this] { Run(); }) {}

Snapshotter::~Snapshotter() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
    wake_.Signal();
  }
  shard_->CancelCapture();
  thread_.join();
}

void Snapshotter::Request() {
  absl::MutexLock lock(&mu_);
  requested_ = true;
  wake_.Signal();
}

bool Snapshotter::Due() const {
  return shard_->WantsSnapshot() || shard_->JournalBytes() >= journal_at_last_ + journal_bytes_;
}

void Snapshotter::Run() {
  absl::Duration pause = kLook;
  for (;;) {
    bool asked = false;
    {
      absl::MutexLock lock(&mu_);
      if (!stop_ && !requested_) wake_.WaitWithTimeout(&mu_, pause);
      if (stop_) return;
      asked = std::exchange(requested_, false);
    }
    pause = kLook;
    if (!asked && !Due()) continue;
    const absl::Status taken = CatchBadAlloc("a snapshot", [this] { return Take(); });
    if (taken.ok()) continue;
    shard_->NoteSnapshot(0, taken);
    spdlog::warn("job {}: no snapshot was taken: {}", shard_->job().spec().name(), taken.ToString());
    pause = kRetry;
  }
}

absl::Status Snapshotter::Take() {
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<ShardCapture> capture, shard_->Capture(kPatience));
  GW_RETURN_IF_ERROR(files_.Write(capture->state));
  GW_ASSIGN_OR_RETURN(const uint64_t oldest, files_.RemoveOld(kKeep));
  // Every snapshot that stays can be gone on from: its records stay, and those of the rounds that workers may ask for.
  shard_->NoteSnapshot(capture->state.version, absl::OkStatus());
  shard_->CutJournal(capture->state.version, oldest);
  journal_at_last_ = shard_->JournalBytes();
  spdlog::info("job {}: snapshot of version {} taken", shard_->job().spec().name(), capture->state.version);
  return absl::OkStatus();
}

}  // namespace gradwire
