// One shard of several that takes nothing: the others get their frames at once, and the session can still be left.
#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/integration/client/cluster.h"
#include "tests/lib/tcp_proxy.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire::testing {
namespace {

using testing_support::TcpProxy;

constexpr char kJob[] = "slow-shard";
constexpr absl::Duration kHangs = absl::Seconds(120);  // what takes that long never comes

// Per shard more than the session, the transport, the kernel and the proxy hold together.
v1::JobSpec Spec() {
  v1::JobSpec spec;
  spec.set_name(kJob);
  for (int t = 0; t < 12; ++t) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("t", t));
    tensor->add_shape((2 << 20) + t);
  }
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.mutable_optimizer()->add_groups();
  spec.set_codec("dense:fp32");
  spec.set_min_workers(1);
  spec.set_max_workers(1);
  spec.set_lease_ms(300'000);
  return spec;
}

class SlowShard : public ::testing::TestWithParam<std::string> {
 protected:
  static constexpr uint32_t kSlow = 0;  // the first that a bucket is encoded for
  static constexpr uint32_t kFast = 1;
  static constexpr uint64_t kCutRound = 3;  // the first step is rounds 0 and 1

  uint64_t PushedTo(uint32_t shard) { return cluster_.Describe(shard, kJob).push_bytes(); }
  // A round whose frames do not reach the slow shard has reached the other one.
  void PushPastTheSlowShard(TraceOptions trace = {}) {
    SessionOptions options = worker_.Options({proxy_.address(), cluster_.addresses()[kFast]});
    options.encode_threads = 2;
    options.timeouts.rpc_ms = 2'000;  // leaving asks the slow shard, too
    options.trace = std::move(trace);
    ASSERT_EQ(worker_.JoinWith(std::move(options)), absl::OkStatus());
    ASSERT_EQ(worker_.Step(0.1f), absl::OkStatus());
    const uint64_t before = PushedTo(kFast);
    ASSERT_EQ(worker_.Step(0.1f), absl::OkStatus());
    const uint64_t of_round = PushedTo(kFast) - before;
    ASSERT_GT(of_round, 32u << 20);
    proxy_.Cut();
    slow_before_ = PushedTo(kSlow);
    ASSERT_EQ(worker_.session().BeginRound({{0.1f}}), absl::OkStatus());
    for (uint32_t t = 0; t < worker_.gradients().size(); ++t)
      ASSERT_EQ(worker_.session().TensorReady(t, worker_.gradients()[t].data()), absl::OkStatus());
    const absl::Time hangs = absl::Now() + kHangs;
    while (PushedTo(kFast) < before + 2 * of_round && absl::Now() < hangs) absl::SleepFor(absl::Milliseconds(2));
    EXPECT_EQ(PushedTo(kFast), before + 2 * of_round);
    EXPECT_LE(PushedTo(kSlow), slow_before_ + TcpProxy::kBufferBytes);
    EXPECT_TRUE(absl::IsDeadlineExceeded(worker_.session().EndRound(0))) << "a round needs every shard";
  }

  // When slices for `shard` were encoded in the cut round, in microseconds; once another step is over.
  std::vector<double> EncodedAt(uint32_t shard) const {
    std::vector<double> at;
    const nlohmann::json trace = nlohmann::json::parse(std::ifstream(trace_));
    for (const nlohmann::json& event : trace.at("traceEvents"))
      if (event.value("name", "") == "encode" && event.at("args").at("shard") == shard) at.push_back(event.at("ts"));
    std::sort(at.begin(), at.end());
    return at;
  }

  const testing_support::TemporaryFolder folder_{"slow-shard"};
  const std::string trace_ = folder_.path() + "/trace.json";
  Cluster cluster_{2, GetParam()};
  TcpProxy proxy_{cluster_.addresses()[kSlow]};
  Worker worker_{Spec(), 0};
  uint64_t slow_before_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Transports, SlowShard, ::testing::Values("grpc", "tcp"),
                         [](const auto& info) { return info.param; });

TEST_P(SlowShard, HoldsNoOtherAndTheRoundEndsWhenItTakes) {
  constexpr absl::Duration kPause = absl::Seconds(1);
  ASSERT_NO_FATAL_FAILURE(PushPastTheSlowShard({trace_, kCutRound}));
  absl::SleepFor(kPause);
  proxy_.Heal();
  EXPECT_EQ(worker_.session().EndRound(), absl::OkStatus());
  EXPECT_EQ(worker_.session().ShardDigests()[kSlow], cluster_.ParametersSha256(kSlow, kJob));
  // What waits for a shard is bounded: the rest of its frames is made when it takes them.
  ASSERT_EQ(worker_.Step(0.1f), absl::OkStatus());  // ends the trace
  const std::vector<double> fast = EncodedAt(kFast), slow = EncodedAt(kSlow);
  ASSERT_GE(std::min(fast.size(), slow.size()), 8u);
  const double healed = fast.back() + absl::ToDoubleMicroseconds(kPause) / 2;
  const auto made_later = slow.end() - std::upper_bound(slow.begin(), slow.end(), healed);
  EXPECT_GE(made_later, static_cast<long>(slow.size()) / 4) << "of " << slow.size();
}

TEST_P(SlowShard, CanBeLeft) {
  ASSERT_NO_FATAL_FAILURE(PushPastTheSlowShard());
  worker_.Drop();
}

}  // namespace
}  // namespace gradwire::testing
