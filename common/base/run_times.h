// How scarce cores are, as the kernel accounts for it.
#pragma once

#include <optional>

#include "common/base/clock.h"

namespace gradwire {

// Since a thread began.
struct RunTimes {
  TimeNs ran = 0;      // on a core
  TimeNs delayed = 0;  // ready to run while another had the core, or its group had used up its quota
};

// Of the calling thread. Nothing: the kernel does not say. Takes a few microseconds.
std::optional<RunTimes> RunTimesOfThisThread();

}  // namespace gradwire
