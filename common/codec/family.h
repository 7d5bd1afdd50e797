// What a kind of codec is apart from any bucket: all that shared code asks of a spec. Its Codec, prepared for a bucket,
// is in codec.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/codec/codec.h"
#include "common/codec/plan/plan_reshard.h"
#include "common/codec/update/body_reader.h"

namespace gradwire {

// A spec in words.
struct Explanation {
  std::string text;       // lines: its options, and what else there is to know
  double push_bytes = 0;  // per step, of one worker, about
};

// How a job with a codec trains well, for clients whose user asks for nothing else. From the convergence study
// (tests/bench/README.md).
struct TrainingDefaults {
  bool push_steps = false;        // workers push steps: what the codec keeps on a worker is the momentum then
  bool gradients_to_sgd = false;  // gradients go to plain SGD: the codec has a momentum of its own, or sends only signs
  bool small_dense = false;       // norms, biases and small tensors travel dense: a part of them is too little
  bool union_back = false;        // updates come back by `union`: what was pushed, in fewer bits than float32
};

// One object for each kind of spec, without state; thread-safe. `spec` is always of its kind. Where a slice is named,
// its codec is of this kind, unless said otherwise.
class CodecFamily {
 public:
  virtual ~CodecFamily() = default;

  // As MakeCodec.
  virtual absl::StatusOr<std::unique_ptr<Codec>> Make(const CodecContext& context, const CodecSpec& spec) const = 0;
  virtual Explanation Explain(const CodecSpec& spec, uint64_t elements) const = 0;
  virtual TrainingDefaults Training(const CodecSpec& spec) const;

  // Plans (RoundPlan) -------------------------------------------------------------------------------------------------

  // Whether plans have an exponent for each run.
  virtual bool PlansExponents(const CodecSpec& spec) const;
  // How many factor values the plan of a version has; how many the plan of any version can have.
  virtual uint64_t FactorsAt(const Job& job, const BucketLayout& slice, uint64_t version) const;
  virtual uint64_t MostFactors(const Job& job, const BucketLayout& slice) const;
  // InvalidArgument where the codec would never publish this sketch geometry, which is not none.
  virtual absl::Status CheckSketch(const Job& job, const BucketLayout& slice, const RoundPlan& plan) const;
  // The sketch of the slice `to` of a bucket whose slices, on another number of shards, were `from` (ReshardPlan).
  virtual void ReshardSketch(const Job& job, const BucketLayout& to, std::span<const PlanPart> from,
                             RoundPlan* plan) const;
  // Writes those of the factors of a slice, whose plan of `version` is `plan`, that lie in the slice `to` now.
  virtual void MoveFactors(const Job& job, const BucketLayout& from, const RoundPlan& plan, uint64_t version,
                           const BucketLayout& to, RoundPlan* target) const;

  // Update frames -----------------------------------------------------------------------------------------------------

  // Reads the sums that accumulators write.
  virtual std::unique_ptr<BodyReader> NewSumReader(const Job& job, const BucketLayout& slice) const;
  // As an update codec, of a slice of any codec: what bodies consist of, and their reader.
  virtual wire::SegmentType CompressedType(const CodecSpec& spec) const;
  virtual std::unique_ptr<BodyReader> NewCompressedReader(const Job& job, const BucketLayout& slice,
                                                          const CodecSpec& spec) const;
};

// registry.cc: the one place that knows every codec.
const CodecFamily& FamilyOf(const CodecSpec& spec);
const CodecFamily& FamilyOf(const Job& job, const BucketLayout& slice);

}  // namespace gradwire
