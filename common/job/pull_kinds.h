// Which pull kinds are answered with an update frame.
#pragma once

#include "gradwire/v1/worker.pb.h"

namespace gradwire {

// An update frame, whole or without its body.
inline bool IsOfUpdate(v1::PullKind kind) { return kind == v1::PULL_UPDATE || kind == v1::PULL_PLAN; }

}  // namespace gradwire
