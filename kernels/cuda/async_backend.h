// A backend over device memory, and what a caller needs beyond Backend to keep data and control on the device: memory,
// streams, and variants of the operations that return values, which leave them in device memory instead.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/backend.h"
#include "kernels/cuda/device_values.h"

namespace gradwire::kernels::cuda {

// Opaque: a point of a stream.
struct Event;

// Memory, streams and events of one device. A null stream is the calling thread's own. Thread-safe.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  virtual std::string Describe() = 0;  // model and size, for logs and reports

  // Device memory, at least 256-byte aligned, usable in stream order; null where the device has not so much left.
  virtual void* Allocate(size_t bytes, Stream* stream) = 0;
  virtual void Free(void* p, Stream* stream) = 0;
  // Host memory that copies read and write without a stop on the way; null where there is none.
  virtual void* AllocatePinned(size_t bytes) = 0;
  virtual void FreePinned(void* p) = 0;
  virtual size_t FreeBytes() = 0;  // of device memory, just now

  virtual Stream* NewStream() = 0;
  virtual void DeleteStream(Stream* stream) = 0;  // waits for nothing; what was launched still runs

  // Sets `bytes` bytes of device memory, in stream order.
  virtual void Fill(void* p, int byte, size_t bytes, Stream* stream) = 0;
  // Copies in stream order. Pinned host memory: returns at once, and the memory must stay until the stream got there.
  // Other host memory: returns when that memory may be reused (ToDevice) or holds the data (ToHost).
  virtual void ToDevice(void* to, const void* from, size_t bytes, Stream* stream) = 0;
  virtual void ToHost(void* to, const void* from, size_t bytes, Stream* stream) = 0;
  virtual void Copy(void* to, const void* from, size_t bytes, Stream* stream) = 0;  // within the device
  virtual void Synchronize(Stream* stream) = 0;

  virtual Event* NewEvent() = 0;
  virtual void DeleteEvent(Event* event) = 0;
  virtual void Record(Event* event, Stream* stream) = 0;  // the event is what was launched on the stream until now
  virtual void Wait(Stream* stream, Event* event) = 0;    // what is launched on the stream from now on comes after it
  virtual bool Done(Event* event) = 0;                    // true for one that was never recorded
  virtual void WaitOnHost(Event* event) = 0;
  virtual double Seconds(Event* from, Event* to) = 0;  // between two that are done
};

// Backend::RangeOf, from the bits of the largest magnitude.
inline int RangeOfLargest(uint32_t magnitude_bits) {
  return magnitude_bits == 0 ? kMinRange : std::clamp(RangeOfBits(magnitude_bits), kMinRange, kMaxRange);
}

// Pointers are device memory. Nothing waits for the device except the methods of Backend that return a value, and
// Synchronize. A failing device (not a lack of memory in Allocate) ends the process: no result would be right.
// Alignment: arrays of T are aligned to T; at 16 bytes they are fastest, and so are byte arrays.
class AsyncBackend : public Backend {
 public:
  AsyncBackend* async() final { return this; }
  virtual DeviceRuntime& runtime() = 0;

  // *first: index of the first such value, or 2^64 - 1 (-1 as int64).
  virtual void FindOutOfGridAsync(const uint8_t* values, int width, size_t n, uint32_t limit_bits, uint64_t* first,
                                  Stream* stream) = 0;
  virtual void FindNonFiniteAsync(const float* x, size_t n, uint64_t* first, Stream* stream) = 0;
  // *largest: bits of the largest |x[i]|; 0 where n is 0. RangeOfLargest gives the range.
  virtual void LargestMagnitudeAsync(const float* x, size_t n, uint32_t* largest, Stream* stream) = 0;

  // AddFloats and AddIntegers (width 2 or 4) of values that nobody has checked: those that FindOutOfGrid finds (which
  // then count as 0, added or subtracted) or of a magnitude over `limit` lower *first_bad to the smallest of position
  // << 32 | bits of the value as float32 or int32, where the position of values[i] is first_position + i. Precondition:
  // positions are below 2^32.
  virtual void AddFloatsChecked(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign,
                                uint32_t limit_bits, uint64_t first_position, uint64_t* first_bad, Stream* stream) = 0;
  virtual void AddIntegersChecked(int32_t* acc, const uint8_t* values, int width, size_t n, Sign sign, int32_t limit,
                                  uint64_t first_position, uint64_t* first_bad, Stream* stream) = 0;

  // A gradient on its way into what is pending: x[i] = decay * x[i] + gradient[i], or where there is a second moment
  // decay * x[i] + Precondition(gradient[i], &second_moment[i]). Does nothing where `bad` is given and *bad is an
  // index: what FindOutOfGridAsync of the gradient found.
  virtual void TakeIn(float* x, const float* gradient, float* second_moment, size_t n, float decay,
                      const PreconditionCoefficients& c, const uint64_t* bad, Stream* stream) = 0;

  // The threshold of FindThreshold. It is used where it is, by TakeSelectedAsync.
  virtual void FindThresholdAsync(const float* x, size_t n, double wanted, Accuracy accuracy,
                                  DeviceSelection* selection, Stream* stream) = 0;
  // `selection`: null, or what replaces args.key and args.keep_below. *taken: how many.
  virtual void TakeSelectedAsync(float* x, size_t n, const SelectArgs& args, const DeviceSelection* selection,
                                 uint32_t first_position, uint32_t* positions, int32_t* integers, uint64_t* taken,
                                 Stream* stream) = 0;
  // The same of all runs of a bucket; *taken: how many there are together.
  virtual void TakeSelectedOfRuns(const RunPlaces& runs, int32_t limit, uint32_t* positions, int32_t* integers,
                                  uint64_t* taken, Stream* stream) = 0;
  // largest[r]: LargestMagnitudeAsync of run r.
  virtual void LargestOfRuns(const RunPlaces& runs, uint32_t* largest, Stream* stream) = 0;
  // Quantize (width 2 or 4), SplitBf16 and Copy of all runs of a bucket, element i of run r to position
  // runs.at[r].position + i of `out`, which is aligned to what is written. Runs of unit 0 give integers of 0 and are
  // left alone.
  virtual void QuantizeRuns(const RunPlaces& runs, int32_t limit, int width, uint8_t* out, Stream* stream) = 0;
  virtual void SplitBf16Runs(const RunPlaces& runs, float largest, uint8_t* out, Stream* stream) = 0;
  virtual void CopyRuns(const RunPlaces& runs, float* out, Stream* stream) = 0;
  // The other way; runs whose x is null are left out.
  virtual void CopyToRuns(const float* from, const RunPlaces& runs, Stream* stream) = 0;
  virtual void SketchAddAsync(const uint32_t* positions, const int32_t* integers, ElementCount count,
                              const SketchArgs& args, uint8_t* cells, Stream* stream) = 0;
  // Sets all count.most of `sums` and `resolved`; those past the count to 0.
  virtual void SketchPeelAsync(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions,
                               ElementCount count, int32_t* sums, uint8_t* resolved, Stream* stream) = 0;
  virtual void SparsePlainStepAsync(float* p, const uint32_t* positions, const int32_t* integers, ElementCount count,
                                    uint32_t first_position, int exponent, uint32_t contributors, float learning_rate,
                                    Stream* stream) = 0;

  // Means over a whole bucket, positions counted from its begin: out[i] = MeanOfInteger(sums[i]) with the unit of the
  // run of i; `out` may be `sums`. ScatterMeans sets out[positions[i]] alone.
  virtual void MeansOfIntegers(const int32_t* sums, size_t n, const RunScales& scales, uint32_t contributors,
                               float* out, Stream* stream) = 0;
  virtual void ScatterMeans(const uint32_t* positions, const int32_t* integers, size_t n, const RunScales& scales,
                            uint32_t contributors, float* out, Stream* stream) = 0;
  // SparsePlainStep over all runs of a bucket: run r lies at p[r], learning_rates[r] is its rate, both in device
  // memory.
  virtual void SparsePlainSteps(float* const* p, const uint32_t* positions, const int32_t* integers, size_t n,
                                const RunScales& scales, const float* learning_rates, uint32_t contributors,
                                Stream* stream) = 0;
};

}  // namespace gradwire::kernels::cuda
