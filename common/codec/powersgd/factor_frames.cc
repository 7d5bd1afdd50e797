// See factor_frames.h.
#include "common/codec/powersgd/factor_frames.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/codec/powersgd/arithmetic.h"

namespace gradwire::powersgd {

absl::Status FinishUpdate(std::span<const Matrix> matrices, std::span<const float> p, const BucketLayout& slice,
                          Update* update) {
  const Factor sent = FactorSentIn(update->round);
  std::vector<float>& factors = update->next.factors;
  const uint64_t expected = update->contributors == 0 ? 0 : SizeOf(matrices, sent);
  if (factors.size() != expected || (!matrices.empty() && update->body != Update::Body::kEmpty)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("update frame has %d of %d factor values, or something beside them", factors.size(), expected));
  }
  factors.resize(SizeOf(matrices, sent));
  if (update->contributors == 0 || sent == Factor::kP || matrices.empty()) return absl::OkStatus();
  if (p.size() != SizeOf(matrices, Factor::kP)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("update frame of round %d needs the factors of its round; %d values of %d are known here",
                        update->round, p.size(), SizeOf(matrices, Factor::kP)));
  }
  auto means = std::make_shared_for_overwrite<float[]>(slice.elements);
  std::span<const float> q = factors;
  std::vector<float> scales;
  for (const Matrix& m : matrices) {
    scales.resize(m.rank);
    for (uint64_t row = 0; row < m.rows; ++row) {
      for (uint32_t k = 0; k < m.rank; ++k) scales[k] = p[k * m.rows + row];
      Combine(scales.data(), m.rank, q.data(), m.cols, m.cols, means.get() + m.position + row * m.cols);
    }
    p = p.subspan(SizeOf(m, Factor::kP));
    q = q.subspan(SizeOf(m, Factor::kQ));
  }
  update->body = Update::Body::kDenseFloat;
  const auto* bytes = reinterpret_cast<const uint8_t*>(means.get());
  update->dense.push_back(
      {0, static_cast<uint32_t>(slice.elements), Bytes(std::move(means), bytes, slice.elements * 4)});
  return absl::OkStatus();
}

}  // namespace gradwire::powersgd
