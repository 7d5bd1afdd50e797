// Two-way compression: the mean of a round becomes the update frame that everyone applies. Spec: proto/TWO_WAY.md.
//
//   S = mean + residual;  c = C(S);  residual = S - D(c)          (BytePS-Compress, arXiv 2105.07829, algorithms 3 and
//   4)
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/codec/codec.h"
#include "common/codec/update/update.h"

namespace gradwire {

// Of one bucket on its shard. Not thread-safe.
class UpdateCompressor {
 public:
  // Null: the bucket has no update codec. The context outlives the compressor. Errors: those of MakeCodec.
  static absl::StatusOr<std::unique_ptr<UpdateCompressor>> Make(const CodecContext& context);

  // Turns a round's mean, as the accumulator finished it, into the update frame: `update->mean` is then what
  // `update->chunks` was. An update without a body stays as it is, and so does the residual. `plan`: by which the round
  // was encoded. residual, next: layout.elements each, before and after the round; they may be one. Where the codec
  // keeps no residual, `residual` is null and `next` scratch. Errors: those of DecodeMean.
  absl::Status Compress(const RoundPlan& plan, const float* residual, float* next, UpdateFrame* update);

 private:
  explicit UpdateCompressor(const CodecContext& context) : context_(context) {}
  absl::StatusOr<EncodedFrame> Encode(const Update& mean, float* sum);

  const CodecContext context_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<Encoder> encoder_;
  std::vector<float> mean_;  // of all elements, where the codec chooses by it
};

// The residual that an update left behind, from its record alone: the bits that Compress left. `update`: with its mean.
// residual and next may be one. Errors: those of DecodeMean and DecodeUpdate; DataLoss: the mean is missing.
absl::Status ReplayResidual(const Job& job, const BucketLayout& layout, const RoundPlan& plan,
                            std::span<const Bytes> mean, const Update& update, kernels::Backend& backend,
                            const float* residual, float* next);

}  // namespace gradwire
