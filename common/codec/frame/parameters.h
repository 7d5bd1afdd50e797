// Frames that carry parameters instead of gradients: the initial upload (kInitialize) and pulls of a version
// (kParameters), which also carry the plans that are kept at that version, so that a late joiner can encode its first
// frames and follow the rounds that are open.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
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

// The arrays that a parameter frame is to have.
struct ParametersWanted {
  bool parameter = false, first_moment = false, second_moment = false, update_residual = false;
};

// A parameter frame that was checked: its values lie in the chunks.
class ParameterFrame {
 public:
  // Of kParameters: all that PlansKept says; else none. Once.
  PlanWindow TakePlans() { return std::move(plans_); }
  // Writes `count` values from position `begin` on. Precondition: the array was wanted; the chunks are still there.
  void Read(wire::Array array, uint64_t begin, uint64_t count, float* to) const;

 private:
  friend class ParameterReader;
  PlanWindow plans_;
  std::vector<wire::Segment> segments_[4];  // by array, each where the one before ends
};

// Checks chunks of kInitialize, kParameters or EncodeReplacement. What is not wanted is skipped. Errors:
// InvalidArgument (another shape digest, version or range; elements or plans missing; a plan that does not fit; a
// wanted value that is not finite, named by tensor and index).
absl::StatusOr<ParameterFrame> ReadParameters(std::span<const wire::Chunk> chunks, const Job& job,
                                              const BucketLayout& layout, uint64_t version,
                                              const ParametersWanted& wanted);

// The same, into arrays in position order; those without a target are skipped. Where it fails they stay as they are.
absl::StatusOr<PlanWindow> DecodeParameters(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout,
                                            uint64_t version, const ParameterTargets& targets);
absl::StatusOr<PlanWindow> DecodeParameters(std::span<const wire::Chunk> chunks, const Job& job,
                                            const BucketLayout& layout, uint64_t version,
                                            const ParameterTargets& targets);

}  // namespace gradwire
