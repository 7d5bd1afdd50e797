// Says in words where two job specs differ, for the message of a refused join.
#pragma once

#include <string>

#include "gradwire/v1/job.pb.h"

namespace gradwire {

// The first differing field with both values, for example "tensors[3].shape: 4,8 here, 4,9 asked for". `here` is this
// server's. "nothing" when they are equal.
std::string DescribeDifference(const v1::JobSpec& here, const v1::JobSpec& asked);

}  // namespace gradwire
