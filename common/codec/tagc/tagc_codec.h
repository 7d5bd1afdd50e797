// TAGC (arXiv 2504.05638; deviations: ../README.md): the largest values of a bucket as integers in a sketch
// that is merged by addition and decoded exactly, beside an index of where they are. Spec: proto/WIRE.md.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/codec/family.h"

namespace gradwire {

// Errors: InvalidArgument where max_workers leaves no integer range in a cell, or the bucket is too large for 32-bit
// positions.
absl::StatusOr<std::unique_ptr<Codec>> MakeTagcCodec(const CodecContext& context, const TagcSpec& spec);

namespace tagc {
const CodecFamily& Family();
}

}  // namespace gradwire
