// See kubernetes_lease.h.
#include "server/lease/kubernetes_lease.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

constexpr TimeNs kNsPerTtlMs = 1'000'000;
constexpr int64_t kMsPerRetrySecond = 1000;
constexpr int64_t kCallsPerTtl = 6;  // each of them may take that part of the time to live, all of one call twice that
constexpr int kTries = 3;
constexpr size_t kMaxTokenBytes = 16u << 10;
constexpr size_t kMaxSaidBytes = 200;

constexpr unsigned kOk = 200;
constexpr unsigned kCreated = 201;
constexpr unsigned kUnauthorized = 401;
constexpr unsigned kForbidden = 403;
constexpr unsigned kNotFound = 404;
constexpr unsigned kConflict = 409;
constexpr unsigned kTooManyRequests = 429;

// An identity is NAME_INCARNATION.
std::string HolderOf(const std::string& identity) { return identity.substr(0, identity.rfind('_')); }

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string token;
  token.resize(kMaxTokenBytes + 1);
  in.read(token.data(), static_cast<std::streamsize>(token.size()));
  token.resize(static_cast<size_t>(in.gcount()));
  absl::StripAsciiWhitespace(&token);
  const bool plain = std::all_of(token.begin(), token.end(), [](char c) { return absl::ascii_isgraph(c); });
  if (token.empty() || token.size() > kMaxTokenBytes || !plain) {
    return absl::FailedPreconditionError(absl::StrCat("'", path, "' holds no token"));
  }
  return token;
}

// The message of a Status of Kubernetes, or the first words of whatever this is.
std::string SaidIn(const std::string& body) {
  const nlohmann::json json = nlohmann::json::parse(body, nullptr, /*allow_exceptions=*/false);
  const bool status = json.is_object() && json.contains("message") && json["message"].is_string();
  std::string text = (status ? json["message"].get<std::string>() : body).substr(0, kMaxSaidBytes);
  std::replace_if(
      text.begin(), text.end(), [](char c) { return !absl::ascii_isprint(c); }, ' ');
  return text;
}

}  // namespace

KubernetesLease::KubernetesLease(KubernetesAddress where, LeaseOptions options, uint64_t incarnation, Clock* clock)
    : where_(std::move(where)),
      options_(std::move(options)),
      identity_(absl::StrFormat("%s_%016x", options_.holder, incarnation)),
      objects_(absl::StrCat("/apis/coordination.k8s.io/v1/namespaces/", where_.space, "/leases")),
      clock_(clock),
      client_(where_.host, where_.port, where_.ca_file) {}

KubernetesLease::~KubernetesLease() { Release(); }

TimeNs KubernetesLease::GiveUp() const { return clock_->Now() + 2 * options_.ttl_ms * kNsPerTtlMs / kCallsPerTtl; }

absl::StatusOr<Lease::State> KubernetesLease::Hold() {
  const TimeNs give_up = GiveUp();
  absl::StatusOr<State> state;
  for (int tried = 0; tried < kTries; ++tried) {
    state = HoldOnce(give_up);
    if (!absl::IsAlreadyExists(state.status())) break;
  }
  return state;
}

absl::StatusOr<Lease::State> KubernetesLease::HoldOnce(TimeNs give_up) {
  GW_ASSIGN_OR_RETURN(std::optional<LeaseObject> found, Get(give_up));
  State state;
  const bool ours = found && found->holder() == identity_;
  const bool given_back = found && found->holder().empty();
  const bool never_seen = !found && !foreign_;
  if (found && !ours) may_hold_ = false;
  if (!ours && !given_back && !never_seen &&
      !SeenToEnd(found ? found->version() : "", found ? found->lives_ms() : foreign_->lives_ms)) {
    if (found) state.holder = HolderOf(found->holder());
    state.last_primary = last_primary_;
    state.last_epoch = last_epoch_;
    return state;
  }
  if (!found) {
    found.emplace(where_.space, where_.name);
    if (last_epoch_ != 0) found->Announce(last_epoch_, last_primary_);
  }
  found->Hold(identity_, options_.ttl_ms, absl::Now());
  may_hold_ = true;
  const TimeNs begin = clock_->Now();
  GW_ASSIGN_OR_RETURN(const LeaseObject written, Put(*found, give_up));
  if (written.holder() != identity_)
    return absl::DataLossError("Kubernetes answers with another lease than was written");
  foreign_.reset();
  state.held = true;
  state.until = begin + options_.ttl_ms * kNsPerTtlMs;
  state.holder = options_.holder;
  state.last_primary = last_primary_;
  state.last_epoch = last_epoch_;
  return state;
}

bool KubernetesLease::SeenToEnd(const std::string& version, int64_t lives_ms) {
  const TimeNs now = clock_->Now();
  if (!foreign_ || foreign_->version != version) {
    foreign_ = Foreign{version, std::max(lives_ms, options_.ttl_ms), now};
  }
  return now - foreign_->since > foreign_->lives_ms * kNsPerTtlMs;
}

absl::Status KubernetesLease::Announce(uint64_t epoch) {
  const TimeNs give_up = GiveUp();
  absl::Status status;
  for (int tried = 0; tried < kTries; ++tried) {
    status = AnnounceOnce(give_up, epoch);
    if (!absl::IsAlreadyExists(status)) break;
  }
  return status;
}

absl::Status KubernetesLease::AnnounceOnce(TimeNs give_up, uint64_t epoch) {
  GW_ASSIGN_OR_RETURN(std::optional<LeaseObject> found, Get(give_up));
  if (!found || found->holder() != identity_) return absl::AbortedError("the lease is not held any more");
  found->Announce(epoch, options_.holder);
  return Put(*found, give_up).status();
}

void KubernetesLease::Release() {
  if (!std::exchange(may_hold_, false)) return;
  const TimeNs give_up = GiveUp();
  // Where it fails the lease ends by itself.
  for (int tried = 0; tried < kTries && absl::IsAlreadyExists(ReleaseOnce(give_up)); ++tried) {
  }
}

absl::Status KubernetesLease::ReleaseOnce(TimeNs give_up) {
  GW_ASSIGN_OR_RETURN(std::optional<LeaseObject> found, Get(give_up));
  if (!found || found->holder() != identity_) return absl::OkStatus();
  found->GiveBack(absl::Now());
  return Put(*found, give_up).status();
}

absl::StatusOr<std::optional<LeaseObject>> KubernetesLease::Get(TimeNs give_up) {
  GW_ASSIGN_OR_RETURN(const HttpsReply reply, Call("GET", absl::StrCat(objects_, "/", where_.name), "", give_up));
  if (reply.status == kNotFound) return std::optional<LeaseObject>();
  if (reply.status != kOk) return Refusal(reply, "get");
  GW_ASSIGN_OR_RETURN(LeaseObject object, LeaseObject::Parse(reply.body));
  last_primary_ = object.last_primary();
  last_epoch_ = object.last_epoch();
  return std::optional<LeaseObject>(std::move(object));
}

absl::StatusOr<LeaseObject> KubernetesLease::Put(const LeaseObject& object, TimeNs give_up) {
  const bool make = object.version().empty();
  GW_ASSIGN_OR_RETURN(const HttpsReply reply,
                      make ? Call("POST", objects_, object.Serialize(), give_up)
                           : Call("PUT", absl::StrCat(objects_, "/", where_.name), object.Serialize(), give_up));
  // One that was removed since we read it is looked for again too.
  if (reply.status == kConflict || (!make && reply.status == kNotFound)) {
    return absl::AlreadyExistsError("other servers change the lease all the time");
  }
  if (reply.status != kOk && reply.status != kCreated) return Refusal(reply, make ? "create" : "update");
  GW_ASSIGN_OR_RETURN(LeaseObject written, LeaseObject::Parse(reply.body));
  last_primary_ = written.last_primary();
  last_epoch_ = written.last_epoch();
  return written;
}

absl::StatusOr<HttpsReply> KubernetesLease::Call(const char* method, const std::string& target, std::string body,
                                                 TimeNs give_up) {
  const TimeNs now = clock_->Now();
  if (now < not_before_) return absl::UnavailableError("Kubernetes is overloaded and wants no requests for now");
  const int64_t timeout_ms = std::min(options_.ttl_ms / kCallsPerTtl, (give_up - now) / kNsPerTtlMs);
  if (timeout_ms <= 0) return absl::DeadlineExceededError("Kubernetes answers too slowly");
  GW_ASSIGN_OR_RETURN(std::string token, ReadToken(where_.token_file));
  GW_ASSIGN_OR_RETURN(HttpsReply reply, client_.Call({method, target, std::move(token), std::move(body)}, timeout_ms));
  if (reply.status == kTooManyRequests && reply.retry_after_s > 0) {
    // Never so long that a lease could not be renewed any more because of one answer.
    const int64_t wait_ms = std::min(reply.retry_after_s, options_.ttl_ms) * kMsPerRetrySecond;
    not_before_ = clock_->Now() + std::min(wait_ms, options_.ttl_ms / kCallsPerTtl) * kNsPerTtlMs;
  }
  return reply;
}

absl::Status KubernetesLease::Refusal(const HttpsReply& reply, const char* verb) const {
  const std::string said = absl::StrFormat("Kubernetes refuses to %s lease '%s' of namespace '%s' (%d): %s", verb,
                                           where_.name, where_.space, reply.status, SaidIn(reply.body));
  if (reply.status == kUnauthorized) {
    return absl::UnauthenticatedError(absl::StrCat(said, "; the token is that of '", where_.token_file, "'"));
  }
  if (reply.status == kForbidden) {
    return absl::PermissionDeniedError(absl::StrCat(
        said, "; the service account needs get, create and update on leases: deploy/kubernetes/lease.yaml"));
  }
  if (reply.status == kNotFound) return absl::NotFoundError(absl::StrCat(said, "; is there such a namespace?"));
  return absl::UnavailableError(said);
}

}  // namespace gradwire
