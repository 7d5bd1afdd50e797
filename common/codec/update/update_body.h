// Which segments the body of an update frame consists of.
#pragma once

#include "common/wire/frame.h"

namespace gradwire {

bool IsUpdateBody(wire::SegmentType type);

}  // namespace gradwire
