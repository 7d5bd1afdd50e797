// See start.h.
#include "client/cpp/internal/start.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/internal/deadline.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/parameters.h"
#include "common/job/round_mode.h"
#include "common/wire/frame.h"

namespace gradwire::client {
namespace {

constexpr int kMaxCatchUpPasses = 8;

}  // namespace

v1::PullKind StartKind(const Job& job, PullMode pull) {
  if (pull == PullMode::kParamsBf16) return v1::PULL_PARAMS_BF16;
  return pull == PullMode::kUpdate && job.keeps_parameters() ? v1::PULL_STATE : v1::PULL_PARAMS_F32;
}

absl::StatusOr<uint64_t> AgreeToCatchUp(const std::vector<FrameLink*>& links, uint64_t version) {
  std::vector<std::optional<uint64_t>> start(links.size());
  for (int pass = 0; pass < kMaxCatchUpPasses; ++pass) {
    for (size_t s = 0; s < links.size(); ++s) {
      if (start[s] == version) continue;
      GW_ASSIGN_OR_RETURN(start[s], links[s]->CatchUp(version));
      version = std::max(version, *start[s]);
    }
    if (std::all_of(start.begin(), start.end(), [version](const auto& v) { return v == version; })) return version;
  }
  return absl::AbortedError(absl::StrCat("the ", links.size(),
                                         " shards could not agree on a version to go on with after ", kMaxCatchUpPasses,
                                         " attempts (latest ", version, "): join again"));
}

struct Starter::State {
  struct Shard {
    uint64_t start = 0;            // that it named last
    uint64_t version = 0;          // that it was at then
    uint64_t connection = 0;       // counted up when the link was mended
    bool must_initialize = false;  // an upload is wanted and was not begun
    bool uploading = false;
    bool pulling = false;
    bool must_pull = false;   // asking for its parameters is wanted and was not done, on this connection
    std::vector<bool> taken;  // per bucket: its initial frame
    uint32_t acked = 0;       // of these
    uint32_t answered = 0;
    std::vector<std::vector<wire::Chunk>> answers;  // per bucket

    bool complete() const { return pulling ? answered == answers.size() : uploading && acked == taken.size(); }
    void ForgetTransfers() {
      uploading = pulling = must_pull = false;
      taken.assign(taken.size(), false);
      answers.assign(answers.size(), {});
      acked = answered = 0;
    }
  };
  absl::Mutex mu;
  std::vector<Shard> shards ABSL_GUARDED_BY(mu);
  bool running ABSL_GUARDED_BY(mu) = false;   // since Run was called
  bool finished ABSL_GUARDED_BY(mu) = false;  // everything is there
  uint64_t mended ABSL_GUARDED_BY(mu) = 0;    // links, so far
  bool compared ABSL_GUARDED_BY(mu) = false;  // this worker's values with those of shard 0
  bool same_as_first ABSL_GUARDED_BY(mu) = false;
  absl::Status failed ABSL_GUARDED_BY(mu);
  uint64_t newest_at_first ABSL_GUARDED_BY(mu) = 0;  // version of any shard, when each had been asked once

  uint64_t NewestVersion() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    uint64_t newest = 0;
    for (const Shard& shard : shards) newest = std::max(newest, shard.version);
    return newest;
  }
  // A shard that was asked before the others may have gone on since, or may have lost versions: it says which. What
  // another one has come to after all were asked says nothing of that: rounds may be faster than asking.
  bool Agrees(uint32_t shard, uint64_t start, const Job& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const bool near = IsAsync(job) || newest_at_first <= shards[shard].version + MostApart(job);
    return shards[shard].start == start && near;
  }

  // OutOfRange is no failure: a later version has to be agreed on.
  absl::Status Failure() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return absl::IsOutOfRange(failed) ? absl::OkStatus() : failed;
  }
};

Starter::Starter(const StartContext& context) : context_(context), state_(std::make_unique<State>()) {
  absl::MutexLock lock(&state_->mu);
  state_->shards.resize(context_.links.size());
  for (uint32_t s = 0; s < state_->shards.size(); ++s) {
    state_->shards[s].taken.resize(context_.layout->bucket_count(s));
    state_->shards[s].answers.resize(context_.layout->bucket_count(s));
  }
}

Starter::~Starter() = default;

absl::Status Starter::JoinAll(const v1::JoinRequest& request) {
  const size_t shards = context_.links.size();
  const absl::Time deadline = DeadlineOf(context_.timeout_ms);
  // Rounds may be faster than asking. Each time a shard waits for this worker from the version on that it named. To ask
  // for a later one would let a shard go on alone where the next one does not answer.
  for (int pass = 0;; ++pass) {
    for (uint32_t s = 0; s < shards; ++s) {
      if (pass > 0) {
        absl::MutexLock lock(&state_->mu);
        if (state_->Agrees(s, version_, *context_.job)) continue;
      }
      v1::JoinRequest mine = request;
      mine.set_shard_index(s);
      mine.set_start_version(version_);
      {
        absl::MutexLock lock(&state_->mu);
        mine.set_other_version(state_->NewestVersion());
      }
      GW_ASSIGN_OR_RETURN(const v1::JoinReply reply, context_.links[s]->Join(mine));
      NoteJoined(s, reply);
      if (pass == 0) {
        const int64_t lease_ms = reply.lease_ms() > 0 ? reply.lease_ms() : context_.job->spec().lease_ms();
        GW_RETURN_IF_ERROR(context_.links[s]->Start(lease_ms, this));
      }
    }
    absl::MutexLock lock(&state_->mu);
    GW_RETURN_IF_ERROR(state_->failed);
    if (pass == 0) state_->newest_at_first = state_->NewestVersion();
    uint32_t agree = 0;
    while (agree < shards && state_->Agrees(agree, version_, *context_.job)) ++agree;
    if (agree == shards) return absl::OkStatus();
    if (absl::Now() >= deadline)
      return absl::AbortedError(absl::StrCat("the ", shards, " shards could not agree on a start version within ",
                                             context_.timeout_ms, " ms and ", pass + 1, " attempts (latest ",
                                             version_.load(), "): join again"));
  }
}

void Starter::NoteJoined(uint32_t shard, const v1::JoinReply& reply) {
  {
    absl::MutexLock lock(&state_->mu);
    state_->shards[shard].start = reply.start_version();
    state_->shards[shard].version = reply.version();
    state_->shards[shard].must_initialize = reply.must_initialize();
    if (!state_->running && version_ < reply.start_version()) version_ = reply.start_version();
  }
  if (shard == 0 && reply.must_initialize()) AllowInitialize(true);
}

absl::StatusOr<StartState> Starter::Run() {
  const bool keeps = context_.job->keeps_parameters();
  {
    absl::MutexLock lock(&state_->mu);
    state_->running = true;
    for (State::Shard& shard : state_->shards) shard.must_pull = !(keeps && version_ == 0 && shard.must_initialize);
  }
  if (!keeps && version_ == 0) return Finish();  // nothing to pull: every plan is the codec's first
  for (;;) {
    const absl::Status pulled = WaitForAll();
    if (pulled.ok()) return Finish();
    if (!absl::IsOutOfRange(pulled)) return pulled;
    GW_RETURN_IF_ERROR(Again());
  }
}

absl::Status Starter::Again() {
  const absl::Time deadline = DeadlineOf(context_.timeout_ms);
  for (;;) {
    uint64_t mended = 0;
    {
      absl::MutexLock lock(&state_->mu);
      GW_RETURN_IF_ERROR(state_->Failure());
      mended = state_->mended;
    }
    const absl::StatusOr<uint64_t> version = AgreeToCatchUp({context_.links.begin(), context_.links.end()}, 0);
    // A link that cannot be mended fails the start. Aborted: rounds went on while one shard after the other was asked.
    const bool again = absl::IsUnavailable(version.status()) || absl::IsDeadlineExceeded(version.status()) ||
                       (absl::IsAborted(version.status()) && absl::Now() < deadline);
    if (again) continue;
    GW_RETURN_IF_ERROR(version.status());
    absl::MutexLock lock(&state_->mu);
    if (state_->mended != mended) continue;
    version_ = *version;
    state_->failed = state_->Failure();
    for (State::Shard& shard : state_->shards) {
      shard.ForgetTransfers();
      shard.start = version_;
      shard.must_pull = true;
    }
    return absl::OkStatus();
  }
}

void Starter::Cancel() {
  absl::MutexLock lock(&state_->mu);
  if (state_->Failure().ok()) state_->failed = absl::CancelledError("the start was cancelled");
}

void Starter::AllowInitialize(bool may) {
  for (ShardLink* link : context_.links) link->AllowInitialize(may);
}

absl::Status Starter::RequestPull(uint32_t shard) {
  const absl::Status asked = context_.links[shard]->RequestPull(StartKind(*context_.job, context_.pull), version_, 0,
                                                                context_.layout->bucket_count(shard));
  return ShardLink::Mends(asked) ? absl::OkStatus() : asked;  // OnJoinedAnew or OnLost follows
}

absl::Status Starter::Upload(uint32_t shard, uint64_t connection) {
  for (uint32_t b = 0; b < context_.layout->bucket_count(shard); ++b) {
    const BucketLayout& slice = context_.layout->at(b, shard);
    const std::vector<float> values = context_.replica->Gather(slice);
    const std::vector<Bytes> frame = EncodeInitialize(slice, context_.incarnation, values.data());
    {
      absl::MutexLock lock(&state_->mu);
      if (state_->shards[shard].connection != connection) return absl::OkStatus();
    }
    context_.links[shard]->AwaitRoom();
    const absl::Status sent = context_.links[shard]->SendFrame({.chunks = frame});
    if (!sent.ok()) return ShardLink::Mends(sent) ? absl::OkStatus() : sent;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Starter::HasValuesOfFirst(const std::vector<std::vector<wire::Chunk>>& answers) {
  for (uint32_t b = 0; b < context_.layout->bucket_count(0); ++b) {
    const BucketLayout& slice = context_.layout->at(b, 0);
    const std::vector<float> own = context_.replica->Gather(slice);
    std::vector<float> theirs(slice.elements);
    ParameterTargets targets;
    targets.parameter = theirs.data();
    GW_ASSIGN_OR_RETURN(const uint64_t version, VersionOf(answers[b]));
    if (version != 0) return false;  // they were trained since
    GW_RETURN_IF_ERROR(DecodeParameters(answers[b], *context_.job, slice, version, targets).status());
    if (!own.empty() && std::memcmp(own.data(), theirs.data(), own.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

absl::Status Starter::WaitForAll() {
  const absl::Time deadline = absl::Now() + absl::Milliseconds(context_.timeout_ms);
  for (;;) {
    std::vector<std::pair<uint32_t, uint64_t>> upload;  // shard, connection
    std::vector<uint32_t> pull;
    std::optional<std::vector<std::vector<wire::Chunk>>> compare;
    {
      absl::MutexLock lock(&state_->mu);
      const auto all = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu) {
        return std::all_of(state_->shards.begin(), state_->shards.end(), [](const auto& s) { return s.complete(); });
      };
      const auto may_upload = [&](const State::Shard& s) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu) {
        const State::Shard& first = state_->shards[0];
        const bool first_is_ours = first.acked == first.taken.size() || state_->same_as_first;
        return s.must_initialize && !s.uploading && (&s == &first || version_ > 0 || first_is_ours);
      };
      const auto may_compare = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu) {
        const State::Shard& first = state_->shards[0];
        return !state_->compared && version_ == 0 && context_.job->keeps_parameters() && first.pulling &&
               first.complete() && !all();
      };
      const auto moved = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu) {
        return std::any_of(state_->shards.begin(), state_->shards.end(),
                           [this](const auto& s) { return s.start != version_; });
      };
      const auto event = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu) {
        if (!state_->failed.ok() || moved()) return true;
        for (const State::Shard& s : state_->shards)
          if (may_upload(s) || s.must_pull) return true;
        return all() || may_compare();
      };
      if (!state_->mu.AwaitWithDeadline(absl::Condition(&event), deadline))
        return absl::DeadlineExceededError(
            absl::StrCat("the parameters of version ", version_.load(), " of job '", context_.job->spec().name(),
                         "' did not arrive within ", context_.timeout_ms,
                         " ms; the worker that initialises them, or the members of an open round, may be lost"));
      GW_RETURN_IF_ERROR(state_->failed);
      if (moved()) return absl::OutOfRangeError("a shard that was joined again starts with another version");
      for (uint32_t i = 0; i < state_->shards.size(); ++i) {
        State::Shard& s = state_->shards[i];
        if (may_upload(s)) {
          if (version_ == 0) upload.push_back({i, s.connection});
          s.uploading = true;
        }
        if (s.must_pull) {
          pull.push_back(i);
          s.pulling = true;
          s.must_pull = false;
        }
      }
      if (upload.empty() && pull.empty() && all()) {
        state_->finished = true;
        return absl::OkStatus();
      }
      if (may_compare()) {
        compare = state_->shards[0].answers;  // shares their memory
        state_->compared = true;
      }
    }
    if (compare) {
      GW_ASSIGN_OR_RETURN(const bool same, HasValuesOfFirst(*compare));
      AllowInitialize(same);
      absl::MutexLock lock(&state_->mu);
      state_->same_as_first = same && state_->compared;
    }
    for (const auto& [s, connection] : upload) GW_RETURN_IF_ERROR(Upload(s, connection));
    for (uint32_t s : pull) GW_RETURN_IF_ERROR(RequestPull(s));
  }
}

absl::StatusOr<StartState> Starter::Finish() {
  StartState start;
  start.version = version_;
  absl::MutexLock lock(&state_->mu);
  GW_RETURN_IF_ERROR(state_->failed);
  for (size_t i = 0; i < context_.layout->slices().size(); ++i) {
    const BucketLayout& slice = context_.layout->slices()[i];
    State::Shard& shard = state_->shards[slice.shard];
    start.versions.push_back(version_);
    if (!shard.pulling) {
      start.plans.emplace_back(PlansKept(*context_.job), context_.codecs[i]->InitialPlan());
      continue;
    }
    const std::vector<wire::Chunk>& answer = shard.answers[slice.bucket];
    const absl::StatusOr<uint64_t> version = VersionOf(answer);
    if (!version.ok()) return context_.links[slice.shard]->Annotate(version.status());
    auto plans = context_.replica->Load(slice, answer, *version);
    if (!plans.ok()) return context_.links[slice.shard]->Annotate(plans.status());
    start.versions.back() = *version;
    start.plans.push_back(*std::move(plans));
    shard.answers[slice.bucket].clear();
  }
  if (IsAsync(*context_.job)) start.version = *std::min_element(start.versions.begin(), start.versions.end());
  return start;
}

bool Starter::asked_to_initialize() const {
  absl::MutexLock lock(&state_->mu);
  return std::any_of(state_->shards.begin(), state_->shards.end(), [](const auto& s) { return s.must_initialize; });
}

absl::StatusOr<uint64_t> Starter::VersionOf(std::span<const wire::Chunk> answer) const {
  if (!IsAsync(*context_.job)) return version_;
  GW_RETURN_IF_ERROR(wire::CheckOrder(answer));
  return answer.front().header.round;
}

void Starter::OnAck(uint32_t shard, const v1::PushAck& ack) {
  absl::MutexLock lock(&state_->mu);
  State::Shard& s = state_->shards[shard];
  if (ack.bucket() >= s.taken.size()) return;
  if (ack.outcome() != v1::PUSH_REFUSED) {
    if (!s.taken[ack.bucket()]) ++s.acked;
    s.taken[ack.bucket()] = true;
    return;
  }
  const absl::Status refused = context_.links[shard]->Annotate(
      absl::Status(static_cast<absl::StatusCode>(ack.code()), std::string(ack.message())));
  // Somebody else's parameters are there, or are on their way.
  if (absl::IsAlreadyExists(refused) || absl::IsFailedPrecondition(refused)) {
    s.must_pull = !s.pulling;
  } else if (state_->Failure().ok()) {
    state_->failed = refused;
  }
}

void Starter::OnAnswer(uint32_t shard, PullAnswer answer) {
  absl::MutexLock lock(&state_->mu);
  State::Shard& s = state_->shards[shard];
  if (!answer.status.ok()) {
    if (absl::IsOutOfRange(answer.status) && answer.version != version_) return;  // of an earlier attempt
    if (state_->failed.ok()) state_->failed = answer.status;
    return;
  }
  if (answer.bucket >= s.answers.size() || answer.version != version_ || !s.answers[answer.bucket].empty()) return;
  s.answers[answer.bucket] = std::move(answer.chunks);
  ++s.answered;
}

void Starter::OnMustInitialize(uint32_t shard) {
  if (shard == 0) AllowInitialize(true);
  absl::MutexLock lock(&state_->mu);
  state_->shards[shard].must_initialize = true;
}

std::optional<ResumePoint> Starter::ResumeAt(uint32_t shard) {
  absl::MutexLock lock(&state_->mu);
  if (!state_->Failure().ok()) return std::nullopt;
  ResumePoint point;
  point.round = version_;
  point.anew = true;
  return point;
}

void Starter::OnJoinedAnew(uint32_t shard, const v1::JoinReply& reply, bool behind) {
  NoteJoined(shard, reply);
  absl::MutexLock lock(&state_->mu);
  State::Shard& s = state_->shards[shard];
  ++s.connection;
  ++state_->mended;
  if (!state_->running || state_->finished || (s.complete() && !s.must_initialize)) return;
  // What was sent may have come or not: the shard says whether it still wants it.
  s.ForgetTransfers();
  s.must_pull = !s.must_initialize;
  if (shard == 0) state_->compared = state_->same_as_first = false;
}

void Starter::OnLost(uint32_t shard, const absl::Status& status) {
  absl::MutexLock lock(&state_->mu);
  if (state_->Failure().ok()) state_->failed = status;
}

}  // namespace gradwire::client
