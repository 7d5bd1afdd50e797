// Shard servers of an asynchronous job are killed with SIGKILL while workers push: what comes back has every frame that
// was acknowledged as merged once, and nothing twice.
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <random>

#include "absl/synchronization/blocking_counter.h"
#include "tests/integration/client/async_jobs.h"
#include "tests/lib/server_process.h"

namespace gradwire::testing {
namespace {

using testing_support::ServerProcess;

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
  const std::string root = absl::StrCat(::testing::TempDir(), "/killed-async-", getpid());
  std::filesystem::remove_all(root);
  std::filesystem::create_directory(root);
  std::vector<std::unique_ptr<ServerProcess>> servers;
  std::vector<std::string> addresses;
  for (int s = 0; s < 2; ++s) {
    servers.push_back(std::make_unique<ServerProcess>(
        std::vector<std::string>{"--backend=cpu", "--log-level=error", absl::StrCat("--data-dir=", root, "/", s),
                                 "--snapshot-journal-bytes=2000000"}));
    addresses.push_back(servers.back()->Address());
  }
  std::atomic<bool> done{false};
  int kills = 0;
  absl::BlockingCounter joined_workers(kAsyncWorkers);
  std::thread killer([&] {
    std::mt19937 random(4711);
    joined_workers.Wait();
    while (!done && kills < kMaxAsyncKills) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5 + random() % 60));
      if (done) break;
      servers[random() % 2]->KillAndRestart();
      ++kills;
      for (auto& server : servers) EXPECT_NE(server->Address(), "");
    }
  });
  std::vector<std::unique_ptr<ExactWorker>> workers;
  for (int w = 0; w < kAsyncWorkers; ++w) workers.push_back(std::make_unique<ExactWorker>(spec, w));
  InParallel(kAsyncWorkers, [&](int w) {
    const absl::Status joined = workers[w]->worker().Join(addresses, PullMode::kParams);
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
  ExpectApplied(spec, addresses, workers);
  EXPECT_GE(kills, 3);
  std::printf("%d servers killed\n", kills);
  servers.clear();
  std::filesystem::remove_all(root);
}

INSTANTIATE_TEST_SUITE_P(Jobs, KilledAsyncServers,
                         ::testing::Values(AsyncCase{"dense:values=fp32", v1::DURABILITY_FSYNC, false},
                                           AsyncCase{"dense:values=fp32", v1::DURABILITY_INTERVAL, true},
                                           AsyncCase{"tagc:density=0.3", v1::DURABILITY_FSYNC, false},
                                           AsyncCase{"tagc:density=0.3", v1::DURABILITY_INTERVAL, true}));

}  // namespace
}  // namespace gradwire::testing
