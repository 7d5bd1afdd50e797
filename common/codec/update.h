// Reading update frames: the one record that is applied, journaled and pulled.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/codec/codec.h"

namespace gradwire {

// A decoded update frame. Move-only in spirit; holds the chunks it points into.
struct Update {
  enum class Body { kEmpty, kSparse, kDenseFloat, kDenseInt };
  uint64_t round = 0;
  uint32_t contributors = 0;          // 0: nobody contributed, nothing is applied
  std::vector<float> learning_rates;  // per parameter group
  RoundPlan next;                     // of round + 1
  std::vector<int8_t> exponents;      // of this round, from the plan
  Body body = Body::kEmpty;
  std::vector<uint32_t> positions;  // kSparse: ascending
  std::vector<int32_t> integers;    // kSparse: sums at positions; kDenseInt: sums of all elements
  std::vector<float> floats;        // kDenseFloat: means of all elements
  std::vector<uint32_t> deferred;   // positions every worker returns to its residual

  // Writes the mean over contributors of run `run` to out[0 .. length): integer * 2^exponent / contributors, in
  // float32, each operation rounded once. Elements that are not part of a sparse body are 0.
  void MeanOfRun(const BucketLayout& layout, uint32_t run, float* out) const;
};

// Decodes and checks an update frame against layout and the plan of its round; the plan of the next round is one that
// CheckPlan accepts. Errors: InvalidArgument, DataLoss, FailedPrecondition (the plan of its round is not known here).
absl::StatusOr<Update> DecodeUpdate(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout,
                                    const RoundPlan& plan);

}  // namespace gradwire
