// One Pull stream; see pull_sink.h.
#include "server/services/pull_sink.h"

#include <utility>

#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"

namespace gradwire {

void PullSink::OnMessage(transport::Message message) {
  if (over_) return;
  const absl::Status status = CatchBadAlloc("a pull stream", [&] { return Handle(message); });
  if (status.ok()) return;
  over_ = true;
  out_->Finish(status);
  registry_->WarnRefused("pull stream", status);
}

absl::Status PullSink::Handle(const transport::Message& message) {
  v1::PullRequest request;
  if (!request.ParseFromString(message.control)) return absl::InvalidArgumentError("not a gradwire.v1.PullRequest");
  if (job_ == nullptr) {
    if (!request.has_open()) {
      return absl::InvalidArgumentError(
          "the first message of a Pull stream must carry `open` with the worker's identity");
    }
    GW_ASSIGN_OR_RETURN(std::shared_ptr<JobShard> job, registry_->Find(request.open().job()));
    GW_ASSIGN_OR_RETURN(member_, job->Attach(request.open(), out_));
    job_ = std::move(job);
  }
  // A message that only opens the stream asks for nothing.
  if (request.kind() == v1::PULL_UNSPECIFIED && request.bucket_end() == 0) return absl::OkStatus();
  return job_->desk().Pull(member_, request, out_);
}

void PullSink::OnClosed(absl::Status status) {
  if (job_ != nullptr) job_->Detach(member_, out_);
  out_->Close();
}

}  // namespace gradwire
