// Adding to a sketch, and peeling it. Re-included once per target.
#if defined(GRADWIRE_KERNELS_CPU_SIMD_SKETCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_KERNELS_CPU_SIMD_SKETCH_INL_H_
#undef GRADWIRE_KERNELS_CPU_SIMD_SKETCH_INL_H_
#else
#define GRADWIRE_KERNELS_CPU_SIMD_SKETCH_INL_H_
#endif

#include <algorithm>

#include "kernels/cpu/reference/loops.h"
#include "kernels/cpu/simd/common-inl.h"
#include "kernels/cpu/simd/peel.h"
#include "kernels/math/sketch.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels {
namespace HWY_NAMESPACE {

// sketch.h's CellsOf for a vector of positions; cells counted within their thirds.
struct CellLanes {
  VecU64 group, cell[3];
};

struct CellHasher {
  explicit CellHasher(const SketchArgs& args) : salt(args.salt), groups(args.groups), third(args.cells_per_group / 3) {}

  HWY_INLINE CellLanes operator()(VecU64 positions) const {
    const U64 d;
    const VecU64 hash = MixLanes(hn::Xor(positions, hn::Set(d, salt)));
    const VecU64 bits = MixLanes(hash);
    const VecU64 mask = hn::Set(d, 0x1FFFFFu);
    const VecU64 cells = hn::Set(d, third);
    return {hn::ShiftRight<32>(MultiplyNarrow(hn::ShiftRight<32>(hash), hn::Set(d, groups))),
            {hn::ShiftRight<21>(MultiplyNarrow(hn::And(bits, mask), cells)),
             hn::ShiftRight<21>(MultiplyNarrow(hn::And(hn::ShiftRight<21>(bits), mask), cells)),
             hn::ShiftRight<21>(MultiplyNarrow(hn::And(hn::ShiftRight<42>(bits), mask), cells))}};
  }

  const uint64_t salt;
  const uint64_t groups;
  const uint64_t third;
};

// The positions at [i, i + lanes), widened; what lies at or behind n repeats the last one.
HWY_INLINE VecU64 LoadPositions(const uint32_t* positions, size_t i, size_t n) {
  const U64 d;
  const hn::Rebind<uint32_t, U64> d32;
  if (HWY_LIKELY(i + hn::Lanes(d) <= n)) return hn::PromoteTo(d, hn::LoadU(d32, positions + i));
  HWY_ALIGN uint32_t rest[HWY_MAX_BYTES / sizeof(uint32_t)];
  for (size_t j = 0; j < hn::Lanes(d); ++j) rest[j] = positions[std::min(i + j, n - 1)];
  return hn::PromoteTo(d, hn::LoadU(d32, rest));
}

// Elements whose cells are computed before they are touched: few, so that a batch is hashed while the cells of the one
// before it are still on the way.
inline constexpr size_t kHashBatch = 32;

template <typename T>
HWY_INLINE void AddToCells(const uint32_t* positions, const int32_t* integers, size_t n, const SketchArgs& args,
                           uint8_t* bytes) {
  const U64 d;
  const size_t lanes = hn::Lanes(d);
  const CellHasher hasher(args);
  T* const cells = reinterpret_cast<T*>(bytes);
  HWY_ALIGN uint64_t at[3][kHashBatch + HWY_MAX_BYTES / sizeof(uint64_t)];
  for (size_t begin = 0; begin < n; begin += kHashBatch) {
    const size_t count = std::min(kHashBatch, n - begin);
    for (size_t i = 0; i < count; i += lanes) {
      const CellLanes lane = hasher(LoadPositions(positions, begin + i, n));
      const VecU64 first = MultiplyNarrow(lane.group, hn::Set(d, args.cells_per_group));
      // A sketch may have more than 2^32 cells, but group and cells per group are 32-bit numbers.
      hn::StoreU(hn::Add(first, lane.cell[0]), d, &at[0][i]);
      hn::StoreU(hn::Add(hn::Add(first, lane.cell[1]), hn::Set(d, hasher.third)), d, &at[1][i]);
      hn::StoreU(hn::Add(hn::Add(first, lane.cell[2]), hn::Set(d, 2 * hasher.third)), d, &at[2][i]);
    }
    for (size_t i = 0; i < count; ++i) {
      const T value = static_cast<T>(integers[begin + i]);
      for (int j = 0; j < 3; ++j) {
        T* const cell = cells + at[j][i];
        T sum;
        std::memcpy(&sum, cell, sizeof(T));
        sum = static_cast<T>(sum + value);
        std::memcpy(cell, &sum, sizeof(T));
      }
    }
  }
}

void SketchAdd(const uint32_t* positions, const int32_t* integers, size_t n, const SketchArgs& args, uint8_t* cells) {
  if (n == 0) return;
  // As in the reference. Not shared with it: a lambda would be compiled for no target.
  switch (args.cell_bytes) {
    case 1:
      AddToCells<uint8_t>(positions, integers, n, args, cells);
      break;
    case 2:
      AddToCells<uint16_t>(positions, integers, n, args, cells);
      break;
    default:
      AddToCells<uint32_t>(positions, integers, n, args, cells);
      break;
  }
}

// Records and groups of all positions (peel.h), and how many fall into each group.
HWY_INLINE void HashForPeeling(const uint32_t* positions, size_t n, const SketchArgs& args, uint64_t* records,
                               uint32_t* group_of, uint32_t* group_size) {
  const U64 d;
  const hn::Rebind<uint32_t, U64> d32;
  const size_t lanes = hn::Lanes(d);
  const CellHasher hasher(args);
  for (size_t i = 0; i < n; i += lanes) {
    const CellLanes lane = hasher(LoadPositions(positions, i, n));
    const VecU64 record = hn::Or(
        lane.cell[0], hn::Or(hn::ShiftLeft<kRecordBits>(lane.cell[1]), hn::ShiftLeft<2 * kRecordBits>(lane.cell[2])));
    hn::StoreU(record, d, records + i);
    hn::StoreU(hn::TruncateTo(d32, lane.group), d32, group_of + i);
  }
  for (size_t i = 0; i < n; ++i) ++group_size[group_of[i]];
}

void SketchPeel(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions, size_t n, int32_t* sums,
                uint8_t* resolved) {
  if (n == 0) return;
  if (args.groups == 0 || n > UINT32_MAX) return reference::SketchPeel(cells, args, positions, n, sums, resolved);
  Peeler peeler(args, n);
  HashForPeeling(positions, n, args, peeler.records(), peeler.group_of(), peeler.group_size());
  if (!peeler.GroupsFit()) return reference::SketchPeel(cells, args, positions, n, sums, resolved);
  peeler.SortByGroup();
  switch (args.cell_bytes) {
    case 1:
      PeelAll<int8_t>(peeler, cells, sums, resolved);
      break;
    case 2:
      PeelAll<int16_t>(peeler, cells, sums, resolved);
      break;
    default:
      PeelAll<int32_t>(peeler, cells, sums, resolved);
      break;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gradwire::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard
