// The loops of the reference backend, by theme: dense.cc, select.cc, sketch.cc, optimizer.cc. Contracts: backend.h.
#pragma once

#include "kernels/backend.h"

namespace gradwire::kernels::reference {

inline constexpr uint32_t kInfinityBits = 0x7F800000u;

void AddIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, uint32_t sign);
void AddFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign);
void AssignIntegers(int32_t* acc, const uint8_t* values, int width, size_t n);
bool AssignWords(int32_t* acc, const uint8_t* values, size_t n, const WordRange& range);
void AssignFloats(int64_t* acc, const uint8_t* values, int width, size_t n);
// Index of the first float32 (width 4) or bfloat16 (width 2) whose magnitude has bits >= limit_bits, or -1.
int64_t FindMagnitude(const uint8_t* values, int width, size_t n, uint32_t limit_bits);
void GridToMean(const int64_t* acc, size_t n, uint32_t contributors, float* out);
void FloatsToMean(const uint8_t* values, int width, size_t n, uint32_t contributors, float* out);
void Quantize(float* x, size_t n, int exponent, int32_t limit, int width, uint8_t* q);
void Dequantize(const uint8_t* q, int width, size_t n, int exponent, float* x);
void SplitBf16(float* x, size_t n, float largest, uint8_t* out);
void AddBf16(const uint8_t* values, size_t n, float* x);
int RangeOf(const float* x, size_t n);

void Add(float* x, const float* y, size_t n);
void AddPreconditioned(float* x, const float* gradient, float* second_moment, size_t n,
                       const PreconditionCoefficients& c);
void UpperHistogram(const float* x, size_t n, uint64_t* bins);
void LowerHistogram(const float* x, size_t n, uint32_t upper, uint64_t* bins);
void MarkAtLeast(const float* x, size_t n, uint32_t least, uint64_t* words);
size_t TakeSelected(float* x, size_t n, const SelectArgs& args, uint32_t first_position, uint32_t* positions,
                    int32_t* integers);

void SketchAdd(const uint32_t* positions, const int32_t* integers, size_t n, const SketchArgs& args, uint8_t* cells);
void AddCells(uint8_t* acc, const uint8_t* cells, int width, size_t n, Sign sign);
void SketchPeel(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions, size_t n, int32_t* sums,
                uint8_t* resolved);

void Sgd(float* p, const float* g, float* momentum, size_t n, const SgdCoefficients& c);
void AdamW(float* p, const float* g, float* m, float* v, size_t n, const AdamWCoefficients& c);
void PlainStep(float* p, const float* mean, size_t n, float learning_rate, float weight_decay);
void SparsePlainStep(float* p, const uint32_t* positions, const int32_t* integers, size_t n, uint32_t first_position,
                     int exponent, uint32_t contributors, float learning_rate);

}  // namespace gradwire::kernels::reference
