// Frames that carry parameters instead of gradients: the initial upload (kInitialize) and pulls of a version
// (kParameters), which also carry the plans that are kept at that version, so that a late joiner can encode its first
// frames and follow the rounds that are open.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/codec/codec.h"
#include "common/codec/plan/plan_window.h"

namespace gradwire {

// What a kParameters frame carries beside the plans.
enum class ParameterContent {
  kFloat32,  // parameters
  kBf16,     // parameters, rounded to nearest even
  kState,    // parameters and the optimizer's moments: what a replica that applies updates itself needs
  kShard,    // all of the shard's arrays: what another shard that goes on needs
};

// Source of one frame: arrays of layout.elements values in position order; null where there is none.
struct ParameterArrays {
  const float* parameter = nullptr;
  const float* first_moment = nullptr;
  const float* second_moment = nullptr;
  const float* update_residual = nullptr;
  // Keeps those that the frame takes as they are, for it borrows floats (FrameWriter::Borrow). Null: it copies them.
  std::shared_ptr<const void> lent = nullptr;
};

// The same, to be filled.
struct ParameterTargets {
  float* parameter = nullptr;
  float* first_moment = nullptr;
  float* second_moment = nullptr;
  float* update_residual = nullptr;  // of the update codec
};

std::vector<Bytes> EncodeInitialize(const BucketLayout& layout, uint64_t incarnation, const float* parameters);
// The frame by which a worker replaces the parameters of a bucket in `round`: abstains, with kReplace.
std::vector<Bytes> EncodeReplacement(const BucketLayout& layout, uint64_t round, uint64_t incarnation,
                                     const float* parameters);
// Appends parameters as a dense body of float32.
void AddParameters(const float* values, uint64_t elements, wire::FrameWriter* writer);
// Of the version of `plans`. What is lent is read as its chunks are completed.
wire::FrameToSend EncodeParametersToSend(const BucketLayout& layout, const PlanWindow& plans, ParameterContent content,
                                         const ParameterArrays& arrays);
std::vector<Bytes> EncodeParameters(const BucketLayout& layout, const PlanWindow& plans, ParameterContent content,
                                    const ParameterArrays& arrays);

// Decodes chunks of kInitialize, kParameters or EncodeReplacement into arrays in position order, and the plans
// (of kParameters: all that PlansKept says; else none). Moments without a target are skipped. Errors: InvalidArgument
// (another shape digest, version or range; elements or plans missing; a plan that does not fit; a non-finite initial
// parameter, named by tensor and index).
absl::StatusOr<PlanWindow> DecodeParameters(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout,
                                            uint64_t version, const ParameterTargets& targets);
absl::StatusOr<PlanWindow> DecodeParameters(std::span<const wire::Chunk> chunks, const Job& job,
                                            const BucketLayout& layout, uint64_t version,
                                            const ParameterTargets& targets);

}  // namespace gradwire
