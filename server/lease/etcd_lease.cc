// See etcd_lease.h.
#include "server/lease/etcd_lease.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/status_macros.h"
#include "etcd/rpc.pb.h"

namespace gradwire {
namespace {

constexpr int64_t kMsPerLeaseSecond = 1000;
constexpr TimeNs kNsPerLeaseMs = 1'000'000;
constexpr char kLast[] = "/last";

// Waits for the one answer of a stream.
class OneReply final : public transport::StreamSink {
 public:
  void OnMessage(transport::Message message) override { Set(std::move(message.control)); }
  void OnClosed(absl::Status status) override {
    Set(status.ok() ? absl::UnavailableError("etcd ended the stream") : std::move(status));
  }
  absl::StatusOr<std::string> Wait(int64_t timeout_ms) {
    absl::MutexLock lock(&mu_);
    const auto there = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return reply_.has_value(); };
    if (!mu_.AwaitWithTimeout(absl::Condition(&there), absl::Milliseconds(timeout_ms))) {
      return absl::DeadlineExceededError("etcd does not answer");
    }
    return *reply_;
  }

 private:
  void Set(absl::StatusOr<std::string> reply) {
    absl::MutexLock lock(&mu_);
    if (!reply_) reply_ = std::move(reply);
  }
  absl::Mutex mu_;
  std::optional<absl::StatusOr<std::string>> reply_ ABSL_GUARDED_BY(mu_);
};

void SetRange(const std::string& key, etcdserverpb::TxnRequest* txn, bool success) {
  (success ? txn->add_success() : txn->add_failure())->mutable_request_range()->set_key(key);
}

// Of a time to live that etcd tells; at most the longest that it grants.
int64_t LivesMs(int64_t seconds) {
  constexpr int64_t kMaxLeaseSeconds = 9'000'000'000;
  return std::clamp<int64_t>(seconds, 0, kMaxLeaseSeconds) * kMsPerLeaseSecond;
}

// KEY/last: "EPOCH NAME".
void ReadLast(const etcdserverpb::RangeResponse& range, Lease::State* state) {
  if (range.kvs_size() == 0) return;
  const std::vector<std::string> words = absl::StrSplit(range.kvs(0).value(), absl::MaxSplits(' ', 1));
  uint64_t epoch = 0;
  if (words.size() != 2 || words[1].empty() || !absl::SimpleAtoi(words[0], &epoch)) return;
  state->last_epoch = epoch;
  state->last_primary = words[1];
}

}  // namespace

EtcdLease::EtcdLease(std::shared_ptr<transport::Channel> channel, std::string key, LeaseOptions options, Clock* clock)
    : channel_(std::move(channel)),
      key_(std::move(key)),
      last_key_(key_ + kLast),
      options_(std::move(options)),
      clock_(clock) {}

EtcdLease::~EtcdLease() { Release(); }

template <typename Reply, typename Request>
absl::StatusOr<Reply> EtcdLease::Call(const char* method, const Request& request) {
  auto bytes = channel_->Call(method, request.SerializeAsString(), std::max<int64_t>(options_.ttl_ms / 6, 1));
  if (!bytes.ok()) {
    return absl::Status(bytes.status().code(), absl::StrCat("etcd: ", std::string(bytes.status().message())));
  }
  Reply reply;
  if (!reply.ParseFromString(*bytes)) return absl::DataLossError(absl::StrCat("etcd: no answer to ", method));
  return reply;
}

absl::StatusOr<int64_t> EtcdLease::Grant() {
  etcdserverpb::LeaseGrantRequest request;
  request.set_ttl((options_.ttl_ms + kMsPerLeaseSecond - 1) / kMsPerLeaseSecond);
  GW_ASSIGN_OR_RETURN(const auto reply,
                      Call<etcdserverpb::LeaseGrantResponse>("etcdserverpb.Lease/LeaseGrant", request));
  if (!reply.error().empty()) return absl::UnavailableError(absl::StrCat("etcd: ", reply.error()));
  if (reply.id() == 0 || reply.ttl() <= 0) return absl::DataLossError("etcd grants a lease that does not live");
  id_ = reply.id();
  return LivesMs(reply.ttl());
}

absl::StatusOr<int64_t> EtcdLease::KeepAlive() {
  OneReply reply;
  GW_ASSIGN_OR_RETURN(const auto stream, channel_->Open("etcdserverpb.Lease/LeaseKeepAlive", &reply));
  etcdserverpb::LeaseKeepAliveRequest request;
  request.set_id(id_);
  GW_RETURN_IF_ERROR(stream->Send({request.SerializeAsString(), {}}));
  const absl::StatusOr<std::string> bytes = reply.Wait(std::max<int64_t>(options_.ttl_ms / 6, 1));
  stream->Cancel();
  GW_RETURN_IF_ERROR(bytes.status());
  etcdserverpb::LeaseKeepAliveResponse kept;
  if (!kept.ParseFromString(*bytes)) return absl::DataLossError("etcd: no answer to LeaseKeepAlive");
  return LivesMs(kept.ttl());
}

absl::StatusOr<Lease::State> EtcdLease::Hold() {
  const TimeNs begin = clock_->Now();
  int64_t lives_ms = 0;
  if (id_ != 0) {
    GW_ASSIGN_OR_RETURN(lives_ms, KeepAlive());
    if (lives_ms <= 0) id_ = 0;
  }
  if (id_ == 0) {
    GW_ASSIGN_OR_RETURN(lives_ms, Grant());
  }
  etcdserverpb::TxnRequest txn;
  etcdserverpb::Compare& free = *txn.add_compare();
  free.set_target(etcdserverpb::Compare::CREATE);
  free.set_key(key_);
  free.set_create_revision(0);
  etcdserverpb::PutRequest& put = *txn.add_success()->mutable_request_put();
  put.set_key(key_);
  put.set_value(options_.holder);
  put.set_lease(id_);
  SetRange(key_, &txn, true);
  SetRange(last_key_, &txn, true);
  SetRange(key_, &txn, false);
  SetRange(last_key_, &txn, false);
  GW_ASSIGN_OR_RETURN(const auto reply, Call<etcdserverpb::TxnResponse>("etcdserverpb.KV/Txn", txn));
  const int first = reply.succeeded() ? 1 : 0;  // behind the put
  if (reply.responses_size() < first + 2) return absl::DataLossError("etcd: an answer to Txn that is too short");
  const etcdserverpb::RangeResponse& key = reply.responses(first).response_range();
  State state;
  ReadLast(reply.responses(first + 1).response_range(), &state);
  if (key.kvs_size() > 0) {
    state.held = key.kvs(0).lease() == id_;
    state.holder = key.kvs(0).value();
  }
  state.until = begin + std::min(lives_ms, options_.ttl_ms) * kNsPerLeaseMs;
  return state;
}

absl::Status EtcdLease::Announce(uint64_t epoch) {
  etcdserverpb::TxnRequest txn;
  etcdserverpb::Compare& mine = *txn.add_compare();
  mine.set_target(etcdserverpb::Compare::LEASE);
  mine.set_key(key_);
  mine.set_lease(id_);
  etcdserverpb::PutRequest& put = *txn.add_success()->mutable_request_put();
  put.set_key(last_key_);
  put.set_value(absl::StrCat(epoch, " ", options_.holder));
  GW_ASSIGN_OR_RETURN(const auto reply, Call<etcdserverpb::TxnResponse>("etcdserverpb.KV/Txn", txn));
  return reply.succeeded() ? absl::OkStatus() : absl::AbortedError("the lease is not held any more");
}

void EtcdLease::Release() {
  if (id_ == 0) return;
  etcdserverpb::LeaseRevokeRequest request;
  request.set_id(std::exchange(id_, 0));
  // Where it fails the lease ends by itself.
  channel_
      ->Call("etcdserverpb.Lease/LeaseRevoke", request.SerializeAsString(), std::max<int64_t>(options_.ttl_ms / 6, 1))
      .status()
      .IgnoreError();
}

}  // namespace gradwire
