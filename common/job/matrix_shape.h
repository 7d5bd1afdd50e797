// Which tensors PowerSGD sees as a matrix. Paper: Vogels et al. 2019, arXiv 1905.13727, section 3.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace gradwire::powersgd {

struct MatrixShape {
  uint64_t rows = 0;
  uint64_t cols = 0;
  uint32_t rank = 0;  // at most rows and cols
};

// A tensor of this shape as shape[0] x (all other dimensions). Nothing for vectors and for matrices whose factors of
// this rank would not be smaller than themselves.
inline std::optional<MatrixShape> MatrixShapeOf(const std::vector<uint64_t>& shape, uint32_t rank) {
  if (shape.size() < 2) return std::nullopt;
  MatrixShape m{shape[0], 1, 0};
  for (size_t i = 1; i < shape.size(); ++i) m.cols *= shape[i];
  m.rank = static_cast<uint32_t>(std::min<uint64_t>({rank, m.rows, m.cols}));
  if ((m.rows + m.cols) * m.rank >= m.rows * m.cols) return std::nullopt;
  return m;
}

}  // namespace gradwire::powersgd
