// The SHA-256 of a job's parameters: work of seconds that anybody may ask for, so it takes a share of the time of one
// core, whoever asks and however often; see job_shard.h.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/base/out_of_memory.h"
#include "common/base/sha256.h"
#include "common/base/status_macros.h"
#include "server/job/job_shard.h"

namespace gradwire {
namespace {

constexpr size_t kMaxWaiters = 16;
constexpr size_t kElementsAtOnce = size_t{1} << 18;  // about a millisecond's worth
constexpr int kPauses = 3;                           // for each unit of time at work: a share of 1/4

}  // namespace

absl::StatusOr<std::string> JobShard::Digest() {
  if (!job_.keeps_parameters()) return std::string();
  absl::MutexLock lock(&digest_mu_);
  if (digest_waiters_ >= kMaxWaiters) {
    return absl::ResourceExhaustedError(absl::StrFormat("job '%s': %d callers wait for its digest already: try again",
                                                        job_.spec().name(), digest_waiters_));
  }
  ++digest_waiters_;
  // Runs before `lock` lets go, which the analysis cannot see.
  const absl::Cleanup waited = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { --digest_waiters_; };
  const uint64_t ticket = ++digests_asked_;
  while (digest_of_ < ticket) {
    const auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(digest_mu_) { return !digesting_ || digest_of_ >= ticket; };
    digest_mu_.Await(absl::Condition(&over));
    if (digest_of_ >= ticket) break;
    if (digest_.ok() && digest_versions_ == ParameterVersions()) break;
    digesting_ = true;
    const uint64_t asked = digests_asked_;
    digest_mu_.Unlock();
    std::vector<uint64_t> versions;
    absl::StatusOr<std::string> digest = CatchBadAlloc("a digest", [&] { return ComputeDigest(&versions); });
    digest_mu_.Lock();
    digesting_ = false;
    digest_of_ = asked;
    digest_versions_ = std::move(versions);
    digest_ = std::move(digest);
  }
  return digest_;
}

// Where the parameters are as they are of no version yet, they may change without one: never the same.
std::vector<uint64_t> JobShard::ParameterVersions() {
  std::vector<uint64_t> versions;
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    versions.push_back(bucket->ready && !replaying_ ? bucket->version : UINT64_MAX - digests_asked_);
  }
  return versions;
}

absl::StatusOr<std::string> JobShard::ComputeDigest(std::vector<uint64_t>* versions) {
  Sha256 sha;
  std::vector<float> parameters;
  for (const auto& bucket : buckets_) {
    {
      absl::MutexLock lock(&bucket->mu);
      parameters.resize(bucket->layout->elements);
      bucket->store->Read({.parameter = parameters.data()});
      versions->push_back(bucket->ready && !replaying_ ? bucket->version : UINT64_MAX);
    }
    for (size_t begin = 0; begin < parameters.size(); begin += kElementsAtOnce) {
      {
        absl::MutexLock lock(&mu_);
        GW_RETURN_IF_ERROR(shut_);
      }
      // Of all jobs one has its turn, and keeps it while it rests: what they take together is bounded.
      absl::MutexLock turn(environment_.digest_turn.get());
      const absl::Time began = absl::Now();
      const std::span<const float> left = std::span<const float>(parameters).subspan(begin);
      sha.Update(left.first(std::min(kElementsAtOnce, left.size())));
      if (left.size() > kElementsAtOnce || bucket != buckets_.back()) absl::SleepFor(kPauses * (absl::Now() - began));
    }
  }
  return sha.Hex();
}

}  // namespace gradwire
