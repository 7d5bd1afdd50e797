// How the heartbeat thread mends a link whose streams broke. See shard_link.h.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/internal/link_errors.h"
#include "client/cpp/internal/shard_link.h"

namespace gradwire::client {
namespace {

constexpr int64_t kMendPauseMs = 10;  // doubled with every break in a row that is no lost connection
constexpr int64_t kAskAgainMs = 50;
constexpr int64_t kDoubtMs = 1000;  // a job in memory ends with its server: so long after nobody listens there

}  // namespace

v1::JoinRequest ShardLink::RequestToMend(const ResumePoint& point) {
  v1::JoinRequest request;
  {
    absl::MutexLock lock(&mu_);
    request = join_;
    request.set_known_epoch(server_epoch_.epoch);
    request.set_known_lineage(server_epoch_.lineage);
    request.set_known_instance(instance_);
  }
  if (!point.anew) {
    request.set_resume(true);
    request.set_resume_round(point.round);
    request.mutable_resume_seen()->Assign(point.seen.begin(), point.seen.end());
    request.mutable_resume_versions()->Assign(point.versions.begin(), point.versions.end());
    return request;
  }
  // Version 0 is there when this worker has helped to make it: a server that knows nothing of the job is taken as well.
  request.set_catch_up(point.round > 0);
  request.set_start_version(point.round);
  return request;
}

bool ShardLink::IsSameServer() {
  for (int attempt = 0; attempt < kMostDoubts; ++attempt) {
    const auto status = servers_.Describe();
    absl::MutexLock lock(&mu_);
    if (status.ok()) {
      const uint64_t first = status->first_epoch() != 0 ? status->first_epoch() : status->server_epoch();
      return first <= server_epoch_.epoch && server_epoch_.epoch <= status->server_epoch();
    }
    if (!closing_) stop_.WaitWithTimeout(&mu_, absl::Milliseconds(kAskAgainMs));
  }
  return false;
}

bool ShardLink::Mend(const absl::Status& why) {
  const absl::Time began = absl::Now();
  const absl::Time deadline = began + absl::Milliseconds(options_.reconnect_timeout_ms);
  CloseStreams();
  Notice(absl::StrFormat("%s. It is tried again for %s", std::string(why.message()),
                         absl::FormatDuration(absl::Milliseconds(options_.reconnect_timeout_ms))));
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      // A server that takes workers back and drops them at once is not asked in a tight loop; half of its time is left
      // to answer in.
      const absl::Duration pause = std::min(absl::Milliseconds(kMendPauseMs << breaks_), (deadline - absl::Now()) / 2);
      if (!closing_) stop_.WaitWithTimeout(&mu_, pause);
      if (closing_) return false;
    }
    std::optional<ResumePoint> point;
    Deliver([&](LinkEvents* events) { point = events->ResumeAt(options_.shard); });
    if (!point) {
      Lost(why);
      return false;
    }
    if (point->anew && !options_.durable && !IsSameServer()) {
      Lost(why);
      return false;
    }
    const int64_t left_ms = std::max<int64_t>(absl::ToInt64Milliseconds(deadline - absl::Now()), 1);
    const absl::StatusOr<v1::JoinReply> joined =
        JoinWithin(RequestToMend(*point), options_.durable ? left_ms : std::min(left_ms, kDoubtMs));
    const absl::Status mended = joined.ok() ? OpenStreams() : joined.status();
    if (mended.ok()) {
      Notice(absl::StrFormat("shard %d at %s is back after %.1f s", options_.shard, options_.address,
                             absl::ToDoubleSeconds(absl::Now() - began)));
      const bool behind = joined->start_version() != point->round;
      Deliver([&](LinkEvents* events) {
        if (point->anew) return events->OnJoinedAnew(options_.shard, *joined, behind);
        events->OnResumed(options_.shard, behind);
      });
      return true;
    }
    // Taken back, and dropped again before the streams were open: this process stood still for a lease.
    const bool dropped = joined.ok() && absl::IsNotFound(mended);
    const bool ended = !options_.durable && NobodyListens(mended);
    if (!(Retryable(mended) || dropped) || ended || absl::Now() >= deadline) {
      // A server that was started anew does not know a job that was in its memory only: that it broke off says more.
      const bool forgotten = !options_.durable && (absl::IsNotFound(mended) || Retryable(mended));
      Lost(absl::IsCancelled(mended) ? why : GivenUp(forgotten ? why : absl::OkStatus(), mended, absl::Now() - began));
      return false;
    }
  }
}

absl::Status ShardLink::GivenUp(const absl::Status& why, const absl::Status& mended, absl::Duration waited) const {
  const std::string who = absl::StrCat("shard ", options_.shard, " at ", options_.address, ": ");
  if (why.ok()) {
    if (!Retryable(mended)) return mended;
    return absl::UnavailableError(absl::StrCat(std::string(mended.message()),
                                               ". Start this server again with its --data-dir and join again: it "
                                               "has every version that anyone saw"));
  }
  return absl::UnavailableError(
      absl::StrCat(who, "this server is lost: the connection broke (", absl::StripPrefix(why.message(), who),
                   ") and within ", absl::ToInt64Milliseconds(waited), " ms it ",
                   absl::IsNotFound(mended) ? "was back without the job" : "did not answer",
                   ". The job has durability none and is lost with it: start the server again and the job anew, from a "
                   "checkpoint where there is one (resume_from), or give the job another durability"));
}

}  // namespace gradwire::client
