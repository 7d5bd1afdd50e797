// AsyncBackend over any device: forwards to Operations, and waits where Backend returns a value.
#pragma once

#include <algorithm>
#include <string_view>
#include <utility>

#include "kernels/cuda/async_backend.h"
#include "kernels/cuda/operations.h"

namespace gradwire::kernels::cuda {

// Device is also a DeviceRuntime and outlives this, as does `name`.
template <class Device>
class DeviceBackend : public AsyncBackend {
 public:
  DeviceBackend(Device* device, std::string_view name) : device_(*device), operations_(device), name_(name) {}

  std::string_view name() const override { return name_; }
  bool host_memory() const override { return false; }
  DeviceRuntime& runtime() override { return device_; }

  void AddIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream* stream) override {
    operations_.AddIntegers(acc, values, width, n, sign, stream);
  }
  void AddFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream* stream) override {
    operations_.AddFloats(acc, values, width, n, sign, stream);
  }
  void AssignIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Stream* stream) override {
    operations_.AssignIntegers(acc, values, width, n, stream);
  }
  void AssignFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Stream* stream) override {
    operations_.AssignFloats(acc, values, width, n, stream);
  }
  int64_t FindOutOfGrid(const uint8_t* values, int width, size_t n, uint32_t limit_bits, Stream* stream) override {
    return static_cast<int64_t>(Result<uint64_t>(
        stream, [&](uint64_t* first) { operations_.FindMagnitude(values, width, n, limit_bits, first, stream); }));
  }
  void GridToMean(const int64_t* acc, size_t n, uint32_t contributors, float* out, Stream* stream) override {
    operations_.GridToMean(acc, n, contributors, out, stream);
  }

  void Quantize(float* x, size_t n, int exponent, int32_t limit, int width, uint8_t* q, Stream* stream) override {
    operations_.Quantize(x, n, exponent, limit, width, q, stream);
  }
  void Dequantize(const uint8_t* q, int width, size_t n, int exponent, float* x, Stream* stream) override {
    operations_.Dequantize(q, width, n, exponent, x, stream);
  }
  void SplitBf16(float* x, size_t n, float largest, uint8_t* out, Stream* stream) override {
    operations_.SplitBf16(x, n, largest, out, stream);
  }
  void AddBf16(const uint8_t* values, size_t n, float* x, Stream* stream) override {
    operations_.AddBf16(values, n, x, stream);
  }
  int RangeOf(const float* x, size_t n, Stream* stream) override {
    return RangeOfLargest(
        Result<uint32_t>(stream, [&](uint32_t* bits) { operations_.LargestMagnitude(x, n, bits, stream); }));
  }

  int64_t FindNonFinite(const float* x, size_t n, Stream* stream) override {
    return static_cast<int64_t>(
        Result<uint64_t>(stream, [&](uint64_t* first) { operations_.FindNonFinite(x, n, first, stream); }));
  }
  void Add(float* x, const float* y, size_t n, Stream* stream) override { operations_.Add(x, y, n, stream); }
  void AddPreconditioned(float* x, const float* gradient, float* second_moment, size_t n,
                         const PreconditionCoefficients& c, Stream* stream) override {
    operations_.AddPreconditioned(x, gradient, second_moment, n, c, stream);
  }
  void UpperHistogram(const float* x, size_t n, uint64_t* bins, Stream* stream) override {
    operations_.UpperHistogram(x, n, bins, stream);
  }
  void LowerHistogram(const float* x, size_t n, uint32_t upper, uint64_t* bins, Stream* stream) override {
    operations_.LowerHistogram(x, n, upper, bins, stream);
  }
  Threshold FindThreshold(const float* x, size_t n, double wanted, Accuracy accuracy, Stream* stream) override {
    const DeviceSelection found = Result<DeviceSelection>(stream, [&](DeviceSelection* selection) {
      operations_.FindThreshold(x, n, wanted, accuracy, selection, stream);
    });
    return {found.key, found.keep_below};
  }
  size_t TakeSelected(float* x, size_t n, const SelectArgs& args, uint32_t first_position, uint32_t* positions,
                      int32_t* integers, Stream* stream) override {
    return Result<uint64_t>(stream, [&](uint64_t* taken) {
      operations_.TakeSelected(x, n, args, nullptr, first_position, positions, integers, taken, stream);
    });
  }

  void SketchAdd(const uint32_t* positions, const int32_t* integers, size_t n, const SketchArgs& args, uint8_t* cells,
                 Stream* stream) override {
    operations_.SketchAdd(positions, integers, {n, nullptr}, args, cells, stream);
  }
  void AddCells(uint8_t* acc, const uint8_t* cells, int width, size_t n, Sign sign, Stream* stream) override {
    operations_.AddCells(acc, cells, width, n, sign, stream);
  }
  void SketchPeel(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions, size_t n, int32_t* sums,
                  uint8_t* resolved, Stream* stream) override {
    operations_.SketchPeel(cells, args, positions, {n, nullptr}, sums, resolved, stream);
  }

  void Sgd(float* p, const float* g, float* momentum, size_t n, const SgdCoefficients& c, Stream* stream) override {
    operations_.Sgd(p, g, momentum, n, c, stream);
  }
  void AdamW(float* p, const float* g, float* m, float* v, size_t n, const AdamWCoefficients& c,
             Stream* stream) override {
    operations_.AdamW(p, g, m, v, n, c, stream);
  }
  void PlainStep(float* p, const float* mean, size_t n, float learning_rate, float weight_decay,
                 Stream* stream) override {
    operations_.PlainStep(p, mean, n, learning_rate, weight_decay, stream);
  }
  void SparsePlainStep(float* p, const uint32_t* positions, const int32_t* integers, size_t n, uint32_t first_position,
                       int exponent, uint32_t contributors, float learning_rate, Stream* stream) override {
    operations_.SparsePlainStep(p, positions, integers, {n, nullptr}, first_position, exponent, contributors,
                                learning_rate, stream);
  }

  void Synchronize(Stream* stream) override { device_.Synchronize(stream); }

  void FindOutOfGridAsync(const uint8_t* values, int width, size_t n, uint32_t limit_bits, uint64_t* first,
                          Stream* stream) override {
    operations_.FindMagnitude(values, width, n, limit_bits, first, stream);
  }
  void FindNonFiniteAsync(const float* x, size_t n, uint64_t* first, Stream* stream) override {
    operations_.FindNonFinite(x, n, first, stream);
  }
  void LargestMagnitudeAsync(const float* x, size_t n, uint32_t* largest, Stream* stream) override {
    operations_.LargestMagnitude(x, n, largest, stream);
  }
  void AddFloatsChecked(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign, uint32_t limit_bits,
                        uint64_t first_position, uint64_t* first_bad, Stream* stream) override {
    operations_.AddFloatsChecked(acc, values, width, n, sign, limit_bits, first_position, first_bad, stream);
  }
  void AddIntegersChecked(int32_t* acc, const uint8_t* values, int width, size_t n, Sign sign, int32_t limit,
                          uint64_t first_position, uint64_t* first_bad, Stream* stream) override {
    operations_.AddIntegersChecked(acc, values, width, n, sign, limit, first_position, first_bad, stream);
  }
  void TakeIn(float* x, const float* gradient, float* second_moment, size_t n, float decay,
              const PreconditionCoefficients& c, const uint64_t* bad, Stream* stream) override {
    operations_.TakeIn(x, gradient, second_moment, n, decay, c, bad, stream);
  }
  void FindThresholdAsync(const float* x, size_t n, double wanted, Accuracy accuracy, DeviceSelection* selection,
                          Stream* stream) override {
    operations_.FindThreshold(x, n, wanted, accuracy, selection, stream);
  }
  void TakeSelectedAsync(float* x, size_t n, const SelectArgs& args, const DeviceSelection* selection,
                         uint32_t first_position, uint32_t* positions, int32_t* integers, uint64_t* taken,
                         Stream* stream) override {
    operations_.TakeSelected(x, n, args, selection, first_position, positions, integers, taken, stream);
  }
  void TakeSelectedOfRuns(const RunPlaces& runs, int32_t limit, uint32_t* positions, int32_t* integers, uint64_t* taken,
                          Stream* stream) override {
    operations_.TakeSelectedOfRuns(runs, limit, positions, integers, taken, stream);
  }
  void LargestOfRuns(const RunPlaces& runs, uint32_t* largest, Stream* stream) override {
    operations_.LargestOfRuns(runs, largest, stream);
  }
  void QuantizeRuns(const RunPlaces& runs, int32_t limit, int width, uint8_t* out, Stream* stream) override {
    operations_.QuantizeRuns(runs, limit, width, out, stream);
  }
  void SplitBf16Runs(const RunPlaces& runs, float largest, uint8_t* out, Stream* stream) override {
    operations_.SplitBf16Runs(runs, largest, out, stream);
  }
  void CopyRuns(const RunPlaces& runs, float* out, Stream* stream) override { operations_.CopyRuns(runs, out, stream); }
  void CopyToRuns(const float* from, const RunPlaces& runs, Stream* stream) override {
    operations_.CopyToRuns(from, runs, stream);
  }
  void SketchAddAsync(const uint32_t* positions, const int32_t* integers, ElementCount count, const SketchArgs& args,
                      uint8_t* cells, Stream* stream) override {
    operations_.SketchAdd(positions, integers, count, args, cells, stream);
  }
  void SketchPeelAsync(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions, ElementCount count,
                       int32_t* sums, uint8_t* resolved, Stream* stream) override {
    operations_.SketchPeel(cells, args, positions, count, sums, resolved, stream);
  }
  void SparsePlainStepAsync(float* p, const uint32_t* positions, const int32_t* integers, ElementCount count,
                            uint32_t first_position, int exponent, uint32_t contributors, float learning_rate,
                            Stream* stream) override {
    operations_.SparsePlainStep(p, positions, integers, count, first_position, exponent, contributors, learning_rate,
                                stream);
  }
  void MeansOfIntegers(const int32_t* sums, size_t n, const RunScales& scales, uint32_t contributors, float* out,
                       Stream* stream) override {
    operations_.MeansOfIntegers(sums, n, scales, contributors, out, stream);
  }
  void ScatterMeans(const uint32_t* positions, const int32_t* integers, size_t n, const RunScales& scales,
                    uint32_t contributors, float* out, Stream* stream) override {
    operations_.ScatterMeans(positions, integers, n, scales, contributors, out, stream);
  }
  void SparsePlainSteps(float* const* p, const uint32_t* positions, const int32_t* integers, size_t n,
                        const RunScales& scales, const float* learning_rates, uint32_t contributors,
                        Stream* stream) override {
    operations_.SparsePlainSteps(p, positions, integers, n, scales, learning_rates, contributors, stream);
  }

 private:
  // What `launch` writes to its argument in device memory.
  template <class T, class F>
  T Result(Stream* stream, F launch) {
    const Scratch<Device> on_device(device_, sizeof(T), stream);
    launch(on_device.template as<T>());
    T value;
    device_.ToHost(&value, on_device.as(), sizeof(T), stream);
    return value;
  }

  Device& device_;
  Operations<Device> operations_;
  const std::string_view name_;
};

template <class Device>
struct DeviceHolder {
  template <class... Args>
  explicit DeviceHolder(Args&&... args) : held(std::forward<Args>(args)...) {}
  Device held;
};

// The same with a device of its own (a base, so that it is there before the backend), made from `args`.
template <class Device>
class OwningDeviceBackend final : private DeviceHolder<Device>, public DeviceBackend<Device> {
 public:
  template <class... Args>
  explicit OwningDeviceBackend(std::string_view name, Args&&... args)
      : DeviceHolder<Device>(std::forward<Args>(args)...), DeviceBackend<Device>(&this->held, name) {}

  const Device& device() const { return this->held; }
};

}  // namespace gradwire::kernels::cuda
