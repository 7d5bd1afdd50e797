// Reading update frames: the one record that is applied, journaled and pulled.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/codec/codec.h"

namespace gradwire {

// A decoded update frame. Dense bodies stay where they arrived: an Update shares the memory of its chunks, and borrowed
// chunks must outlive it.
struct Update {
  // Consecutive elements of a dense body, 4 bytes each, at any address.
  struct DensePart {
    uint64_t begin = 0;
    uint32_t count = 0;
    Bytes values;  // float32 or int32
  };
  enum class Body { kEmpty, kSparse, kSparseFloat, kDenseFloat, kDenseInt };
  uint64_t round = 0;
  uint32_t contributors = 0;          // 0: nobody contributed, nothing is applied
  bool skipped = false;               // the round: a gradient in it was not finite, nothing is applied
  bool replaces = false;              // the parameters: the body is what they become, moments stay
  uint32_t nonfinite_rounds = 0;      // up to this one that were skipped or replaced parameters
  std::vector<float> learning_rates;  // per parameter group
  RoundPlan next;                     // of round + 1
  std::vector<int8_t> exponents;      // of this round, from the plan
  bool integers_of_exponents() const { return body == Body::kSparse || body == Body::kDenseInt; }
  Body body = Body::kEmpty;
  std::vector<uint32_t> positions;  // kSparse, kSparseFloat: ascending
  std::vector<int32_t> integers;    // kSparse: sums at positions
  std::vector<float> values;        // kSparseFloat: means at positions
  std::vector<DensePart> dense;     // kDenseFloat: means; kDenseInt: sums; of all elements, ascending
  // Where they still lie on a device: the same values in its memory.
  const void* device_values = nullptr;
  std::vector<uint32_t> deferred;  // positions every worker returns to its residual
  // Of a job with norms: squares over all shards. Per tensor of the slice (TensorsOf), those of NormsOf; and of the
  // mean of all tensors, where the job clips it.
  std::vector<double> norms;
  std::optional<double> mean_square;

  // Writes the mean over contributors of run `run` to out[0 .. length): integer * 2^exponent / contributors, in
  // float32, each operation rounded once. Elements that are not part of a sparse body are 0.
  void MeanOfRun(const BucketLayout& layout, uint32_t run, float* out) const;
  // The same where it lies: of a kDenseFloat body, where the run lies in one part and at an address of floats. Else
  // null.
  const float* MeanInPlace(const BucketLayout& layout, uint32_t run) const;
  // Copies elements [begin, begin + n) of a dense body. T: float or int32_t, as the body says.
  template <typename T>
  void CopyDense(uint64_t begin, uint64_t n, T* out) const;
  // The part of `dense` that has an element.
  std::vector<DensePart>::const_iterator PartWith(uint64_t element) const;
};

// The update frame of a round that is skipped: nothing is applied, and the next round has the plan of this one.
UpdateFrame SkippedUpdate(const FrameIdentity& id, const BucketLayout& layout, const RoundPlan& plan);

// The update frame of a round in which workers replace the parameters, by `parameters` of layout.elements values. The
// next round has the plan of this one.
UpdateFrame ReplacingUpdate(const FrameIdentity& id, const BucketLayout& layout, const RoundPlan& plan,
                            const float* parameters);

// What the header of an update frame says of the update. Whoever has its parts without decoding the frame begins so.
Update BeginUpdate(const wire::FrameHeader& header);

// What an update frame says of its norms, without anything else of it. Errors as of DecodeUpdate.
absl::Status DecodeNorms(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout, Update* update);
// The frame with what `update` says of its norms, of which it said nothing; as it is where the job has none.
void AppendNorms(const Job& job, const Update& update, std::vector<Bytes>* chunks);

// Decodes and checks an update frame against layout and the plan of its round; the plan of the next round is one that
// CheckPlan accepts. Errors: InvalidArgument, DataLoss, FailedPrecondition (the plan of its round is not known here).
absl::StatusOr<Update> DecodeUpdate(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout,
                                    const RoundPlan& plan);
absl::StatusOr<Update> DecodeUpdate(std::span<const wire::Chunk> chunks, const Job& job, const BucketLayout& layout,
                                    const RoundPlan& plan);
// The same of the frame that an accumulator finished. Where the bucket has an update codec that is not the update frame
// yet: what the update codec is given (proto/TWO_WAY.md).
absl::StatusOr<Update> DecodeMean(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout,
                                  const RoundPlan& plan);

// The update frame without its body, for who only needs the plan of the next round, what was deferred and how the round
// went. Errors: of ParseFrame.
absl::StatusOr<std::vector<Bytes>> WithoutBody(std::span<const Bytes> chunks);
// Decodes what WithoutBody made. Errors: those of DecodeUpdate, which refuses such a frame.
absl::StatusOr<Update> DecodePlan(std::span<const wire::Chunk> chunks, const Job& job, const BucketLayout& layout,
                                  const RoundPlan& plan);

template <typename T>
void Update::CopyDense(uint64_t begin, uint64_t n, T* out) const {
  static_assert(sizeof(T) == 4);
  for (auto part = PartWith(begin); n > 0; ++part) {
    const uint64_t skip = begin - part->begin;
    const uint64_t here = std::min(n, part->count - skip);
    std::memcpy(out, part->values.data() + 4 * skip, 4 * here);
    begin += here;
    out += here;
    n -= here;
  }
}

}  // namespace gradwire
