// Which segments the body of an update frame consists of.
#pragma once

#include "common/job/codec_spec.h"
#include "common/wire/frame.h"

namespace gradwire {

// The segments that it may consist of, and the one that an update codec makes.
bool IsUpdateBody(wire::SegmentType type);
wire::SegmentType UpdateBodyOf(const CodecSpec& update_codec);

}  // namespace gradwire
