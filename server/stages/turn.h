// Where a job's shards agree on each round, one round at a time is finished; later ones that have closed wait here.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/stages/stage.h"

namespace gradwire {

// Thread-safe; its mutex is innermost. Bounded by the rounds that may be open.
class Turn final : public Stage {
 public:
  explicit Turn(Stage* next) : next_(*next) {}

  void Pass(ClosedBucket&& closed) override {
    {
      absl::MutexLock lock(&mu_);
      if (closed.close.round > round_) {
        waiting_[closed.close.round].push_back(std::move(closed));
        return;
      }
    }
    next_.Pass(std::move(closed));
  }

  // The rounds before `round` are through: passes on the buckets of `round` that wait.
  void Begin(uint64_t round) {
    std::vector<ClosedBucket> its;
    {
      absl::MutexLock lock(&mu_);
      round_ = round;
      if (auto node = waiting_.extract(round)) its = std::move(node.mapped());
    }
    for (ClosedBucket& closed : its) next_.Pass(std::move(closed));
  }

 private:
  Stage& next_;
  absl::Mutex mu_;
  uint64_t round_ ABSL_GUARDED_BY(mu_) = 1;  // round 0 calibrates: there is nothing to agree on
  std::map<uint64_t, std::vector<ClosedBucket>> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire
