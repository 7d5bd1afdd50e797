// See snapshotter.h.
#include "server/snapshot/snapshotter.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

constexpr absl::Duration kLook = absl::Seconds(1);
constexpr absl::Duration kPatience = absl::Seconds(60);  // for the round to end
constexpr absl::Duration kRetry = absl::Seconds(10);
constexpr int kAttempts = 10;  // to begin before a round of a few microseconds has gone on

}  // namespace

absl::Status TakeSnapshot(JobShard& shard, SnapshotFiles& files, absl::Duration patience, const Aside& aside) {
  std::shared_ptr<ShardCapture> capture;
  absl::Status captured;
  int attempt = 0;
  do {
    GW_RETURN_IF_ERROR(aside([&]() -> absl::Status {
      GW_ASSIGN_OR_RETURN(capture, shard.snapshots().NewCopy());
      return absl::OkStatus();
    }));
    captured = shard.snapshots().Gather(capture, patience);
  } while (absl::IsAborted(captured) && ++attempt < kAttempts);
  GW_RETURN_IF_ERROR(captured);
  const uint64_t version = capture->state.version;
  uint64_t oldest = 0;
  GW_RETURN_IF_ERROR(aside([&]() -> absl::Status {
    GW_RETURN_IF_ERROR(files.Write(capture->state));
    capture = nullptr;
    GW_ASSIGN_OR_RETURN(oldest, files.RemoveOld(kSnapshotsKept));
    return absl::OkStatus();
  }));
  // Every snapshot that stays can be gone on from: its records stay, and those of the rounds that workers may ask for.
  shard.snapshots().NoteTaken(version, absl::OkStatus());
  shard.log().CutBehind(version, oldest);
  spdlog::info("job {}: snapshot of version {} taken", shard.job().spec().name(), version);
  return absl::OkStatus();
}

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
  shard_->snapshots().Cancel();
  background_.Cancel();
  thread_.join();
}

void Snapshotter::Request() {
  absl::MutexLock lock(&mu_);
  requested_ = true;
  wake_.Signal();
}

bool Snapshotter::Due() {
  // The journal is cut behind a snapshot, a while after it.
  const uint64_t bytes = shard_->log().Bytes();
  journal_at_last_ = std::min(journal_at_last_, bytes);
  return shard_->log().WantsSnapshot() || bytes >= journal_at_last_ + journal_bytes_;
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
    // What holds no lock yields to rounds.
    const auto aside = [this](const std::function<absl::Status()>& body) {
      return background_.Run("a snapshot", body);
    };
    const absl::Status taken =
        CatchBadAlloc("a snapshot", [&] { return TakeSnapshot(*shard_, files_, kPatience, aside); });
    if (taken.ok()) {
      journal_at_last_ = shard_->log().Bytes();
      continue;
    }
    shard_->snapshots().NoteTaken(0, taken);
    spdlog::warn("job {}: no snapshot was taken: {}", shard_->job().spec().name(), taken.ToString());
    pause = kRetry;
  }
}

}  // namespace gradwire
