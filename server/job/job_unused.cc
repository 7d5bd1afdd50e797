// Jobs that nobody uses any more: ended after a time, deleted on request, named where there is no room for another one.
// See job_registry.h.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/status_macros.h"
#include "server/job/job_registry.h"

namespace gradwire {
namespace {

constexpr TimeNs kNsPerUnusedS = 1'000'000'000;
constexpr size_t kNamedJobs = 8;  // in a refusal

std::string Some(std::vector<std::string> names) {
  const size_t all = names.size();
  names.resize(std::min(all, kNamedJobs));
  const std::string more = all > kNamedJobs ? absl::StrFormat(" and %d more", all - kNamedJobs) : "";
  return absl::StrJoin(names, ", ") + more;
}

}  // namespace

absl::Status JobRegistry::TooManyJobs(std::string_view wanted) const {
  std::vector<std::string> ends;
  std::vector<std::string> stays;
  const auto jobs = All();
  for (const auto& job : jobs) {
    const TimeNs unused = job->UnusedFor();
    if (unused == 0) continue;
    std::string named = absl::StrFormat("'%s' (for %d s)", job->job().spec().name(), unused / kNsPerUnusedS);
    (job->job().durable() ? stays : ends).push_back(std::move(named));
  }
  std::string message = absl::StrFormat("job '%s': this server has %d jobs and --max-jobs is %d", std::string(wanted),
                                        jobs.size(), limits_.max_jobs);
  if (!ends.empty())
    absl::StrAppend(&message, "; without workers: ", Some(ends), ": `gradwire job prune` deletes these");
  if (!stays.empty())
    absl::StrAppend(&message, "; durable, without workers, kept until deleted: ", Some(stays),
                    ": `gradwire job delete` deletes one");
  if (ends.empty() && stays.empty())
    absl::StrAppend(&message, ", all of them have workers: delete one with `gradwire job delete`");
  return absl::ResourceExhaustedError(message);
}

absl::Status JobRegistry::DeleteUnused(std::string_view name, std::optional<uint64_t> version) {
  absl::MutexLock create(&create_mu_);
  const absl::StatusOr<std::shared_ptr<JobShard>> job = Find(name);
  // One that could not be recovered has no workers; what it holds is unknown, so nobody deletes it in passing.
  GW_RETURN_IF_ERROR(job.status());
  GW_RETURN_IF_ERROR(
      (*job)->ShutUnused(absl::AbortedError(absl::StrFormat("job '%s' was deleted", std::string(name))), version, 0));
  const absl::Status removed = Remove(name);
  on_change_();
  GW_RETURN_IF_ERROR(removed);
  spdlog::info("job {} deleted, nobody used it", name);
  return absl::OkStatus();
}

void JobRegistry::EndUnused() {
  if (limits_.unused_job_ns == 0) return;
  for (const auto& job : All()) {
    const TimeNs unused = job->UnusedFor();
    if (unused < limits_.unused_job_ns || job->job().durable()) continue;
    // Where a job is being made this waits for the next tick: leases must not.
    if (!create_mu_.TryLock()) return;
    const std::string& name = job->job().spec().name();
    const absl::StatusOr<std::shared_ptr<JobShard>> here = Find(name);
    const absl::Status ended = absl::AbortedError(absl::StrFormat(
        "job '%s' ended: it had no workers for %d s and its durability is none", name, unused / kNsPerUnusedS));
    if (here.ok() && *here == job && job->ShutUnused(ended, std::nullopt, limits_.unused_job_ns).ok()) {
      Remove(name).IgnoreError();
      spdlog::warn("job {} ended: no workers for {} s, durability none (--unused-job-ms)", name,
                   unused / kNsPerUnusedS);
    }
    create_mu_.Unlock();
  }
}

}  // namespace gradwire
