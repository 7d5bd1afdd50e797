// Shard servers die while workers train, their standbys are promoted, and the sessions, which know both addresses, go
// on to the very digest of an undisturbed run.
#include <unistd.h>

#include <limits>

#include "gradwire/v1/operator.pb.h"
#include "tests/integration/client/cluster.h"
#include "tests/lib/server_process.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire::testing {
namespace {

using testing_support::ServerProcess;

constexpr int kWorkers = 2;
constexpr uint64_t kSteps = 40;

struct Case {
  const char* codec;
  v1::OptimizerKind optimizer;
  PullMode pull;
  v1::DurabilityLevel level;
  const char* update_codec = "";
  bool skips = false;           // every fifth round
  uint32_t workers = kWorkers;  // of more, gradients are FillMixed's
};

class PromotedStandbys : public ::testing::TestWithParam<Case> {
 protected:
  static constexpr int kShards = 2;

  // A shard server, and a standby that it may get; each has a directory of its own.
  struct Pair {
    std::unique_ptr<ServerProcess> primary, standby;
    std::string names;
  };

  std::unique_ptr<ServerProcess> Spawn(const std::string& directory, const std::string& follow) {
    std::vector<std::string> flags = {"--backend=cpu", "--log-level=error",
                                      absl::StrCat("--data-dir=", root_.path(), "/", directory)};
    if (!follow.empty()) flags.push_back("--follow=" + follow);
    return std::make_unique<ServerProcess>(flags);
  }
  template <typename Reply, typename Request>
  absl::StatusOr<Reply> Ask(const std::string& address, const char* method, const Request& request) {
    const auto channel = transport::Dial(address);
    auto bytes = (*channel)->Call(absl::StrCat("gradwire.v1.Operator/", method), request.SerializeAsString(), 10'000);
    if (!bytes.ok()) return bytes.status();
    Reply reply;
    EXPECT_TRUE(reply.ParseFromString(*bytes));
    return reply;
  }
  // Until it is in sync.
  void Promote(const std::string& address) {
    absl::Status said;
    for (int tries = 0; tries < 2000; ++tries) {
      said = Ask<v1::PromoteReply>(address, "Promote", v1::PromoteRequest()).status();
      if (said.ok()) return;
      usleep(10'000);
    }
    ADD_FAILURE() << said;
  }
  // Waits until the standby of `address` is waited for.
  void AwaitInSync(const std::string& address) {
    v1::DescribeJobRequest request;
    request.set_job("promoted");
    for (int tries = 0; tries < 2000; ++tries) {
      const auto status = Ask<v1::JobStatus>(address, "DescribeJob", request);
      if (status.ok() && status->followers_size() == 1 && status->followers(0).in_sync()) return;
      usleep(10'000);
    }
    ADD_FAILURE() << "the standby of " << address << " did not come into sync";
  }

  // Returns the digest that all workers agree on. `disturb(step)` is called before worker 0's steps.
  std::string Train(const v1::JobSpec& spec, const std::vector<std::string>& servers, PullMode pull,
                    const std::function<void(uint64_t)>& disturb) {
    const int workers = static_cast<int>(spec.min_workers());
    std::vector<std::string> digests(workers);
    InParallel(workers, [&](int w) {
      Worker worker(spec, w);
      const absl::Status joined = worker.Join(servers, pull);
      ASSERT_TRUE(joined.ok()) << joined;
      for (uint64_t step = 0; step < kSteps; ++step) {
        workers > kWorkers ? worker.FillMixed(step) : worker.Fill(step);
        const bool bad = spec.nonfinite() == v1::NONFINITE_SKIP && step % 5 == 3 && w == static_cast<int>(step % 2);
        if (bad) worker.gradients()[5][0] = std::numeric_limits<float>::quiet_NaN();
        if (w == 0) disturb(step);
        const absl::Status stepped = worker.Step(0.01f);
        ASSERT_TRUE(stepped.ok()) << "worker " << w << " step " << step << ": " << stepped;
      }
      EXPECT_EQ(worker.session().stats().not_included_frames, 0u);
      digests[w] = worker.session().Digest();
    });
    for (const std::string& digest : digests) EXPECT_EQ(digest, digests[0]);
    return digests[0];
  }

  const testing_support::TemporaryFolder root_{"promoted"};
  Pair pairs_[kShards];
};

TEST_P(PromotedStandbys, LeaveNoTraceInTheDigest) {
  const Case& c = GetParam();
  v1::JobSpec spec = MakeSpec("promoted", c.codec, c.optimizer, c.workers);
  spec.set_update_codec(c.update_codec);
  spec.set_lease_ms(10'000);
  if (c.skips) spec.set_nonfinite(v1::NONFINITE_SKIP);
  std::string expected;
  {
    Cluster undisturbed(kShards, "inproc");
    expected = Train(OfLists(spec), undisturbed.addresses(), c.pull, [](uint64_t) {});
  }
  spec.mutable_durability()->set_level(c.level);
  std::vector<std::string> addresses;
  for (int s = 0; s < kShards; ++s) {
    Pair& pair = pairs_[s];
    pair.primary = Spawn(absl::StrCat(s, "-a"), "");
    const std::string primary = pair.primary->Address();
    pair.standby = Spawn(absl::StrCat(s, "-b"), primary);
    addresses.push_back(absl::StrCat(primary, "|", pair.standby->Address()));
  }
  const std::string digest = Train(spec, addresses, c.pull, [this](uint64_t step) {
    if (step == 10) {  // shard 0: dies
      AwaitInSync(pairs_[0].primary->Address());
      const std::string standby = pairs_[0].standby->Address();
      pairs_[0].primary.reset();
      Promote(standby);
    }
    if (step == 20) {  // shard 1: is replaced while it serves
      Promote(pairs_[1].standby->Address());
    }
    if (step == 30) {  // shard 0: the promoted one dies as well, and comes back as what it was
      pairs_[0].standby->KillAndRestart();
      EXPECT_NE(pairs_[0].standby->Address(), "");
    }
  });
  EXPECT_EQ(digest, expected);
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, PromotedStandbys,
    ::testing::Values(
        Case{"dense:values=fp32", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, v1::DURABILITY_FSYNC},
        Case{"tagc:density=0.05,bits=2", v1::OPTIMIZER_STEP, PullMode::kUpdate, v1::DURABILITY_INTERVAL},
        Case{"tagc:density=0.05,form=sketch,slack=4", v1::OPTIMIZER_ADAMW, PullMode::kParams, v1::DURABILITY_FSYNC},
        // Frames of a sketch and lists.
        Case{"tagc:density=0.02,form=sketch,slack=4", v1::OPTIMIZER_STEP, PullMode::kUpdate, v1::DURABILITY_FSYNC, "",
             false, 9},
        Case{"topk:density=0.05", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, v1::DURABILITY_FSYNC,
             "topk:density=0.02,values=fp16"},
        Case{"tagc:density=0.05", v1::OPTIMIZER_STEP, PullMode::kUpdate, v1::DURABILITY_FSYNC, "union:values=int4"},
        Case{"dense:values=fp32", v1::OPTIMIZER_LANS, PullMode::kUpdate, v1::DURABILITY_FSYNC},
        Case{"tagc:density=0.05", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, v1::DURABILITY_FSYNC, "", true}));

}  // namespace
}  // namespace gradwire::testing
