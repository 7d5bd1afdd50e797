// Shard servers as processes of their own, which a test kills while workers train.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/lib/server_process.h"

namespace gradwire::testing {

// Not thread-safe; `addresses` never changes. Killed, all of them, when this is destroyed.
class ServerProcesses {
 public:
  // One for each data directory, with `flags` beside it.
  explicit ServerProcesses(const std::vector<std::string>& directories, const std::vector<std::string>& flags = {}) {
    for (const std::string& directory : directories) {
      std::vector<std::string> all = {"--backend=cpu", "--log-level=error", "--data-dir=" + directory};
      all.insert(all.end(), flags.begin(), flags.end());
      processes_.push_back(std::make_unique<testing_support::ServerProcess>(std::move(all)));
    }
    for (const auto& process : processes_) addresses_.push_back(process->Address());
  }

  const std::vector<std::string>& addresses() const { return addresses_; }
  // Any of them; it is back at its address when this returns.
  void KillOne(std::mt19937& random) {
    processes_[random() % processes_.size()]->KillAndRestart();
    for (const auto& process : processes_) EXPECT_NE(process->Address(), "");
  }
  // One after another, wherever the start or the rounds are by then, until `done`. Returns how many, at most `most`.
  int KillUntil(const std::atomic<bool>& done, int most) {
    std::mt19937 random(4711);
    int kills = 0;
    while (!done && kills < most) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5 + random() % 60));
      if (done) break;
      KillOne(random);
      ++kills;
    }
    return kills;
  }

 private:
  std::vector<std::unique_ptr<testing_support::ServerProcess>> processes_;
  std::vector<std::string> addresses_;
};

}  // namespace gradwire::testing
