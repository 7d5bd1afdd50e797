// See staged_backend.h.
#include "kernels/cuda/staged_backend.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "kernels/math/select.h"

namespace gradwire::kernels::cuda {
namespace {

// The copy of an array on the device: made from the host's at the start, written back at the end, or both.
template <class T, bool kIn, bool kOut>
class Copy {
 public:
  Copy(DeviceRuntime& runtime, const T* host, size_t n) : runtime_(runtime), host_(host), bytes_(n * sizeof(T)) {
    if (bytes_ == 0) return;
    device_ = static_cast<T*>(runtime.Allocate(bytes_, nullptr));
    if (device_ == nullptr) {
      std::fprintf(stderr, "gradwire: no %zu bytes of GPU memory left for an operation on host memory\n", bytes_);
      std::abort();
    }
    if (kIn) runtime.ToDevice(device_, host, bytes_, nullptr);
  }
  ~Copy() {
    if (bytes_ == 0) return;
    if (kOut) runtime_.ToHost(const_cast<T*>(host_), device_, bytes_, nullptr);
    runtime_.Free(device_, nullptr);
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  T* get() const { return device_; }

 private:
  DeviceRuntime& runtime_;
  const T* const host_;
  const size_t bytes_;
  T* device_ = nullptr;
};

template <class T>
using In = Copy<T, true, false>;
template <class T>
using Out = Copy<T, false, true>;
template <class T>
using InOut = Copy<T, true, true>;

class StagedBackend final : public Backend {
 public:
  explicit StagedBackend(std::unique_ptr<AsyncBackend> device)
      : device_(std::move(device)), runtime_(device_->runtime()) {}

  std::string_view name() const override { return device_->name(); }
  bool host_memory() const override { return true; }

  void AddIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream*) override {
    const InOut<int32_t> a(runtime_, acc, n);
    const In<uint8_t> v(runtime_, values, Bytes(n, width));
    device_->AddIntegers(a.get(), v.get(), width, n, sign, nullptr);
  }
  void AddFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream*) override {
    const InOut<int64_t> a(runtime_, acc, n);
    const In<uint8_t> v(runtime_, values, Bytes(n, width));
    device_->AddFloats(a.get(), v.get(), width, n, sign, nullptr);
  }
  void AssignIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Stream*) override {
    const Out<int32_t> a(runtime_, acc, n);
    const In<uint8_t> v(runtime_, values, Bytes(n, width));
    device_->AssignIntegers(a.get(), v.get(), width, n, nullptr);
  }
  void AssignFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Stream*) override {
    const Out<int64_t> a(runtime_, acc, n);
    const In<uint8_t> v(runtime_, values, Bytes(n, width));
    device_->AssignFloats(a.get(), v.get(), width, n, nullptr);
  }
  int64_t FindOutOfGrid(const uint8_t* values, int width, size_t n, uint32_t limit_bits, Stream*) override {
    const In<uint8_t> v(runtime_, values, Bytes(n, width));
    return device_->FindOutOfGrid(v.get(), width, n, limit_bits, nullptr);
  }
  void GridToMean(const int64_t* acc, size_t n, uint32_t contributors, float* out, Stream*) override {
    const In<int64_t> a(runtime_, acc, n);
    const Out<float> o(runtime_, out, n);
    device_->GridToMean(a.get(), n, contributors, o.get(), nullptr);
  }

  void Quantize(float* x, size_t n, int exponent, int32_t limit, int width, uint8_t* q, Stream*) override {
    const InOut<float> dx(runtime_, x, n);
    const Out<uint8_t> dq(runtime_, q, Bytes(n, width));
    device_->Quantize(dx.get(), n, exponent, limit, width, dq.get(), nullptr);
  }
  void Dequantize(const uint8_t* q, int width, size_t n, int exponent, float* x, Stream*) override {
    const InOut<float> dx(runtime_, x, n);
    const In<uint8_t> dq(runtime_, q, Bytes(n, width));
    device_->Dequantize(dq.get(), width, n, exponent, dx.get(), nullptr);
  }
  void SplitBf16(float* x, size_t n, float largest, uint8_t* out, Stream*) override {
    const InOut<float> dx(runtime_, x, n);
    const Out<uint8_t> o(runtime_, out, 2 * n);
    device_->SplitBf16(dx.get(), n, largest, o.get(), nullptr);
  }
  void AddBf16(const uint8_t* values, size_t n, float* x, Stream*) override {
    const In<uint8_t> v(runtime_, values, 2 * n);
    const InOut<float> dx(runtime_, x, n);
    device_->AddBf16(v.get(), n, dx.get(), nullptr);
  }
  int RangeOf(const float* x, size_t n, Stream*) override {
    const In<float> dx(runtime_, x, n);
    return device_->RangeOf(dx.get(), n, nullptr);
  }

  int64_t FindNonFinite(const float* x, size_t n, Stream*) override {
    const In<float> dx(runtime_, x, n);
    return device_->FindNonFinite(dx.get(), n, nullptr);
  }
  void Add(float* x, const float* y, size_t n, Stream*) override {
    const InOut<float> dx(runtime_, x, n);
    const In<float> dy(runtime_, y, n);
    device_->Add(dx.get(), dy.get(), n, nullptr);
  }
  void AddPreconditioned(float* x, const float* gradient, float* second_moment, size_t n,
                         const PreconditionCoefficients& c, Stream*) override {
    const InOut<float> dx(runtime_, x, n), dv(runtime_, second_moment, n);
    const In<float> dg(runtime_, gradient, n);
    device_->AddPreconditioned(dx.get(), dg.get(), dv.get(), n, c, nullptr);
  }
  void UpperHistogram(const float* x, size_t n, uint64_t* bins, Stream*) override {
    const In<float> dx(runtime_, x, n);
    const Out<uint64_t> b(runtime_, bins, size_t{1} << kUpperBits);
    device_->UpperHistogram(dx.get(), n, b.get(), nullptr);
  }
  void LowerHistogram(const float* x, size_t n, uint32_t upper, uint64_t* bins, Stream*) override {
    const In<float> dx(runtime_, x, n);
    const Out<uint64_t> b(runtime_, bins, size_t{1} << kLowerBits);
    device_->LowerHistogram(dx.get(), n, upper, b.get(), nullptr);
  }
  Threshold FindThreshold(const float* x, size_t n, double wanted, Accuracy accuracy, Stream*) override {
    const In<float> dx(runtime_, x, n);
    return device_->FindThreshold(dx.get(), n, wanted, accuracy, nullptr);
  }
  size_t TakeSelected(float* x, size_t n, const SelectArgs& args, uint32_t first_position, uint32_t* positions,
                      int32_t* integers, Stream*) override {
    const InOut<float> dx(runtime_, x, n);
    const Copy<uint32_t, false, false> p(runtime_, positions, n);
    const Copy<int32_t, false, false> q(runtime_, integers, n);
    const size_t taken = device_->TakeSelected(dx.get(), n, args, first_position, p.get(), q.get(), nullptr);
    runtime_.ToHost(positions, p.get(), taken * sizeof(*positions), nullptr);
    runtime_.ToHost(integers, q.get(), taken * sizeof(*integers), nullptr);
    return taken;
  }

  void SketchAdd(const uint32_t* positions, const int32_t* integers, size_t n, const SketchArgs& args, uint8_t* cells,
                 Stream*) override {
    const In<uint32_t> p(runtime_, positions, n);
    const In<int32_t> q(runtime_, integers, n);
    const InOut<uint8_t> c(runtime_, cells, CellBytes(args));
    device_->SketchAdd(p.get(), q.get(), n, args, c.get(), nullptr);
  }
  void AddCells(uint8_t* acc, const uint8_t* cells, int width, size_t n, Sign sign, Stream*) override {
    const InOut<uint8_t> a(runtime_, acc, Bytes(n, width));
    const In<uint8_t> c(runtime_, cells, Bytes(n, width));
    device_->AddCells(a.get(), c.get(), width, n, sign, nullptr);
  }
  void SketchPeel(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions, size_t n, int32_t* sums,
                  uint8_t* resolved, Stream*) override {
    const In<uint8_t> c(runtime_, cells, CellBytes(args));
    const In<uint32_t> p(runtime_, positions, n);
    const Out<int32_t> s(runtime_, sums, n);
    const Out<uint8_t> r(runtime_, resolved, n);
    device_->SketchPeel(c.get(), args, p.get(), n, s.get(), r.get(), nullptr);
  }

  void Sgd(float* p, const float* g, float* momentum, size_t n, const SgdCoefficients& c, Stream*) override {
    const InOut<float> dp(runtime_, p, n), dm(runtime_, momentum, c.momentum == 0 ? 0 : n);
    const In<float> dg(runtime_, g, n);
    device_->Sgd(dp.get(), dg.get(), dm.get(), n, c, nullptr);
  }
  void AdamW(float* p, const float* g, float* m, float* v, size_t n, const AdamWCoefficients& c, Stream*) override {
    const InOut<float> dp(runtime_, p, n), dm(runtime_, m, n), dv(runtime_, v, n);
    const In<float> dg(runtime_, g, n);
    device_->AdamW(dp.get(), dg.get(), dm.get(), dv.get(), n, c, nullptr);
  }
  void PlainStep(float* p, const float* mean, size_t n, float learning_rate, float weight_decay, Stream*) override {
    const InOut<float> dp(runtime_, p, n);
    const In<float> dm(runtime_, mean, n);
    device_->PlainStep(dp.get(), dm.get(), n, learning_rate, weight_decay, nullptr);
  }
  void SparsePlainStep(float* p, const uint32_t* positions, const int32_t* integers, size_t n, uint32_t first_position,
                       int exponent, uint32_t contributors, float learning_rate, Stream*) override {
    if (n == 0) return;
    const auto [least, most] = std::minmax_element(positions, positions + n);
    const InOut<float> dp(runtime_, p + (*least - first_position), size_t{*most - *least} + 1);
    const In<uint32_t> dpos(runtime_, positions, n);
    const In<int32_t> q(runtime_, integers, n);
    device_->SparsePlainStep(dp.get(), dpos.get(), q.get(), n, *least, exponent, contributors, learning_rate, nullptr);
  }

  void Synchronize(Stream*) override {}

 private:
  static size_t Bytes(size_t n, int width) { return n * static_cast<size_t>(width); }
  static size_t CellBytes(const SketchArgs& args) {
    return size_t{args.groups} * args.cells_per_group * static_cast<size_t>(args.cell_bytes);
  }

  const std::unique_ptr<AsyncBackend> device_;
  DeviceRuntime& runtime_;
};

}  // namespace

std::unique_ptr<Backend> MakeStagedBackend(std::unique_ptr<AsyncBackend> device) {
  return std::make_unique<StagedBackend>(std::move(device));
}

}  // namespace gradwire::kernels::cuda
