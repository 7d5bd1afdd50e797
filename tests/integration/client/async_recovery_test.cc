// Shard servers of an asynchronous job are killed with SIGKILL while workers push: what comes back has every frame that
// was acknowledged as merged once, and nothing twice.
#include "absl/synchronization/blocking_counter.h"
#include "tests/integration/client/async_jobs.h"
#include "tests/integration/client/server_processes.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire::testing {
namespace {

using testing_support::TemporaryFolder;

constexpr int kAsyncWorkers = 3;
constexpr int kMaxAsyncKills = 25;

struct AsyncCase {
  const char* codec;
  v1::DurabilityLevel level;
  bool small;
};

class KilledAsyncServers : public ::testing::TestWithParam<AsyncCase> {};

TEST_P(KilledAsyncServers, ApplyExactlyWhatWasPushed) {
  const AsyncCase& c = GetParam();
  v1::JobSpec spec = AsyncSpec("killed", c.codec, kAsyncWorkers);
  if (c.small) spec = Small(std::move(spec));
  spec.set_lease_ms(10'000);
  spec.mutable_durability()->set_level(c.level);
  const TemporaryFolder folder("killed-async");
  ServerProcesses servers({folder.path() + "/0", folder.path() + "/1"}, {"--snapshot-journal-bytes=2000000"});
  std::atomic<bool> done{false};
  int kills = 0;
  absl::BlockingCounter joined_workers(kAsyncWorkers);
  std::thread killer([&] {
    joined_workers.Wait();
    kills = servers.KillUntil(done, kMaxAsyncKills);
  });
  std::vector<std::unique_ptr<ExactWorker>> workers;
  for (int w = 0; w < kAsyncWorkers; ++w) workers.push_back(std::make_unique<ExactWorker>(spec, w));
  InParallel(kAsyncWorkers, [&](int w) {
    const absl::Status joined = workers[w]->worker().Join(servers.addresses(), PullMode::kParams);
    joined_workers.DecrementCount();
    ASSERT_TRUE(joined.ok()) << joined;
    for (int step = 0; step < 40; ++step) {
      const absl::Status stepped = workers[w]->Step();
      ASSERT_TRUE(stepped.ok()) << "worker " << w << " step " << step << ": " << stepped;
    }
    const absl::Status drained = workers[w]->Drain();
    ASSERT_TRUE(drained.ok()) << drained;
  });
  done = true;
  killer.join();
  for (auto& worker : workers) worker->worker().Drop();
  ExpectApplied(spec, servers.addresses(), workers);
  EXPECT_GE(kills, 3);
  std::printf("%d servers killed\n", kills);
}

INSTANTIATE_TEST_SUITE_P(Jobs, KilledAsyncServers,
                         ::testing::Values(AsyncCase{"dense:values=fp32", v1::DURABILITY_FSYNC, false},
                                           AsyncCase{"dense:values=fp32", v1::DURABILITY_INTERVAL, true},
                                           AsyncCase{"tagc:density=0.3", v1::DURABILITY_FSYNC, false},
                                           AsyncCase{"tagc:density=0.3", v1::DURABILITY_INTERVAL, true}));

}  // namespace
}  // namespace gradwire::testing
