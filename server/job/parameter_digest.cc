// See parameter_digest.h.
#include "server/job/parameter_digest.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/base/out_of_memory.h"
#include "common/base/sha256.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

constexpr size_t kMaxCallers = 16;
constexpr int kMaxCallersOfAll = 64;                 // for all jobs of a server: each keeps a thread of the transport
constexpr size_t kElementsAtOnce = size_t{1} << 18;  // about a millisecond's worth
constexpr int kPauses = 3;                           // for each unit of time at work: a share of 1/4

}  // namespace

absl::StatusOr<std::string> ParameterDigest::Get() {
  if (!parts_.job.keeps_parameters()) return std::string();
  absl::MutexLock lock(&mu_);
  if (waiters_ >= kMaxCallers) {
    return absl::ResourceExhaustedError(absl::StrFormat("job '%s': %d callers wait for its digest already: try again",
                                                        parts_.job.spec().name(), waiters_));
  }
  std::atomic<int>& of_all = *parts_.environment.digest_waiters;
  ++waiters_;
  const int others = of_all.fetch_add(1);
  const absl::Cleanup waited = [this, &of_all]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    --waiters_;
    of_all.fetch_sub(1);
  };
  if (others >= kMaxCallersOfAll) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "job '%s': %d callers wait for digests of jobs already: try again", parts_.job.spec().name(), others));
  }
  const uint64_t ticket = ++asked_;
  while (answered_ < ticket) {
    const auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !computing_ || answered_ >= ticket; };
    mu_.Await(absl::Condition(&over));
    if (answered_ >= ticket) break;
    if (digest_.ok() && versions_ == Versions()) break;
    computing_ = true;
    const uint64_t asked = asked_;
    mu_.Unlock();
    std::vector<uint64_t> versions;
    absl::StatusOr<std::string> digest = CatchBadAlloc("a digest", [&] { return Compute(&versions); });
    mu_.Lock();
    computing_ = false;
    answered_ = asked;
    versions_ = std::move(versions);
    digest_ = std::move(digest);
  }
  return digest_;
}

// Where the parameters are as they are of no version yet, they may change without one: never the same.
std::vector<uint64_t> ParameterDigest::Versions() {
  std::vector<uint64_t> versions;
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    versions.push_back(bucket->ready && !parts_.replaying ? bucket->version : UINT64_MAX - asked_);
  }
  return versions;
}

absl::StatusOr<std::string> ParameterDigest::Compute(std::vector<uint64_t>* versions) {
  Sha256 sha;
  std::vector<float> parameters;
  for (const auto& bucket : parts_.buckets) {
    {
      absl::MutexLock lock(&bucket->mu);
      parameters.resize(bucket->layout->elements);
      bucket->store->Read({.parameter = parameters.data()});
      versions->push_back(bucket->ready && !parts_.replaying ? bucket->version : UINT64_MAX);
    }
    for (size_t begin = 0; begin < parameters.size(); begin += kElementsAtOnce) {
      {
        absl::MutexLock lock(&parts_.mu);
        GW_RETURN_IF_ERROR(parts_.shut);
      }
      // Of all jobs one has its turn, and keeps it while it rests: what they take together is bounded.
      absl::MutexLock turn(parts_.environment.digest_turn.get());
      const absl::Time began = absl::Now();
      const std::span<const float> left = std::span<const float>(parameters).subspan(begin);
      sha.Update(left.first(std::min(kElementsAtOnce, left.size())));
      if (left.size() > kElementsAtOnce || bucket != parts_.buckets.back())
        absl::SleepFor(kPauses * (absl::Now() - began));
    }
  }
  return sha.Hex();
}

}  // namespace gradwire
