// Where every pushed chunk comes in: it is parsed, judged by its header and handed to one of the ways below; what
// became of its frame is acknowledged. Every check of remote bytes ends here in a typed acknowledgement; nothing of a
// refused frame stays merged.
//
//   gradients -> Flow    initial parameters -> InitialUpload    parameters that replace -> ReplacementIntake
#pragma once

#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"
#include "common/base/clock.h"
#include "common/wire/frame.h"
#include "gradwire/v1/worker.pb.h"
#include "server/flow/flow.h"
#include "server/flow/initial_upload.h"
#include "server/flow/push_stream.h"
#include "server/flow/replacement.h"
#include "server/job/job_parts.h"
#include "server/job/warning_limiter.h"

namespace gradwire {

// Thread-safe; a stream is used by one thread at a time.
class Intake {
 public:
  Intake(JobParts* parts, Flow* flow, InitialUpload* upload)
      : parts_(*parts), flow_(*flow), upload_(*upload), replacement_(parts, flow) {}

  // Merges one chunk, which may have arrived in several slices. The acknowledgement comes with the last chunk of a
  // frame, a refusal with the chunk at fault; journaled initial parameters are acknowledged through `stream.out`, once
  // they are as durable as the job asks. An error (bytes that cannot be attributed to any frame) ends the stream.
  absl::StatusOr<std::optional<v1::PushAck>> Take(PushStream& stream, std::span<const Bytes> received);
  // Takes back what a closed push stream left unfinished.
  void AbandonStream(const PushStream& stream);
  // Takes back what all streams of a member that is lost left unfinished; nothing where it is a member again.
  void AbandonMember(MemberId member);
  // Writes to the log how many refusals of each kind were held back from it.
  void WarnOfHeldBack(TimeNs now);

 private:
  using Ack = std::optional<v1::PushAck>;
  absl::Status CheckHeader(const PushStream& stream, const wire::FrameHeader& header) const;
  Ack TakeFrame(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received);
  Ack TakeSkipped(PushStream& stream, const wire::Chunk& chunk, PushStream::Skipped skipped);
  Ack TakeAbstention(PushStream& stream, const wire::FrameHeader& header);
  Ack TakeReplacement(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received);
  // Acknowledges a frame of which a part was merged before; `digest`: over all its chunks.
  Ack TakeRepeat(PushStream& stream, const wire::FrameHeader& header, uint32_t digest);
  // Neither takes nor answers a frame of which the member's later stream has begun to bring the same.
  static Ack Drop(PushStream& stream, const wire::FrameHeader& header);
  Ack AnswerUpload(PushStream& stream, const wire::FrameHeader& header, const InitialUpload::Taken& taken);
  Ack Refuse(PushStream& stream, const wire::FrameHeader& header, const absl::Status& why);
  // `closed`: the round that the frame closed, if it closed one.
  Ack AckOf(PushStream& stream, const wire::FrameHeader& header, PushVerdict verdict,
            std::optional<uint64_t> closed = std::nullopt);

  JobParts& parts_;
  Flow& flow_;
  InitialUpload& upload_;
  ReplacementIntake replacement_;
  WarningLimiter refusals_;
};

}  // namespace gradwire
