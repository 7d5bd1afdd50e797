// The times of a Follow stream, the same at both ends.
#pragma once

#include <cstdint>

#include "common/base/clock.h"

namespace gradwire {

// So many signs of life fit into the time after which silence is a loss.
inline constexpr int64_t kBeatsPerTimeout = 10;

inline TimeNs NsOfMs(int64_t ms) { return ms * 1'000'000; }

}  // namespace gradwire
