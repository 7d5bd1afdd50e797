// Where the tensors of a session lie, and with them residuals, moments and encoders: in host memory or on a device.
// What is done to them there goes through here; nothing else of a session knows which it is.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/codec/codec.h"
#include "common/codec/update/update.h"
#include "common/job/layout.h"
#include "common/optimizer/optimizer.h"
#include "kernels/backend.h"
#include "kernels/cuda/async_backend.h"

namespace gradwire::client {

// A gradient on its way into what is pending. Arrays are as long as the tensor, and in the memory.
struct Intake {
  std::span<const float> gradient;
  std::span<float> pending;  // decay * pending + what comes
  float decay = 1;
  std::span<float> second_moment;  // not empty: what comes is preconditioned
  kernels::PreconditionCoefficients precondition;
  std::span<float> velocity;  // not empty: what comes goes through it
  VelocityRule velocity_rule;
};

// What a sparse codec sends of a tensor; as in RunInput.
struct Choice {
  Selection selection;
  const kernels::cuda::DeviceSelection* on_device = nullptr;
};

// Values of the memory on the host: where they are, or a copy.
struct HostView {
  std::vector<float> copy;
  std::span<const float> values;
};

// Applies updates to one slice. Not thread-safe.
class SliceSteps {
 public:
  virtual ~SliceSteps() = default;
  // One step of the optimizer.
  virtual absl::Status Apply(const Update& update) = 0;
  // The mean instead of the parameters; zeros where nobody contributed.
  virtual absl::Status WriteMean(const Update& update) = 0;
};

// Two sides, one thread at a time each: the gradients', and that of the replica. In host memory the gradients' side
// takes several threads, each at arrays and tensors of its own. Pointers and spans are in this memory unless they are
// said to be on the host. On a device work is launched and not waited for, unless a function says so; a stream of the
// caller is a cudaStream_t, null the calling thread's own. In host memory everything is done on return.
class TensorMemory {
 public:
  virtual ~TensorMemory() = default;
  // False: what gradients are checked for is known only when the device got there, see FirstOutOfGrid.
  virtual bool on_host() const = 0;

  // Zeros that live as long as this. Bound: what the memory was made for.
  virtual std::span<float> Allocate(uint64_t elements) = 0;
  // Waits, and copies to the host.
  virtual void ToHost(std::span<const float> from, float* to) = 0;
  virtual HostView View(std::span<const float> values) = 0;  // waits
  // Calls `write` once, with room on the host for the values that `to` is to have: in host memory `to` itself, else
  // memory that is gone on return. On the replica's side.
  virtual void Fill(std::span<float> to, absl::FunctionRef<void(float*)> write) = 0;
  virtual int64_t FindNonFinite(std::span<const float> values) = 0;  // waits; the index of the first, or -1
  // Until everything on both sides is done.
  virtual void Wait() = 0;

  // The gradients' side.
  // What was launched on `stream` until now makes the tensor's gradient. From any thread.
  virtual void Announce(uint32_t tensor, kernels::Stream* stream) = 0;
  // Looks for elements that are not finite or too large (Backend::FindOutOfGrid).
  virtual void FindOutOfGrid(uint32_t tensor, std::span<const float> gradient, uint32_t limit_bits) = 0;
  // The index of the first that was found, or -1. Waits.
  virtual int64_t FirstOutOfGrid(uint32_t tensor) = 0;
  // `checked`: does nothing where FindOutOfGrid found something in that tensor.
  virtual void TakeIn(const Intake& intake, std::optional<uint32_t> checked) = 0;
  // SelectThreshold.
  virtual Choice Select(uint32_t tensor, std::span<const float> pending, double density,
                        kernels::Accuracy accuracy) = 0;
  // The encoder of a slice, for inputs in this memory; the same one in every call. `codec` outlives this.
  virtual Encoder* EncoderOf(const Codec& codec) = 0;
  virtual void Zero(std::span<float> values) = 0;
  virtual void Add(std::span<const float> from, float* to) = 0;
  virtual void Copy(std::span<const float> from, std::span<float> to) = 0;
  // Values of the host in this memory, until ReleaseHeld. ResourceExhausted.
  virtual absl::StatusOr<const float*> Hold(std::vector<float> values) = 0;
  virtual void ReleaseHeld() = 0;

  // The replica's side.
  // What is launched from now on comes after what was launched on `stream` until now. From any thread.
  virtual void After(kernels::Stream* stream) = 0;
  // Codec::Return into residuals, of which the gradients' side does nothing with these elements meanwhile.
  virtual absl::Status Return(const BucketLayout& slice, const Codec& codec, const EncodedFrame& frame,
                              const std::vector<uint32_t>* positions, std::span<float* const> residual) = 0;
  // `runs`: where the slice lies. Everything outlives the result.
  virtual std::unique_ptr<SliceSteps> NewSteps(const Job* job, const BucketLayout* slice,
                                               std::vector<RunState> runs) = 0;
};

// `backend` outlives it.
std::shared_ptr<TensorMemory> MakeHostMemory(kernels::Backend* backend);

// Everything outlives the memory.
struct DeviceMemoryOptions {
  kernels::cuda::AsyncBackend* device = nullptr;
  const Job* job = nullptr;
  const Layout* layout = nullptr;
  std::vector<const Codec*> codecs;  // of Layout::slices()
  bool applies_updates = false;      // steps of the optimizer, and so its moments
};
// Takes all that a session will need there, beside what a round needs now and then. Errors: Unimplemented for a codec
// that has no encoder there, or an optimizer without steps there, saying which and what to do; ResourceExhausted, with
// the figures.
absl::StatusOr<std::shared_ptr<TensorMemory>> MakeDeviceMemory(const DeviceMemoryOptions& options);

}  // namespace gradwire::client
