// Which codecs a shard may compress the mean with on its way back (two-way compression, proto/TWO_WAY.md).
#pragma once

#include "absl/status/status.h"
#include "common/job/codec_spec.h"
#include "common/job/job.h"

namespace gradwire {

// InvalidArgument, saying why and what to use instead, for a codec that cannot be an update codec.
absl::Status CheckUpdateCodec(const CodecSpec& spec);
// InvalidArgument for a codec that can be nothing but an update codec.
absl::Status CheckPushCodec(const CodecSpec& spec);

// Whether what the update codec of Job::codecs()[codec] drops is kept on the shard for the next round. False as well
// where there is no update codec.
bool KeepsUpdateResidual(const Job& job, uint32_t codec);
// Whether updates by it have the elements of the mean that are not 0, all of them and no others.
bool SendsElementsOfMean(const Job& job, uint32_t codec);

}  // namespace gradwire
