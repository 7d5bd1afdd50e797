// The tensors of a slice as matrices, and the factors that stand for them. A matrix M of rows x cols is P Q^T, P of
// rows x rank, Q of cols x rank. Factors are kept matrix by matrix in the order of the slice, column by column. Rounds
// of such a job come in pairs (common/job/round_mode.h): the first sums P, the second Q. Spec: proto/WIRE.md,
// "Factors".
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire::powersgd {

struct Matrix {
  uint32_t tensor = 0;
  uint64_t position = 0;  // of its first element in the slice
  uint64_t rows = 0;
  uint64_t cols = 0;
  uint32_t rank = 0;
};

enum class Factor : uint8_t { kP, kQ };

// What frames and update frames of a round carry.
inline Factor FactorSentIn(uint64_t round) { return round % 2 == 0 ? Factor::kP : Factor::kQ; }
// What the plan of a version holds: what the round that made it has sent. That of version 0 is the Q to start from.
inline Factor FactorPlannedAt(uint64_t version) { return version % 2 == 0 ? Factor::kQ : Factor::kP; }

// Empty where the codec of the slice is another one.
std::vector<Matrix> MatricesOf(const Job& job, const BucketLayout& slice);

inline uint64_t ColumnOf(const Matrix& m, Factor factor) { return factor == Factor::kP ? m.rows : m.cols; }
inline uint64_t SizeOf(const Matrix& m, Factor factor) { return ColumnOf(m, factor) * m.rank; }
uint64_t SizeOf(std::span<const Matrix> matrices, Factor factor);

// Copies the factors of the matrices that both slices have.
void CopyFactors(std::span<const Matrix> from, std::span<const float> values, std::span<const Matrix> to, Factor factor,
                 std::span<float> target);

}  // namespace gradwire::powersgd
