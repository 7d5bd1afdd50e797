// The optimizer step, shared by shards and replicas: the same update frames give bit-identical parameters wherever
// they are applied.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "common/codec/update/update.h"
#include "kernels/backend.h"

namespace gradwire {

// Memory of one run. `parameter` may lie in a training framework's tensor. moments: null where Job::moments() says so.
struct RunState {
  float* parameter = nullptr;
  float* first_moment = nullptr;
  float* second_moment = nullptr;
};

// Applies `update` to the runs of `layout`; one that replaces parameters is copied into them. Does nothing in rounds
// without values (round_mode.h), with 0 contributors, or for OPTIMIZER_NONE. t of AdamW's bias correction is
// StepOf(update.round), less the rounds that were no steps. Not thread-safe for overlapping runs.
absl::Status ApplyUpdate(const Job& job, const BucketLayout& layout, const Update& update,
                         std::span<const RunState> runs, kernels::Backend& backend);

}  // namespace gradwire
