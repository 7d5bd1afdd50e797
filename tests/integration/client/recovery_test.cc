// Shard servers are killed with SIGKILL while workers train; the sessions go on, to the very digest of an undisturbed
// run.
#include <chrono>
#include <limits>
#include <random>

#include "tests/integration/client/cluster.h"
#include "tests/integration/client/server_processes.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire::testing {
namespace {

using testing_support::TemporaryFolder;

constexpr int kWorkers = 2;
constexpr uint64_t kSteps = 60;
constexpr int kMaxKills = 40;

// Trains to version `steps` + 1 (round 0 calibrates); returns the digest that all workers agree on.
std::string Train(const v1::JobSpec& spec, const std::vector<std::string>& servers, PullMode pull, uint64_t steps) {
  const int workers = static_cast<int>(spec.min_workers());
  std::vector<std::string> digests(workers);
  InParallel(workers, [&](int w) {
    Worker worker(spec, w);
    const absl::Status joined = worker.Join(servers, pull);
    ASSERT_TRUE(joined.ok()) << joined;
    // With bounded staleness parameters are those of a time: only gradients that do not depend on them come again.
    const bool bounded = spec.rounds().mode() == v1::ROUNDS_BOUNDED;
    for (uint64_t step = 0; step < steps; ++step) {
      if (bounded) {
        worker.FillApart(step);
      } else {
        workers > kWorkers ? worker.FillMixed(step) : worker.Fill(step);
      }
      const bool bad = spec.nonfinite() == v1::NONFINITE_SKIP && step % 5 == 3 && w == static_cast<int>(step % 2);
      if (bad) worker.gradients()[5][0] = std::numeric_limits<float>::infinity();  // a scalar: on one shard
      const absl::Status stepped = worker.Step(0.01f);
      ASSERT_TRUE(stepped.ok()) << "worker " << w << " step " << step << ": " << stepped;
    }
    ASSERT_TRUE(worker.session().Drain().ok());
    EXPECT_EQ(worker.session().stats().not_included_frames, 0u);
    const uint64_t skipped = spec.nonfinite() == v1::NONFINITE_SKIP ? steps / 5 : 0;
    EXPECT_EQ(worker.session().stats().nonfinite_rounds, skipped);
    digests[w] = worker.session().Digest();
  });
  for (const std::string& digest : digests) EXPECT_EQ(digest, digests[0]);
  return digests[0];
}

struct Case {
  const char* codec;
  v1::OptimizerKind optimizer;
  PullMode pull;
  v1::DurabilityLevel level;
  bool small;
  uint32_t staleness = 0;
  const char* update_codec = "";
  bool skips = false;
  uint32_t workers = kWorkers;  // of more, gradients are FillMixed's
};

class KilledServers : public ::testing::TestWithParam<Case> {};

TEST_P(KilledServers, LeaveNoTraceInTheDigest) {
  const Case& c = GetParam();
  v1::JobSpec spec = MakeSpec("killed", c.codec, c.optimizer, c.workers);
  if (c.small) spec = Small(std::move(spec));
  spec.set_update_codec(c.update_codec);
  spec.set_lease_ms(10'000);
  if (c.skips) spec.set_nonfinite(v1::NONFINITE_SKIP);
  if (c.staleness > 0) {
    spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
    spec.mutable_rounds()->set_staleness(c.staleness);
  }
  std::string expected;
  {
    Cluster undisturbed(2, "inproc");
    expected = Train(OfLists(spec), undisturbed.addresses(), c.pull, kSteps);
  }
  spec.mutable_durability()->set_level(c.level);
  const TemporaryFolder folder("killed-servers");
  ServerProcesses servers({folder.path() + "/0", folder.path() + "/1"});
  std::atomic<bool> done{false};
  int kills = 0;
  std::thread killer([&] { kills = servers.KillUntil(done, kMaxKills); });
  const std::string digest = Train(spec, servers.addresses(), c.pull, kSteps);
  done = true;
  killer.join();
  EXPECT_EQ(digest, expected);
  EXPECT_GE(kills, 3);
  std::printf("%d servers killed\n", kills);
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, KilledServers,
    ::testing::Values(
        Case{"dense:values=fp32", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, v1::DURABILITY_FSYNC, false},
        Case{"tagc:density=0.05,bits=2", v1::OPTIMIZER_STEP, PullMode::kUpdate, v1::DURABILITY_FSYNC, false},
        Case{"tagc:density=0.05,form=sketch,slack=4", v1::OPTIMIZER_STEP, PullMode::kParams, v1::DURABILITY_INTERVAL,
             true},
        Case{"tagc:density=0.02,form=sketch,slack=4", v1::OPTIMIZER_STEP, PullMode::kUpdate, v1::DURABILITY_FSYNC,
             false},
        // Frames of a sketch and lists.
        Case{"tagc:density=0.02,form=sketch,slack=4", v1::OPTIMIZER_STEP, PullMode::kUpdate, v1::DURABILITY_FSYNC,
             false, 0, "", false, 16},
        Case{"tagc:density=0.02,form=sketch,slack=4", v1::OPTIMIZER_ADAMW, PullMode::kParams, v1::DURABILITY_INTERVAL,
             true, 0, "", false, 9},
        Case{"dense:values=fixed16", v1::OPTIMIZER_NONE, PullMode::kMean, v1::DURABILITY_INTERVAL, true},
        // Two rounds a step.
        Case{"powersgd:rank=2", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, v1::DURABILITY_FSYNC, false},
        Case{"powersgd:rank=2", v1::OPTIMIZER_LANS, PullMode::kParams, v1::DURABILITY_INTERVAL, true},
        Case{"powersgd:rank=2", v1::OPTIMIZER_NONE, PullMode::kMean, v1::DURABILITY_INTERVAL, true},
        Case{"dense:values=fp32", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, v1::DURABILITY_FSYNC, false, 3},
        Case{"dense:values=fp32", v1::OPTIMIZER_SGD, PullMode::kUpdate, v1::DURABILITY_INTERVAL, true, 2},
        Case{"topk:density=0.05,values=fp16", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, v1::DURABILITY_FSYNC, false, 0,
             "topk:density=0.02,values=fp16"},
        Case{"topk:density=0.05,values=int8", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, v1::DURABILITY_INTERVAL, true, 0,
             "union:values=int4"},
        Case{"onebit", v1::OPTIMIZER_NONE, PullMode::kMean, v1::DURABILITY_INTERVAL, true, 0, "onebit"},
        Case{"dense:values=fp32", v1::OPTIMIZER_SGD, PullMode::kUpdate, v1::DURABILITY_INTERVAL, true, 2,
             "qsgd:bits=4"},
        // CLAN: norms of what is left after two-way compression.
        Case{"topk:density=0.05", v1::OPTIMIZER_LANS, PullMode::kUpdate, v1::DURABILITY_FSYNC, false, 0,
             "topk:density=0.02,values=fp16"},
        // Shards exchange norms, with updates that may be written on one of them only.
        Case{"dense:values=fp32", v1::OPTIMIZER_LAMB, PullMode::kUpdate, v1::DURABILITY_FSYNC, false},
        Case{"tagc:density=0.05", v1::OPTIMIZER_LANS, PullMode::kParams, v1::DURABILITY_INTERVAL, true},
        Case{"dense:values=fp32", v1::OPTIMIZER_LANS, PullMode::kUpdate, v1::DURABILITY_FSYNC, true, 2},
        // Every fifth round is skipped, as one shard or both find out.
        Case{"dense:values=fp32", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, v1::DURABILITY_FSYNC, false, 0, "", true},
        Case{"tagc:density=0.05", v1::OPTIMIZER_STEP, PullMode::kParams, v1::DURABILITY_INTERVAL, true, 0, "", true},
        Case{"topk:density=0.05", v1::OPTIMIZER_LANS, PullMode::kUpdate, v1::DURABILITY_FSYNC, false, 0,
             "topk:density=0.02,values=fp16", true},
        Case{"topk:density=0.05,values=int8", v1::OPTIMIZER_SGD, PullMode::kUpdate, v1::DURABILITY_FSYNC, false, 0,
             "union:values=int4", true}));

TEST(KilledServer, WhileAJobStartsDelaysTheStart) {
  constexpr int kStarts = 8;
  const TemporaryFolder folder("killed-starts");
  ServerProcesses servers({folder.path() + "/0", folder.path() + "/1"});
  std::mt19937 random(815);
  for (int n = 0; n < kStarts; ++n) {
    v1::JobSpec spec = MakeSpec(absl::StrCat("start-", n), "dense:values=fp32", v1::OPTIMIZER_SGD, kWorkers);
    spec.mutable_durability()->set_level(n % 2 == 0 ? v1::DURABILITY_FSYNC : v1::DURABILITY_INTERVAL);
    spec.set_lease_ms(10'000);
    std::thread killer([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
      servers.KillOne(random);
    });
    InParallel(kWorkers, [&](int w) {
      Worker worker(spec, w);
      const absl::Status joined = worker.Join(servers.addresses());
      ASSERT_TRUE(joined.ok()) << "start " << n << " worker " << w << ": " << joined;
      EXPECT_EQ(worker.session().start_version(), 0u);
      worker.Fill(0);
      const absl::Status stepped = worker.Step(0.01f);
      ASSERT_TRUE(stepped.ok()) << "start " << n << " worker " << w << ": " << stepped;
    });
    killer.join();
  }
}

TEST(KilledServer, ThatStaysAwayIsLostInTheEnd) {
  v1::JobSpec spec = MakeSpec("away", "dense:values=fp32", v1::OPTIMIZER_SGD, 1);
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  const TemporaryFolder folder("away");
  auto servers = std::make_unique<ServerProcesses>(std::vector<std::string>{folder.path()});
  const std::string address = servers->addresses()[0];
  Worker worker(spec, 0);
  SessionOptions options = worker.Options({address});
  options.timeouts.reconnect_ms = 500;
  auto session = Session::Join(std::move(options));
  ASSERT_TRUE(session.ok()) << session.status();
  servers.reset();
  const std::vector<float> rates = {0.01f};
  std::vector<const float*> gradients;
  for (const auto& gradient : worker.gradients()) gradients.push_back(gradient.data());
  const absl::Status lost = (*session)->Exchange(gradients, rates);
  EXPECT_TRUE(absl::IsUnavailable(lost)) << lost;
  EXPECT_NE(std::string(lost.message()).find(address), std::string::npos) << lost;
}

}  // namespace
}  // namespace gradwire::testing
