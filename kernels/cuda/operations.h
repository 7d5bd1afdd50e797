// Every operation of kernels/backend.h as launches on a stream, with results left in device memory: the asynchronous
// interface that a server path on a GPU is made of. Which kernels run, over which grid and with what scratch memory is
// decided here, for every device alike; Device says how to launch and where memory comes from.
//
// Device (CudaDevice, or the tests' HostDevice):
//   using Tiles, Tiles MakeTiles(uint32_t count, Scratch&), size_t TileBytes(uint32_t count)
//   Launch(body, blocks, shared_bytes, stream)   nothing where blocks is 0
//   void* Allocate(bytes, stream), Free(p, stream)   ordered like a launch
//   Fill(p, byte, bytes, stream)
//   uint32_t units()                              multiprocessors
//   size_t shared_limit()                         dynamic shared memory that a block may ask for
//
// Thread-safe if Device is. Nothing here waits for the device. Pointers are device memory; sizes, aliasing and
// alignment are those of Backend. A method named like one of Backend's does the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "kernels/backend.h"
#include "kernels/cuda/bodies/dense.cuh"
#include "kernels/cuda/bodies/elementwise.cuh"
#include "kernels/cuda/bodies/optimizer.cuh"
#include "kernels/cuda/bodies/select.cuh"
#include "kernels/cuda/bodies/sketch.cuh"

namespace gradwire::kernels::cuda {

inline constexpr uint32_t kInfinityBits = 0x7F800000u;

// Device memory for the kernels launched while it lives; freed in stream order. Without it the operation cannot be done
// and has no way to say so: the process ends.
template <class Device>
class Scratch {
 public:
  Scratch(Device& device, size_t bytes, Stream* stream)
      : device_(device), stream_(stream), data_(bytes == 0 ? nullptr : device.Allocate(bytes, stream)) {
    if (bytes == 0 || data_ != nullptr) return;
    std::fprintf(stderr, "gradwire: no %zu bytes of device memory left for an operation's scratch\n", bytes);
    std::abort();
  }
  ~Scratch() {
    if (data_ != nullptr) device_.Free(data_, stream_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T = uint8_t>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  Device& device_;
  Stream* const stream_;
  void* const data_;
};

template <class Device>
class Operations {
 public:
  // `device` outlives this.
  explicit Operations(Device* device) : device_(*device) {}

  // Dense merging and fixed point ---------------------------------------------------------------------------------
  void AddIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream* stream) {
    const uint32_t factor = static_cast<uint32_t>(static_cast<int>(sign));
    switch (width) {
      case 1:
        return ForEach(AddIntegersOp<int8_t>{acc, values, factor}, n, stream);
      case 2:
        return ForEach(AddIntegersOp<int16_t>{acc, values, factor}, n, stream);
      default:
        return ForEach(AddIntegersOp<int32_t>{acc, values, factor}, n, stream);
    }
  }

  void AddFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream* stream) {
    const uint64_t flip = sign == Sign::kSubtract ? ~uint64_t{0} : 0;
    if (width == 4) {
      ForEach(AddFloatsOp<uint32_t>{acc, values, flip}, n, stream);
    } else {
      ForEach(AddFloatsOp<uint16_t>{acc, values, flip}, n, stream);
    }
  }

  void AssignIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Stream* stream) {
    switch (width) {
      case 1:
        return ForEach(AssignIntegersOp<int8_t>{acc, values}, n, stream);
      case 2:
        return ForEach(AssignIntegersOp<int16_t>{acc, values}, n, stream);
      default:
        return ForEach(AssignIntegersOp<int32_t>{acc, values}, n, stream);
    }
  }

  void AssignFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Stream* stream) {
    if (width == 4) {
      ForEach(AssignFloatsOp<uint32_t>{acc, values}, n, stream);
    } else {
      ForEach(AssignFloatsOp<uint16_t>{acc, values}, n, stream);
    }
  }

  // Precondition: first_position + n <= 2^32.
  void AddFloatsChecked(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign, uint32_t limit_bits,
                        uint64_t first_position, uint64_t* first_bad, Stream* stream) {
    const uint64_t flip = sign == Sign::kSubtract ? ~uint64_t{0} : 0;
    if (width == 4) {
      ForEach(AddFloatsCheckedOp<uint32_t>{acc, values, flip, limit_bits, first_position, first_bad}, n, stream);
    } else {
      ForEach(AddFloatsCheckedOp<uint16_t>{acc, values, flip, limit_bits, first_position, first_bad}, n, stream);
    }
  }
  void AddIntegersChecked(int32_t* acc, const uint8_t* values, int width, size_t n, Sign sign, int32_t limit,
                          uint64_t first_position, uint64_t* first_bad, Stream* stream) {
    const uint32_t factor = static_cast<uint32_t>(static_cast<int>(sign));
    if (width == 4) {
      ForEach(AddIntegersCheckedOp<int32_t>{acc, values, factor, limit, first_position, first_bad}, n, stream);
    } else {
      ForEach(AddIntegersCheckedOp<int16_t>{acc, values, factor, limit, first_position, first_bad}, n, stream);
    }
  }

  // *first: index of the first magnitude with bits >= limit_bits, or 2^64 - 1, which is -1 as int64.
  void FindMagnitude(const uint8_t* values, int width, size_t n, uint32_t limit_bits, uint64_t* first, Stream* stream) {
    device_.Fill(first, 0xFF, sizeof(*first), stream);
    if (width == 4) {
      ForEach(FindMagnitudeOp<uint32_t>{values, limit_bits, first}, n, stream);
    } else {
      ForEach(FindMagnitudeOp<uint16_t>{values, limit_bits, first}, n, stream);
    }
  }
  void FindNonFinite(const float* x, size_t n, uint64_t* first, Stream* stream) {
    FindMagnitude(reinterpret_cast<const uint8_t*>(x), 4, n, kInfinityBits, first, stream);
  }

  void GridToMean(const int64_t* acc, size_t n, uint32_t contributors, float* out, Stream* stream) {
    ForEach(GridToMeanOp{acc, out, PowerOfTwo(-kGridBits), static_cast<float>(contributors)}, n, stream);
  }

  void Quantize(float* x, size_t n, int exponent, int32_t limit, int width, uint8_t* q, Stream* stream) {
    const float inverse = PowerOfTwo(-exponent), unit = PowerOfTwo(exponent), bound = LargestFloatWithin(limit);
    switch (width) {
      case 1:
        return ForEach(QuantizeOp<int8_t>{x, q, inverse, unit, bound}, n, stream);
      case 2:
        return ForEach(QuantizeOp<int16_t>{x, q, inverse, unit, bound}, n, stream);
      default:
        return ForEach(QuantizeOp<int32_t>{x, q, inverse, unit, bound}, n, stream);
    }
  }

  void QuantizeRuns(const RunPlaces& runs, int32_t limit, int width, uint8_t* out, Stream* stream) {
    const float bound = LargestFloatWithin(limit);
    if (width == 4) {
      ForEachOfRuns(runs, QuantizeRunOp<int32_t>{reinterpret_cast<int32_t*>(out), bound}, stream);
    } else {
      ForEachOfRuns(runs, QuantizeRunOp<int16_t>{reinterpret_cast<int16_t*>(out), bound}, stream);
    }
  }
  void SplitBf16Runs(const RunPlaces& runs, float largest, uint8_t* out, Stream* stream) {
    ForEachOfRuns(runs, SplitBf16RunOp{reinterpret_cast<uint16_t*>(out), largest}, stream);
  }
  void CopyRuns(const RunPlaces& runs, float* out, Stream* stream) { ForEachOfRuns(runs, CopyRunOp{out}, stream); }
  void CopyToRuns(const float* from, const RunPlaces& runs, Stream* stream) {
    ForEachOfRuns(runs, CopyToRunOp{from}, stream);
  }

  void Dequantize(const uint8_t* q, int width, size_t n, int exponent, float* x, Stream* stream) {
    const float unit = PowerOfTwo(exponent);
    switch (width) {
      case 1:
        return ForEach(DequantizeOp<int8_t>{q, x, unit}, n, stream);
      case 2:
        return ForEach(DequantizeOp<int16_t>{q, x, unit}, n, stream);
      default:
        return ForEach(DequantizeOp<int32_t>{q, x, unit}, n, stream);
    }
  }

  void SplitBf16(float* x, size_t n, float largest, uint8_t* out, Stream* stream) {
    ForEach(SplitBf16Op{x, out, largest}, n, stream);
  }
  void AddBf16(const uint8_t* values, size_t n, float* x, Stream* stream) { ForEach(AddBf16Op{values, x}, n, stream); }

  // *largest: bits of the largest |x|, 0 where n is 0.
  void LargestMagnitude(const float* x, size_t n, uint32_t* largest, Stream* stream) {
    device_.Fill(largest, 0, sizeof(*largest), stream);
    Strided(cuda::LargestMagnitude{x, n, IsAligned<float, 4>(x), largest}, n, 0, stream);
  }

  void LargestOfRuns(const RunPlaces& runs, uint32_t* largest, Stream* stream) {
    device_.Launch(cuda::LargestOfRuns{runs.at, largest}, runs.count, 0, stream);
  }

  // Selection -----------------------------------------------------------------------------------------------------
  void Add(float* x, const float* y, size_t n, Stream* stream) { ForEach(AddOp{x, y}, n, stream); }
  void AddPreconditioned(float* x, const float* gradient, float* second_moment, size_t n,
                         const PreconditionCoefficients& c, Stream* stream) {
    ForEach(AddPreconditionedOp{x, gradient, second_moment, c}, n, stream);
  }

  void TakeIn(float* x, const float* gradient, float* second_moment, size_t n, float decay,
              const PreconditionCoefficients& c, const uint64_t* bad, Stream* stream) {
    ForEach(TakeInOp{x, gradient, second_moment, decay, c, bad}, n, stream);
  }

  void UpperHistogram(const float* x, size_t n, uint64_t* bins, Stream* stream) {
    UpperHistogram(x, SampleOf(n, 0, Accuracy::kExact), bins, stream);
  }
  void LowerHistogram(const float* x, size_t n, uint32_t upper, uint64_t* bins, Stream* stream) {
    LowerHistogram(x, SampleOf(n, 0, Accuracy::kExact), upper, nullptr, bins, stream);
  }

  // Two histograms and the choice of a bin in each, without a wait. TakeSelected takes the threshold from where it is.
  void FindThreshold(const float* x, size_t n, double wanted, Accuracy accuracy, DeviceSelection* selection,
                     Stream* stream) {
    const LineSample sample = SampleOf(n, wanted, accuracy);
    const Scratch<Device> bins(device_, (Histogram<false>::kBins + Histogram<true>::kBins) * sizeof(uint64_t), stream);
    uint64_t* const upper = bins.template as<uint64_t>();
    uint64_t* const lower = upper + Histogram<false>::kBins;
    UpperHistogram(x, sample, upper, stream);
    device_.Launch(PickBin<false>{upper, sample.wanted, selection}, 1, 0, stream);
    LowerHistogram(x, sample, 0, selection, lower, stream);
    device_.Launch(PickBin<true>{lower, 0, selection}, 1, 0, stream);
  }

  // *taken: how many. `selection`: null, or what replaces args.key and args.keep_below. Precondition: n < 2^32.
  void TakeSelected(float* x, size_t n, const SelectArgs& args, const DeviceSelection* selection,
                    uint32_t first_position, uint32_t* positions, int32_t* integers, uint64_t* taken, Stream* stream) {
    if (n == 0) return device_.Fill(taken, 0, sizeof(*taken), stream);
    const TakeTile first = {x,
                            n,
                            0,
                            IsAligned<float, 4>(x),
                            args.key,
                            args.keep_below,
                            args.phase,
                            args.first_element,
                            PowerOfTwo(-args.exponent),
                            PowerOfTwo(args.exponent),
                            first_position};
    const OneArray source = {first, selection};
    TakeFrom(source, Blocks(n, kTakeTile), args.limit, positions, integers, taken, stream);
  }
  void TakeSelectedOfRuns(const RunPlaces& runs, int32_t limit, uint32_t* positions, int32_t* integers, uint64_t* taken,
                          Stream* stream) {
    if (runs.count == 0) return device_.Fill(taken, 0, sizeof(*taken), stream);
    const uint32_t tiles = static_cast<uint32_t>(Blocks(runs.longest, kTakeTile));
    TakeFrom(ManyRuns{runs.at, tiles}, uint64_t{runs.count} * tiles, limit, positions, integers, taken, stream);
  }

  // Sketch --------------------------------------------------------------------------------------------------------
  // `count`: its upper bound sizes the scratch memory and the grid. Precondition: it is < 2^31.
  void SketchAdd(const uint32_t* positions, const int32_t* integers, ElementCount count, const SketchArgs& args,
                 uint8_t* cells, Stream* stream) {
    if (count.most == 0 || args.groups == 0) return;
    const size_t size = size_t{args.groups} * args.cells_per_group;
    const Scratch<Device> memory(device_, size * sizeof(uint32_t), stream);
    uint32_t* const sums = memory.template as<uint32_t>();
    device_.Fill(sums, 0, size * sizeof(uint32_t), stream);
    Scatter(AddToCellSumsOp{positions, integers, args.salt, args.groups, args.cells_per_group / 3, sums}, count,
            stream);
    switch (args.cell_bytes) {
      case 1:
        return ForEach(AddSumsToCellsOp<uint8_t>{cells, sums}, size, stream);
      case 2:
        return ForEach(AddSumsToCellsOp<uint16_t>{cells, sums}, size, stream);
      default:
        return ForEach(AddSumsToCellsOp<uint32_t>{cells, sums}, size, stream);
    }
  }

  void AddCells(uint8_t* acc, const uint8_t* cells, int width, size_t n, Sign sign, Stream* stream) {
    const uint32_t factor = static_cast<uint32_t>(static_cast<int>(sign));
    switch (width) {
      case 1:
        return ForEach(AddCellsOp<uint8_t>{acc, cells, factor}, n, stream);
      case 2:
        return ForEach(AddCellsOp<uint16_t>{acc, cells, factor}, n, stream);
      default:
        return ForEach(AddCellsOp<uint32_t>{acc, cells, factor}, n, stream);
    }
  }

  // Writes sums and resolved of all count.most elements. Precondition: count.most < 2^31.
  void SketchPeel(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions, ElementCount count,
                  int32_t* sums, uint8_t* resolved, Stream* stream) {
    if (count.most == 0) return;
    device_.Fill(sums, 0, count.most * sizeof(*sums), stream);
    device_.Fill(resolved, 0, count.most, stream);
    if (args.groups == 0) return;
    const Scratch<Device> memory(device_, GroupBytes(count, args), stream);
    const SketchGroups groups = Group(positions, count, args, memory.as(), stream);
    switch (args.cell_bytes) {
      case 1:
        return Peel<uint8_t>(groups, cells, sums, resolved, stream);
      case 2:
        return Peel<uint16_t>(groups, cells, sums, resolved, stream);
      default:
        return Peel<uint32_t>(groups, cells, sums, resolved, stream);
    }
  }

  // Optimizer -----------------------------------------------------------------------------------------------------
  void Sgd(float* p, const float* g, float* momentum, size_t n, const SgdCoefficients& c, Stream* stream) {
    if (c.momentum == 0.0f) {
      ForEach(SgdOp{p, g, c}, n, stream);
    } else {
      ForEach(SgdMomentumOp{p, g, momentum, c}, n, stream);
    }
  }
  void AdamW(float* p, const float* g, float* m, float* v, size_t n, const AdamWCoefficients& c, Stream* stream) {
    ForEach(AdamWOp{p, g, m, v, c}, n, stream);
  }
  void PlainStep(float* p, const float* mean, size_t n, float learning_rate, float weight_decay, Stream* stream) {
    ForEach(PlainStepOp{p, mean, learning_rate, weight_decay}, n, stream);
  }
  void MeansOfIntegers(const int32_t* sums, size_t n, const RunScales& scales, uint32_t contributors, float* out,
                       Stream* stream) {
    ForEach(MeansOfIntegersOp{sums, scales, out, static_cast<float>(contributors)}, n, stream);
  }
  void ScatterMeans(const uint32_t* positions, const int32_t* integers, size_t n, const RunScales& scales,
                    uint32_t contributors, float* out, Stream* stream) {
    Scatter(ScatterMeansOp{positions, integers, scales, out, static_cast<float>(contributors)}, {n, nullptr}, stream);
  }
  void SparsePlainSteps(float* const* p, const uint32_t* positions, const int32_t* integers, size_t n,
                        const RunScales& scales, const float* learning_rates, uint32_t contributors, Stream* stream) {
    Scatter(SparsePlainStepsOp{p, positions, integers, scales, learning_rates, static_cast<float>(contributors)},
            {n, nullptr}, stream);
  }
  void SparsePlainStep(float* p, const uint32_t* positions, const int32_t* integers, ElementCount count,
                       uint32_t first_position, int exponent, uint32_t contributors, float learning_rate,
                       Stream* stream) {
    Scatter(SparsePlainStepOp{p, positions, integers, first_position, PowerOfTwo(exponent),
                              static_cast<float>(contributors), learning_rate},
            count, stream);
  }

 private:
  static uint64_t Blocks(uint64_t n, uint64_t tile) { return (n + tile - 1) / tile; }

  template <class Op>
  void ForEach(const Op& op, size_t n, Stream* stream) {
    device_.Launch(Elementwise<Op>{op, n, op.aligned()}, Blocks(n, Elementwise<Op>::kTile), 0, stream);
  }

  template <class Op>
  void Scatter(const Op& op, ElementCount count, Stream* stream) {
    device_.Launch(Scattered<Op>{op, count}, Blocks(count.most, Scattered<Op>::kTile), 0, stream);
  }

  template <class Op>
  void ForEachOfRuns(const RunPlaces& runs, const Op& op, Stream* stream) {
    const uint32_t tiles = static_cast<uint32_t>(Blocks(runs.longest, EachOfRuns<Op>::kTile));
    device_.Launch(EachOfRuns<Op>{op, runs.at, tiles}, uint64_t{runs.count} * tiles, 0, stream);
  }

  template <class Source>
  void TakeFrom(const Source& source, uint64_t count, int32_t limit, uint32_t* positions, int32_t* integers,
                uint64_t* taken, Stream* stream) {
    using Tiles = typename Device::Tiles;
    using Body = Take<Tiles, Source>;
    const uint32_t tiles = static_cast<uint32_t>(count);
    const size_t bytes = device_.TileBytes(tiles);
    const Scratch<Device> memory(device_, bytes, stream);
    const Tiles state = device_.MakeTiles(tiles, memory.as(), bytes);
    device_.Launch(InitTiles<Tiles>{state, tiles}, Blocks(tiles + 32, InitTiles<Tiles>::kTuning.threads), 0, stream);
    device_.Launch(Body{source, LargestFloatWithin(limit), positions, integers, taken, state}, tiles,
                   Body::SharedBytes(), stream);
  }

  // A grid that strides: as many blocks as the device holds at once, and fewer than 2^31 elements for each.
  template <class Body>
  void Strided(const Body& body, uint64_t n, size_t shared_bytes, Stream* stream) {
    const uint64_t full = uint64_t{device_.units()} * Body::kTuning.blocks_per_unit;
    const uint64_t blocks = std::max(std::min(full, Blocks(n, 4 * Body::kTuning.threads)), n >> 30);
    device_.Launch(body, blocks, shared_bytes, stream);
  }

  void UpperHistogram(const float* x, const LineSample& sample, uint64_t* bins, Stream* stream) {
    Count(Histogram<false>{x, sample, IsAligned<float, 4>(x), 0, nullptr, bins}, stream);
  }
  // `selection`: null, or what `upper` is taken from.
  void LowerHistogram(const float* x, const LineSample& sample, uint32_t upper, const DeviceSelection* selection,
                      uint64_t* bins, Stream* stream) {
    Count(Histogram<true>{x, sample, IsAligned<float, 4>(x), upper, selection, bins}, stream);
  }
  template <bool kLower>
  void Count(const Histogram<kLower>& body, Stream* stream) {
    device_.Fill(body.bins, 0, Histogram<kLower>::kBins * sizeof(uint64_t), stream);
    Strided(body, body.sample.size, Histogram<kLower>::kCounters * sizeof(uint32_t), stream);
  }

  static size_t GroupBytes(ElementCount count, const SketchArgs& args) {
    return count.most * sizeof(SketchItem) + (2 * size_t{args.groups} + 1) * sizeof(uint32_t);
  }

  SketchGroups Group(const uint32_t* positions, ElementCount count, const SketchArgs& args, uint8_t* memory,
                     Stream* stream) {
    SketchGroups s = {positions, count, args.salt, args.groups, args.cells_per_group / 3, nullptr, nullptr, nullptr};
    s.items = reinterpret_cast<SketchItem*>(memory);
    s.cursor = reinterpret_cast<uint32_t*>(s.items + count.most);
    s.offsets = s.cursor + args.groups;
    const size_t shared = args.groups <= tuning::kSharedGroups ? args.groups * sizeof(uint32_t) : 0;
    const uint64_t blocks = Blocks(count.most, CountByGroup::kTile);
    device_.Fill(s.cursor, 0, args.groups * sizeof(uint32_t), stream);
    device_.Launch(CountByGroup{s}, blocks, shared, stream);
    device_.Launch(ScanGroups{s}, 1, 0, stream);
    device_.Launch(ScatterToGroups{s}, blocks, shared, stream);
    return s;
  }

  // Blocks that may each have `slot_bytes` of scratch memory.
  static uint64_t Slots(uint64_t slot_bytes, uint32_t groups) {
    return std::clamp<uint64_t>(tuning::kWideScratchBytes / slot_bytes, 1, groups);
  }

  template <class T>
  void Peel(const SketchGroups& s, const uint8_t* cells, int32_t* sums, uint8_t* resolved, Stream* stream) {
    using Narrow = PeelGroups<T, uint32_t, uint16_t>;
    using Wide = PeelGroups<T, uint64_t, uint32_t>;
    const bool aligned = reinterpret_cast<uintptr_t>(cells) % sizeof(T) == 0;
    const uint64_t bytes = Narrow::SlotBytes(s.third);
    const bool fits = bytes <= device_.shared_limit() && uint64_t{3} * s.third <= Narrow::kMaxCells;
    if (fits) device_.Launch(Narrow{s, cells, aligned, sums, resolved, 0, nullptr}, s.groups, bytes, stream);
    // Groups with more elements than the narrow words can number exist only if so many elements are given at all.
    if (fits && s.count.most <= Narrow::kMaxElements) return;
    const uint64_t least = fits ? Narrow::kMaxElements + 1 : 0;
    const uint64_t blocks = Slots(Wide::SlotBytes(s.third), s.groups);
    const Scratch<Device> slots(device_, blocks * Wide::SlotBytes(s.third), stream);
    device_.Launch(Wide{s, cells, aligned, sums, resolved, least, slots.as()}, blocks, 0, stream);
  }

  Device& device_;
};

}  // namespace gradwire::kernels::cuda
