// What the services say that decide who is primary: Leases of Kubernetes' API server, and answers of etcd.
#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "common/transport/transport.h"
#include "etcd/rpc.pb.h"
#include "server/lease/etcd_lease.h"
#include "server/lease/lease_object.h"
#include "tests/fuzz/targets.h"
#include "tests/lib/manual_clock.h"

namespace gradwire::fuzz {
namespace {

constexpr int64_t kTtlMs = 10'000;
constexpr TimeNs kLeaseNsPerMs = 1'000'000;
constexpr TimeNs kNow = 1'000 * kLeaseNsPerMs;
constexpr char kHolder[] = "me";

// Says one thing and ends.
class SaidStream final : public transport::Stream {
 public:
  SaidStream(std::string text, transport::StreamSink* sink) : text_(std::move(text)), sink_(sink) {}
  absl::Status Send(transport::Message) override {
    sink_->OnMessage({text_, {}});
    sink_->OnClosed(absl::OkStatus());
    return absl::OkStatus();
  }
  void Finish(absl::Status) override {}
  void Cancel() override {}

 private:
  const std::string text_;
  transport::StreamSink* const sink_;
};

// Gives answers that were made before, in order, then none.
class SaidChannel final : public transport::Channel {
 public:
  explicit SaidChannel(std::deque<std::string> answers) : answers_(std::move(answers)) {}
  absl::StatusOr<std::string> Call(transport::Method, std::string, int64_t) override { return Next(); }
  absl::StatusOr<std::unique_ptr<transport::Stream>> Open(transport::Method, transport::StreamSink* sink) override {
    auto answer = Next();
    if (!answer.ok()) return answer.status();
    return std::make_unique<SaidStream>(*std::move(answer), sink);
  }

 private:
  absl::StatusOr<std::string> Next() {
    if (answers_.empty()) return absl::UnavailableError("nothing more is said");
    std::string answer = std::move(answers_.front());
    answers_.pop_front();
    return answer;
  }
  std::deque<std::string> answers_;
};

std::vector<uint8_t> AnswersOf(const std::vector<std::string>& answers) {
  std::vector<uint8_t> seed;
  for (const std::string& answer : answers) {
    seed.push_back(static_cast<uint8_t>(answer.size()));
    seed.push_back(static_cast<uint8_t>(answer.size() >> 8));
    seed.insert(seed.end(), answer.begin(), answer.end());
  }
  return seed;
}

std::string Granted(int64_t id, int64_t ttl) {
  etcdserverpb::LeaseGrantResponse reply;
  reply.set_id(id);
  reply.set_ttl(ttl);
  return reply.SerializeAsString();
}

std::string KeptAlive(int64_t ttl) {
  etcdserverpb::LeaseKeepAliveResponse reply;
  reply.set_ttl(ttl);
  return reply.SerializeAsString();
}

// Who holds the key (lease 0: nobody), and who was primary last.
std::string Held(bool by_this_call, int64_t lease, const std::string& holder, const std::string& last) {
  etcdserverpb::TxnResponse reply;
  reply.set_succeeded(by_this_call);
  if (by_this_call) reply.add_responses();
  auto& key = *reply.add_responses()->mutable_response_range();
  if (lease != 0) {
    key.add_kvs()->set_lease(lease);
    key.mutable_kvs(0)->set_value(holder);
  }
  auto& primary = *reply.add_responses()->mutable_response_range();
  if (!last.empty()) primary.add_kvs()->set_value(last);
  return reply.SerializeAsString();
}

}  // namespace

// Text.
void RunLeaseObject(Input input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  absl::StatusOr<LeaseObject> object = LeaseObject::Parse(text);
  if (!object.ok()) {
    Require(absl::IsDataLoss(object.status()), "what is no lease is told as such");
    return;
  }
  Require(!object->version().empty() && object->lives_ms() >= 0, "a lease has a version");
  const auto require_same = [](const LeaseObject& a) {
    const absl::StatusOr<LeaseObject> b = LeaseObject::Parse(a.Serialize());
    Require(b.ok() && b->version() == a.version() && b->holder() == a.holder() && b->last_epoch() == a.last_epoch() &&
                b->last_primary() == a.last_primary(),
            "a lease that is written is read");
  };
  require_same(*object);
  object->Hold(kHolder, kTtlMs, absl::UnixEpoch());
  Require(object->holder() == kHolder, "it is held by whom it says");
  require_same(*object);
  object->Announce(7, kHolder);
  require_same(*object);
  object->GiveBack(absl::UnixEpoch());
  Require(object->holder().empty(), "it is given back");
  require_same(*object);
}

Seeds LeaseObjectSeeds() {
  Seeds seeds;
  for (const std::string_view text : {
           R"({"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"s","resourceVersion":"7",)"
           R"("annotations":{"gradwire.io/epoch":"4294967297","gradwire.io/primary":"a"}},"spec":{"holderIdentity":)"
           R"("a_0123","leaseDurationSeconds":10,"renewTime":"2024-01-01T00:00:00.000000Z","leaseTransitions":3}})",
           R"({"kind":"Lease","metadata":{"resourceVersion":"1","annotations":null},"spec":null})",
           R"({"kind":"Lease","metadata":{"resourceVersion":"1"},"spec":{"leaseTransitions":2147483647}})",
           R"({"kind":"Status","status":"Failure","message":"no","code":404})",
       }) {
    seeds.emplace_back(text.begin(), text.end());
  }
  std::string deep = R"({"kind":"Lease","metadata":{"resourceVersion":"1","x":)";
  deep.append(100'000, '[');
  deep.append(100'000, ']');
  deep += "}}";
  seeds.emplace_back(deep.begin(), deep.end());
  return seeds;
}

// Answers, one behind the other: u16 size, bytes.
void RunEtcd(Input input) {
  std::deque<std::string> answers;
  for (Reader reader(input); !reader.rest().empty();) {
    const size_t size = reader.Take<uint16_t>();
    const Input rest = reader.rest().first(std::min<size_t>(size, reader.rest().size()));
    answers.emplace_back(rest.begin(), rest.end());
    reader = Reader(reader.rest().subspan(rest.size()));
  }
  testing_support::ManualClock clock(kNow);
  EtcdLease lease(std::make_shared<SaidChannel>(std::move(answers)), "/key", {kHolder, kTtlMs}, &clock);
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<Lease::State> state = lease.Hold();
    if (!state.ok()) continue;
    Require(state->until <= kNow + kTtlMs * kLeaseNsPerMs, "nobody holds the lease for longer than it lives");
    Require(!state->held || state->until >= kNow, "whoever holds it has it for now");
    Require(state->last_epoch == 0 || !state->last_primary.empty(), "who was primary last has a name");
    if (state->held) lease.Announce(9).IgnoreError();
  }
}

Seeds EtcdSeeds() {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  const std::string announced = Held(true, 0, "", "");
  return {
      AnswersOf(
          {Granted(5, 10), Held(true, 5, kHolder, ""), announced, KeptAlive(10), Held(false, 5, kHolder, "9 me")}),
      AnswersOf({Granted(5, 10), Held(false, 6, "other", "4294967297 other"), KeptAlive(0), Granted(8, 3),
                 Held(false, 0, "", "no")}),
      AnswersOf({Granted(5, kLargest), Held(true, 5, kHolder, ""), announced, KeptAlive(-kLargest),
                 Granted(5, -kLargest), Held(true, 5, kHolder, "")}),
      AnswersOf({Granted(0, 10), Held(true, 0, "", "x"), Held(false, 0, "", "")}),
  };
}

}  // namespace gradwire::fuzz
