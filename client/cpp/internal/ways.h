// How a session pulls, and where its tensors lie, as features of the table of what goes with what.
#pragma once

#include "client/cpp/include/gradwire/session.h"
#include "common/job/compatibility.h"

namespace gradwire::client {

inline FeatureSet WaysOf(PullMode pull, bool on_gpu) {
  FeatureSet ways;
  if (on_gpu) ways.Add(Feature::kWorkersOnGpu);
  switch (pull) {
    case PullMode::kMean:
      ways.Add(Feature::kPullMeans);
      break;
    case PullMode::kUpdate:
      ways.Add(Feature::kPullUpdates);
      if (on_gpu) ways.Add(Feature::kReplicasOnGpu);
      break;
    default:
      ways.Add(Feature::kPullParameters);
      break;
  }
  return ways;
}

}  // namespace gradwire::client
