// Two-way compression: the mean of a round becomes the update frame that everyone applies. Spec: proto/TWO_WAY.md.
//
//   S = mean + residual;  c = C(S);  residual = S - D(c)          (BytePS-Compress, arXiv 2105.07829, algorithms 3 and
//   4)
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/large_array.h"
#include "common/codec/codec.h"
#include "common/codec/update/update.h"

namespace gradwire {

// What a round makes of the residual of a bucket: nothing, other values at some positions, or all of it anew.
class ResidualChange {
 public:
  void Clear();
  // From here on all is anew: memory for it.
  float* Whole(uint64_t elements);
  // From here on these are.
  Elements* Some();

  void ApplyTo(float* residual) const;
  // The same, once.
  void MoveTo(LargeArray<float>* residual);

 private:
  bool whole_ = false;
  LargeArray<float> all_;  // whole_; else its memory may stay
  Elements some_;          // else
};

// Of one bucket on its shard. Not thread-safe.
class UpdateCompressor {
 public:
  // Null: the bucket has no update codec. The context outlives the compressor. Errors: those of MakeCodec.
  static absl::StatusOr<std::unique_ptr<UpdateCompressor>> Make(const CodecContext& context);

  // Turns a round's mean, as the accumulator finished it, into the update frame: `update->mean` is then what
  // `update->chunks` was. An update without a body stays as it is, and so does the residual. `plan`: by which the round
  // was encoded. residual: layout.elements before the round; null where the codec keeps none, `change` is scratch then.
  // Takes a time that grows with the elements, with `union` with those that the mean has. Errors: those of DecodeMean.
  absl::Status Compress(const RoundPlan& plan, const float* residual, ResidualChange* change, UpdateFrame* update);

 private:
  explicit UpdateCompressor(const CodecContext& context) : context_(context) {}
  absl::StatusOr<EncodedFrame> Encode(const Update& mean, const float* residual, ResidualChange* change);
  absl::StatusOr<EncodedFrame> EncodeAll(const FrameIdentity& id, const Update& mean, float* sum);

  const CodecContext context_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<Encoder> encoder_;
  std::vector<float> mean_;  // of all elements, where the codec chooses by it
};

// The change that an update made, from its record alone: the bits of Compress. `mean`: of the update. Errors: those of
// DecodeMean and DecodeUpdate; DataLoss: the mean is missing, or another one.
absl::Status ReplayResidual(const Job& job, const BucketLayout& layout, const RoundPlan& plan,
                            std::span<const Bytes> mean, const Update& update, kernels::Backend& backend,
                            const float* residual, ResidualChange* change);

}  // namespace gradwire
