// Quantizers: one run of float32 values as a few bits each, and back. Definitions and sources: common/codec/README.md;
// bytes: proto/WIRE.md, "Quantized runs".
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "common/job/codec_spec.h"

namespace gradwire::quantized {

// What becomes of the difference between a value and what was sent for it.
enum class Rest {
  kDropped,   // unbiased schemes, what TernGrad clips, and SignSGD
  kResidual,  // added to the next gradient
  kMomentum,  // nothing is subtracted: what was pending decays and stays
};

// Immutable, thread-safe.
class Quantizer {
 public:
  virtual ~Quantizer() = default;
  virtual Rest rest() const = 0;
  virtual bool stochastic() const { return false; }
  // Whether a run says how large its values are; else all are 1 or -1.
  virtual bool sends_magnitudes() const { return true; }
  // Of a run with n values, n > 0. The same for all runs of this length.
  virtual size_t BytesOf(size_t n) const = 0;
  // Precondition: values are finite; then Decode takes what is written. `salt`: of the run; stochastic schemes draw
  // from (salt, index) alone.
  virtual void Encode(const float* x, size_t n, uint64_t salt, uint8_t* out) const = 0;
  // `in`: BytesOf(n) bytes, from anywhere. Errors: InvalidArgument (a code, a scale or padding that Encode never
  // writes).
  virtual absl::Status Decode(const uint8_t* in, size_t n, float* out) const = 0;
};

std::unique_ptr<Quantizer> MakeQuantizer(const QuantizedSpec& spec);

}  // namespace gradwire::quantized
