// The header that every codec's frames begin with.
#pragma once

#include <cstdint>

#include "common/codec/codec.h"
#include "common/wire/frame.h"

namespace gradwire {

inline wire::FrameHeader HeaderFor(const FrameIdentity& id, wire::FrameKind kind, uint32_t shape_digest) {
  wire::FrameHeader h;
  h.kind = kind;
  h.bucket = id.bucket;
  h.shard = id.shard;
  h.round = id.round;
  h.shape_digest = shape_digest;
  h.incarnation = id.incarnation;
  return h;
}

}  // namespace gradwire
