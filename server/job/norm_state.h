// Of a job whose shards agree before they write, on norms of whole tensors or whether a round is skipped: the round
// that is held until then. job_norms.cc.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/codec/update/update.h"
#include "common/journal/record.h"
#include "common/optimizer/norm_sums.h"
#include "server/job/norm_exchange.h"
#include "server/rounds/rounds.h"

namespace gradwire {

// A bucket that has closed: its update is finished, and nothing of it was written or applied.
struct HeldBucket {
  RoundActions::Close close;
  UpdateFrame frame;
  std::shared_ptr<Update> update;  // frame.decoded
  std::vector<journal::Contribution> who;
  std::vector<double> squares;  // of the phase that comes next: [norm][run of the slice]
  bool nonfinite = false;       // a gradient of it is not finite
};

// A round whose buckets have all closed here, and how far the shards are with it.
struct Agreeing {
  uint64_t round = 0;
  std::vector<HeldBucket> held;
  size_t phase = 0;
  bool offered = false;  // what this shard has of the phase
  bool skipped = false;
};

struct NormState {
  NormState(const Job* job, const Layout* layout, uint32_t shard, std::shared_ptr<Tellers> tellers,
            NormExchange::Written written)
      : sums(layout, job->tensors().size()),
        exchange(job, layout, shard, std::move(tellers), std::move(written), [this] { Wake(); }),
        held(layout->bucket_count()),
        versions(layout->bucket_count()) {}

  // A bucket is held, or another shard has told something.
  void Wake() {
    absl::MutexLock lock(&mu);
    work = true;
  }

  const NormSums sums;
  NormExchange exchange;
  std::optional<Agreeing> agreeing;  // of who pumps

  absl::Mutex mu;                          // innermost
  uint64_t round ABSL_GUARDED_BY(mu) = 1;  // that is held; round 0 needs no norms
  std::vector<std::optional<HeldBucket>> held ABSL_GUARDED_BY(mu);
  std::vector<uint64_t> versions ABSL_GUARDED_BY(mu);  // of buckets that were recovered ahead of the others
  std::map<uint64_t, std::vector<RoundActions::Close>> later ABSL_GUARDED_BY(mu);  // of rounds behind it, by round
  bool work ABSL_GUARDED_BY(mu) = false;  // since it was pumped last
  bool stopped ABSL_GUARDED_BY(mu) = false;
  std::thread thread;
};

}  // namespace gradwire
