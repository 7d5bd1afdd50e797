// See matrices.h.
#include "common/codec/powersgd/matrices.h"

#include <algorithm>

#include "common/codec/frame/run_pieces.h"
#include "common/job/matrix_shape.h"

namespace gradwire::powersgd {

std::vector<Matrix> MatricesOf(const Job& job, const BucketLayout& slice) {
  std::vector<Matrix> matrices;
  const auto* spec = std::get_if<PowerSgdSpec>(&job.codecs()[slice.codec]);
  if (spec == nullptr) return matrices;
  // Tensors with this codec lie on a shard as a whole (Job::keeps_whole).
  ForEachTensorPiece(slice, [&](const Run& first, uint64_t, uint64_t position) {
    const MatrixShape shape = *MatrixShapeOf(job.tensors()[first.tensor].shape, spec->rank);
    matrices.push_back({first.tensor, position, shape.rows, shape.cols, shape.rank});
  });
  return matrices;
}

uint64_t SizeOf(std::span<const Matrix> matrices, Factor factor) {
  uint64_t size = 0;
  for (const Matrix& m : matrices) size += SizeOf(m, factor);
  return size;
}

void CopyFactors(std::span<const Matrix> from, std::span<const float> values, std::span<const Matrix> to, Factor factor,
                 std::span<float> target) {
  for (const Matrix& m : from) {
    std::span<float> place = target;
    for (const Matrix& other : to) {
      if (other.tensor == m.tensor) std::copy_n(values.data(), SizeOf(m, factor), place.data());
      place = place.subspan(SizeOf(other, factor));
    }
    values = values.subspan(SizeOf(m, factor));
  }
}

}  // namespace gradwire::powersgd
