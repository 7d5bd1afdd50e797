// See record.h.
#include "server/stages/record.h"

#include "common/base/failpoint.h"
#include "common/base/out_of_memory.h"

namespace gradwire {

void Record::Pass(ClosedBucket&& closed) {
  GW_FAILPOINT("round.before_journal");
  if (closed.status.ok() && log_.journals()) {
    const uint64_t version = closed.close.round + 1;
    {
      absl::MutexLock lock(&closed.bucket->mu);
      closed.bucket->handed = version;
    }
    closed.status = CatchBadAlloc("the journal", [&] {
      log_.Append({journal::RecordType::kUpdate, closed.close.bucket, closed.close.round, closed.who,
                   closed.update.chunks, closed.update.mean},
                  [this, bucket = closed.close.bucket, version] { safe_(bucket, version); });
      return absl::OkStatus();
    });
  }
  next_.Pass(std::move(closed));
}

}  // namespace gradwire
