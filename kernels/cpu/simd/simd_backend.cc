// The SIMD backend's class, once per target, and the choice among them.
#include "kernels/cpu/simd/simd_backend.h"

#include "kernels/cpu/reference/loops.h"
#include "kernels/cpu/reference/reference_backend.h"
#include "kernels/cpu/simd/buffer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/simd/simd_backend.cc"
// What lacks AVX2 runs the reference, which the compiler vectorises as well as such a machine can.
// Vectors of SVE cannot be members, and NEON is always there.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include "kernels/cpu/simd/dense-inl.h"
#include "kernels/cpu/simd/optimizer-inl.h"
#include "kernels/cpu/simd/select-inl.h"
#include "kernels/cpu/simd/sketch-inl.h"
#include "kernels/cpu/simd/stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels {
namespace HWY_NAMESPACE {

// What is not overridden here the compiler already vectorises to the speed of memory: ReferenceBackend runs it.
class SimdBackend final : public ReferenceBackend {
 public:
  explicit SimdBackend(std::string_view name) : name_(name) {}
  std::string_view name() const override { return name_; }

  void AddFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream*) override {
    HWY_NAMESPACE::AddFloats(acc, values, width, n, sign);
  }
  void AssignIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Stream*) override {
    HWY_NAMESPACE::AssignIntegers(acc, values, width, n);
  }
  bool AssignWords(int32_t* acc, const uint8_t* values, size_t n, const WordRange& range) override {
    return HWY_NAMESPACE::AssignWords(acc, values, n, range);
  }
  void AssignFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Stream*) override {
    HWY_NAMESPACE::AssignFloats(acc, values, width, n);
  }
  int64_t FindOutOfGrid(const uint8_t* values, int width, size_t n, uint32_t limit_bits, Stream*) override {
    return FindMagnitude(values, width, n, limit_bits);
  }
  void GridToMean(const int64_t* acc, size_t n, uint32_t contributors, float* out, Stream*) override {
    HWY_NAMESPACE::GridToMean(acc, n, contributors, out);
  }
  void FloatsToMean(const uint8_t* values, int width, size_t n, uint32_t contributors, float* out) override {
    HWY_NAMESPACE::FloatsToMean(values, width, n, contributors, out);
  }
  void Quantize(float* x, size_t n, int exponent, int32_t limit, int width, uint8_t* q, Stream*) override {
    HWY_NAMESPACE::Quantize(x, n, exponent, limit, width, q);
  }
  int RangeOf(const float* x, size_t n, Stream*) override { return HWY_NAMESPACE::RangeOf(x, n); }
  int64_t FindNonFinite(const float* x, size_t n, Stream*) override {
    return FindMagnitude(reinterpret_cast<const uint8_t*>(x), 4, n, reference::kInfinityBits);
  }

  void AddPreconditioned(float* x, const float* gradient, float* second_moment, size_t n,
                         const PreconditionCoefficients& c, Stream*) override {
    HWY_NAMESPACE::AddPreconditioned(x, gradient, second_moment, n, c);
  }
  Threshold FindThreshold(const float* x, size_t n, double wanted, Accuracy accuracy, Stream* stream) override {
    Threshold found;
    if (FindThresholdByBracket(x, SampleOf(n, wanted, accuracy), &found)) return found;
    return Backend::FindThreshold(x, n, wanted, accuracy, stream);
  }
  void MarkAtLeast(const float* x, size_t n, uint32_t least, uint64_t* words) override {
    HWY_NAMESPACE::MarkAtLeast(x, n, least, words);
  }
  size_t TakeSelected(float* x, size_t n, const SelectArgs& args, uint32_t first_position, uint32_t* positions,
                      int32_t* integers, Stream*) override {
    return HWY_NAMESPACE::TakeSelected(x, n, args, first_position, positions, integers);
  }

  void SketchAdd(const uint32_t* positions, const int32_t* integers, size_t n, const SketchArgs& args, uint8_t* cells,
                 Stream*) override {
    HWY_NAMESPACE::SketchAdd(positions, integers, n, args, cells);
  }
  void SketchPeel(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions, size_t n, int32_t* sums,
                  uint8_t* resolved, Stream*) override {
    HWY_NAMESPACE::SketchPeel(cells, args, positions, n, sums, resolved);
  }

  void AdamW(float* p, const float* g, float* m, float* v, size_t n, const AdamWCoefficients& c, Stream*) override {
    HWY_NAMESPACE::AdamW(p, g, m, v, n, c);
  }

 private:
  const std::string_view name_;
};

Backend* NewSimdBackend(std::string_view name) { return new SimdBackend(name); }

}  // namespace HWY_NAMESPACE
}  // namespace gradwire::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradwire::kernels {
namespace {

struct Target {
  std::string_view name;  // as in "cpu:NAME"
  std::string_view backend_name;
  int64_t bit;  // of hwy::SupportedTargets
  Backend* (*make)(std::string_view name);
};

// Best first.
constexpr Target kTargets[] = {
#if HWY_TARGETS & HWY_AVX3
    {"avx512", "cpu:avx512", HWY_AVX3, &N_AVX3::NewSimdBackend},
#endif
#if HWY_TARGETS & HWY_AVX2
    {"avx2", "cpu:avx2", HWY_AVX2, &N_AVX2::NewSimdBackend},
#endif
#if HWY_TARGETS & HWY_NEON
    {"neon", "cpu:neon", HWY_NEON, &N_NEON::NewSimdBackend},
#endif
    {"", "", 0, nullptr},  // so that the table is never empty
};

}  // namespace

std::vector<std::string> SimdTargets() {
  std::vector<std::string> names;
  for (const Target& target : kTargets) {
    if ((hwy::SupportedTargets() & target.bit) != 0) names.emplace_back(target.name);
  }
  return names;
}

std::unique_ptr<Backend> MakeSimdBackend(std::string_view name) {
  for (const Target& target : kTargets) {
    if (target.name != name || (hwy::SupportedTargets() & target.bit) == 0) continue;
    return std::unique_ptr<Backend>(target.make(target.backend_name));
  }
  return nullptr;
}

}  // namespace gradwire::kernels
#endif  // HWY_ONCE
