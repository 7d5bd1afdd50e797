// The reference backend: plain loops over kernels/math, one element after the other. What every other backend must
// match bit for bit, and fast enough to run on (the compiler vectorises the element-wise loops). The SIMD backends
// derive from it and override what they do better.
#pragma once

#include <memory>

#include "kernels/backend.h"
#include "kernels/cpu/reference/loops.h"

namespace gradwire::kernels {

class ReferenceBackend : public Backend {
 public:
  std::string_view name() const override { return "reference"; }
  bool host_memory() const override { return true; }

  void AddIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream*) override {
    reference::AddIntegers(acc, values, width, n, static_cast<uint32_t>(static_cast<int>(sign)));
  }
  void AddFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream*) override {
    reference::AddFloats(acc, values, width, n, sign);
  }
  void AssignIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Stream*) override {
    reference::AssignIntegers(acc, values, width, n);
  }
  void AssignFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Stream*) override {
    reference::AssignFloats(acc, values, width, n);
  }
  int64_t FindOutOfGrid(const uint8_t* values, int width, size_t n, uint32_t limit_bits, Stream*) override {
    return reference::FindMagnitude(values, width, n, limit_bits);
  }
  void GridToMean(const int64_t* acc, size_t n, uint32_t contributors, float* out, Stream*) override {
    reference::GridToMean(acc, n, contributors, out);
  }

  void Quantize(float* x, size_t n, int exponent, int32_t limit, int width, uint8_t* q, Stream*) override {
    reference::Quantize(x, n, exponent, limit, width, q);
  }
  void Dequantize(const uint8_t* q, int width, size_t n, int exponent, float* x, Stream*) override {
    reference::Dequantize(q, width, n, exponent, x);
  }
  void SplitBf16(float* x, size_t n, float largest, uint8_t* out, Stream*) override {
    reference::SplitBf16(x, n, largest, out);
  }
  void AddBf16(const uint8_t* values, size_t n, float* x, Stream*) override { reference::AddBf16(values, n, x); }
  int RangeOf(const float* x, size_t n, Stream*) override { return reference::RangeOf(x, n); }

  int64_t FindNonFinite(const float* x, size_t n, Stream*) override {
    return reference::FindMagnitude(reinterpret_cast<const uint8_t*>(x), 4, n, reference::kInfinityBits);
  }
  void Add(float* x, const float* y, size_t n, Stream*) override { reference::Add(x, y, n); }
  void AddPreconditioned(float* x, const float* gradient, float* second_moment, size_t n,
                         const PreconditionCoefficients& c, Stream*) override {
    reference::AddPreconditioned(x, gradient, second_moment, n, c);
  }
  void UpperHistogram(const float* x, size_t n, uint64_t* bins, Stream*) override {
    reference::UpperHistogram(x, n, bins);
  }
  void LowerHistogram(const float* x, size_t n, uint32_t upper, uint64_t* bins, Stream*) override {
    reference::LowerHistogram(x, n, upper, bins);
  }
  size_t TakeSelected(float* x, size_t n, const SelectArgs& args, uint32_t first_position, uint32_t* positions,
                      int32_t* integers, Stream*) override {
    return reference::TakeSelected(x, n, args, first_position, positions, integers);
  }

  void SketchAdd(const uint32_t* positions, const int32_t* integers, size_t n, const SketchArgs& args, uint8_t* cells,
                 Stream*) override {
    reference::SketchAdd(positions, integers, n, args, cells);
  }
  void AddCells(uint8_t* acc, const uint8_t* cells, int width, size_t n, Sign sign, Stream*) override {
    reference::AddCells(acc, cells, width, n, sign);
  }
  void SketchPeel(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions, size_t n, int32_t* sums,
                  uint8_t* resolved, Stream*) override {
    reference::SketchPeel(cells, args, positions, n, sums, resolved);
  }

  void Sgd(float* p, const float* g, float* momentum, size_t n, const SgdCoefficients& c, Stream*) override {
    reference::Sgd(p, g, momentum, n, c);
  }
  void AdamW(float* p, const float* g, float* m, float* v, size_t n, const AdamWCoefficients& c, Stream*) override {
    reference::AdamW(p, g, m, v, n, c);
  }
  void PlainStep(float* p, const float* mean, size_t n, float learning_rate, float weight_decay, Stream*) override {
    reference::PlainStep(p, mean, n, learning_rate, weight_decay);
  }
  void SparsePlainStep(float* p, const uint32_t* positions, const int32_t* integers, size_t n, uint32_t first_position,
                       int exponent, uint32_t contributors, float learning_rate, Stream*) override {
    reference::SparsePlainStep(p, positions, integers, n, first_position, exponent, contributors, learning_rate);
  }

  void Synchronize(Stream*) override {}
};

std::unique_ptr<Backend> MakeReferenceBackend();

}  // namespace gradwire::kernels
