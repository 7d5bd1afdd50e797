// One Push stream; see push_sink.h.
#include "server/services/push_sink.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "common/wire/frame.h"

namespace gradwire {

void PushSink::OnMessage(transport::Message message) {
  if (over_) return;
  const absl::Status status = CatchBadAlloc("a push stream", [&] { return Handle(std::move(message)); });
  if (status.ok()) return;
  over_ = true;
  out_->Finish(status);
  registry_->WarnRefused("push stream", status);
}

absl::Status PushSink::Handle(transport::Message message) {
  v1::PushMessage request;
  if (!request.ParseFromString(message.control)) return absl::InvalidArgumentError("not a gradwire.v1.PushMessage");
  absl::InlinedVector<v1::PullKind, 4> pull;
  for (int kind : request.pull()) {
    if (std::find(pull.begin(), pull.end(), kind) != pull.end()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("a frame asks %d times for answers, and for kind %d more than once: ask once for each kind",
                          request.pull_size(), kind));
    }
    pull.push_back(static_cast<v1::PullKind>(kind));
    if (pull.size() > v1::PullKind_ARRAYSIZE) break;  // more than there are: refused as unknown ones
  }
  if (job_ == nullptr) GW_RETURN_IF_ERROR(Open(request));
  if (message.frame.empty()) return absl::OkStatus();
  GW_ASSIGN_OR_RETURN(const std::optional<v1::PushAck> ack, job_->intake().Take(stream_, message.frame));
  if (!ack) return absl::OkStatus();
  GW_FAILPOINT("push.before_ack");
  return job_->desk().AcknowledgeFrame(stream_.member, *ack, pull, out_);
}

absl::Status PushSink::Open(const v1::PushMessage& request) {
  if (!request.has_open()) {
    return absl::InvalidArgumentError(
        "the first message of a Push stream must carry `open` with the worker's identity");
  }
  GW_ASSIGN_OR_RETURN(std::shared_ptr<JobShard> job, registry_->Find(request.open().job()));
  GW_ASSIGN_OR_RETURN(stream_.member, job->Attach(request.open(), out_));
  stream_.incarnation = request.open().incarnation();
  stream_.worker = request.open().worker();
  stream_.out = out_;
  job_ = std::move(job);
  return absl::OkStatus();
}

void PushSink::OnClosed(absl::Status status) {
  if (job_ != nullptr) {
    job_->intake().AbandonStream(stream_);
    job_->Detach(stream_.member, out_);
  }
  out_->Close();
}

}  // namespace gradwire
