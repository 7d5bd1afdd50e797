// How scarce cores are, as the kernel accounts for it.
#pragma once

#include <optional>

#include "common/base/clock.h"

namespace gradwire {

// For how long the calling thread has been ready to run while another had the core (or its group had used up its
// quota), since it began. Nothing: the kernel does not say. Takes a few microseconds.
std::optional<TimeNs> RunDelayOfThisThread();

}  // namespace gradwire
