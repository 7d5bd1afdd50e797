// The codec interface: how a bucket's gradient becomes a frame, how frames are merged, and what comes out.
//
//   worker: Encoder::Encode(gradient, residual, plan) -> frame        server: Accumulator::Add(segment)...
//           Codec::Return(frame, positions) -> residual                       Accumulator::Finish() -> update frame
//
// A Codec is prepared for one BucketLayout of one job: sizes are validated once. Frames are integers (or float32 that
// the accumulator maps to integers), so merging is exact, independent of the order of arrival, and invertible.
//
// Round 0 of every job calibrates: frames carry only ranges (and learning rates), the update frame only the plan of
// round 1, and parameters do not change. The client library makes this round by itself and then pushes the same
// gradient as round 1. In a job with two phases no even round carries values: CarriesValues (common/job/round_mode.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"
#include "common/codec/update/traffic.h"
#include "common/job/codec_spec.h"
#include "common/job/layout.h"
#include "common/wire/frame.h"
#include "kernels/backend.h"

namespace gradwire::kernels::cuda {
class DeviceBucket;
struct DeviceSelection;
}  // namespace gradwire::kernels::cuda

namespace gradwire {

struct Update;

inline constexpr int8_t kUncalibrated = -128;

// What every party agrees on before round r of one bucket on one shard is encoded. The plan of round r + 1 is part of
// the update frame of round r; the plan of round 0 is Codec::InitialPlan().
struct RoundPlan {
  std::vector<int8_t> exponents;  // per run, or empty if the codec has none: a value is an integer times 2^exponent
  uint32_t sketch_groups = 0;
  uint32_t cells_per_group = 0;
  std::vector<float> factors;  // PowerSGD's: powersgd/matrices.h
  uint32_t Digest() const;
  bool operator==(const RoundPlan&) const = default;
};

// Which elements of a tensor are sent: those whose magnitude key (bits of |x| without sign, shifted right by
// kKeyShift) is above `key`, and of those equal to it the ones whose hash falls below keep_below. Chosen per tensor by
// SelectThreshold, so it does not depend on the sharding.
struct Selection {
  uint32_t key = 0;
  uint64_t keep_below = 1ull << 32;  // of 2^32
};

// One run's memory on the worker.
struct RunInput {
  // Read by codecs without residual (Codec::uses_residual() false), and by those that choose by the mean.
  const float* gradient = nullptr;
  float* pending = nullptr;  // residual + gradient on entry; on return, the residual: what was not sent
  Selection selection;
  // For encoders on a device, where all these pointers are in its memory: if not null, takes the place of `selection`.
  const kernels::cuda::DeviceSelection* device_selection = nullptr;
  // The run's velocity, where the codec has one (Codec::velocity). The encoder sets it to 0 where something was sent.
  float* velocity = nullptr;
};

// Finite magnitudes from `from` on are cut to `to`.
struct SentLimit {
  float from = std::numeric_limits<float>::infinity();
  float to = std::numeric_limits<float>::max();
  float Cut(float x) const { return std::fabs(x) >= from && std::isfinite(x) ? std::copysign(to, x) : x; }
};

// Momentum that a worker keeps beside its residual: DGC (Lin et al. 2017, arXiv 1712.01887, sections 3.2 and 3.3).
struct VelocityRule {
  float momentum = 0;
  bool nesterov = false;
  float largest_norm = 0;  // a worker's gradient of one tensor is scaled down to this norm; 0: it is not
};

// Elements of a bucket; all others are 0.
struct Elements {
  std::vector<uint32_t> positions;  // ascending, of the bucket
  std::vector<float> values;
};

// An encoded frame and what is needed to take parts of it back.
struct EncodedFrame {
  std::vector<Bytes> chunks;
  uint64_t bytes = 0;               // sum of chunk sizes, headers counted
  std::vector<uint32_t> positions;  // TAGC: what was sent, ascending
  std::vector<int32_t> integers;    // TAGC: the integer at each position
  uint64_t sent = 0;                // other sparse codecs: how many elements
  RoundPlan plan;                   // the plan by which the frame was encoded
  uint64_t selected() const { return positions.empty() ? sent : positions.size(); }  // of sparse codecs
};

// What the header and the learning-rate segment of a frame say.
struct FrameIdentity {
  uint16_t shard = 0;
  uint32_t bucket = 0;
  uint64_t round = 0;
  uint64_t incarnation = 0;
  std::span<const float> learning_rates;  // one per parameter group
  // What stochastic encoders draw from, with the job's seed: a number of the worker, the same after a restart.
  uint64_t draws = 0;
  uint32_t nonfinite_rounds = 0;  // of an update frame: as in wire::FrameHeader
};

// Not thread-safe; one per (bucket, shard) on a worker.
class Encoder {
 public:
  virtual ~Encoder() = default;
  // `runs`: one per run of the layout. The caller has dealt with non-finite values before. In round 0 the frame carries
  // no values and `pending` is left as it is.
  virtual absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan,
                                              std::span<const RunInput> runs) = 0;
  // The frame of a bucket whose gradient is `elements`, in a time that grows with them. Where the codec takes
  // them, and where it is `union`, whose caller has the residual.
  virtual absl::StatusOr<EncodedFrame> EncodeElements(const FrameIdentity& id, const RoundPlan& plan,
                                                      Elements elements);
};

// What Finish reports beside the update frame.
struct FinishStats {
  uint64_t elements = 0;  // elements that were decoded
  uint64_t deferred = 0;  // elements that the update frame names; every worker returns its share to its residual
  Traffic traffic{};      // filled in by sparse codecs that are decoded where they arrive
};

struct UpdateFrame {
  std::vector<Bytes> chunks;
  // The frame of the mean that the update was compressed from (UpdateCompressor); empty where it was not compressed.
  std::vector<Bytes> mean;
  RoundPlan next;
  FinishStats stats;
  bool skipped = false;   // SkippedUpdate
  bool replaces = false;  // ReplacingUpdate
  // This update decoded, with values that are still in the accumulator's memory; null where the accumulator does not
  // offer it. Valid until the accumulator is opened again or gone.
  std::shared_ptr<const Update> decoded;
};

// One frame on its way into an accumulator that can do more with a whole frame than with its segments one by one. A
// FrameMerge is used like its accumulator and destroyed before that; what it has merged stays merged.
class FrameMerge {
 public:
  virtual ~FrameMerge() = default;
  // As Accumulator::Add, but bad values may be known only to Settle, and an error may leave a part of the segment
  // merged until Revoke.
  virtual absl::Status Add(const wire::Segment& segment) = 0;
  // Waits for what was added. InvalidArgument names the first bad value, in order of position; the segments are merged
  // all the same then, and can be removed.
  virtual absl::Status Settle() = 0;
  // Whether Revoke, called once, takes out everything that was added. Where not, Accumulator::Remove does so, segment
  // by segment.
  virtual bool revocable() const { return false; }
  virtual void Revoke() {}
};

// Merges the frames of one (bucket, shard, round). Not thread-safe; one per bucket and open round, reused by Open.
class Accumulator {
 public:
  virtual ~Accumulator() = default;
  // Clears and prepares for `round`, encoded by `plan`.
  virtual void Open(uint64_t round, const RoundPlan& plan) = 0;
  // Validates a segment against layout and plan, then merges it; an error leaves the accumulator unchanged. Errors:
  // InvalidArgument (type not of this codec, range outside the bucket, non-finite value: names tensor and element).
  virtual absl::Status Add(const wire::Segment& segment) = 0;
  // Exactly undoes an Add (also a FrameMerge's) that succeeded since Open.
  virtual void Remove(const wire::Segment& segment) = 0;
  // What merges the segments of one frame better than Add does one by one. Null: use Add.
  virtual std::unique_ptr<FrameMerge> NewFrameMerge() { return nullptr; }
  // Closes the round over `contributors` complete frames and encodes the update frame. Deterministic: the same
  // multiset of segments gives the same bytes. The learning rates are written into the update frame. Only Open may
  // follow: the sums may be gone.
  virtual absl::StatusOr<UpdateFrame> Finish(const FrameIdentity& id, uint32_t contributors) = 0;
  virtual size_t memory_bytes() const = 0;
};

// The memory that an accumulator needs whose sums lie on a device.
struct DeviceNeeds {
  uint64_t device_bytes = 0;  // of the job's device memory
  uint64_t pinned_bytes = 0;  // of the bucket's pinned memory, for results
  uint64_t host_bytes = 0;
  bool means = false;  // DeviceBucket::means
};

// Thread-safe, immutable.
class Codec {
 public:
  virtual ~Codec() = default;
  virtual bool uses_residual() const = 0;
  virtual bool sparse() const = 0;  // sends a part of the elements
  // It sends all that is not 0 and keeps nothing: encoders take such elements alone, and Carried tells them again.
  virtual bool takes_elements() const { return false; }
  // Of an update codec: it sends the elements that the round's mean has. RunInput::gradient is that mean.
  virtual bool chooses_by_mean() const { return false; }
  // Whether encoders need a Selection per tensor, and of which accuracy.
  virtual std::optional<kernels::Accuracy> selects() const { return std::nullopt; }
  // The momentum that gradients go through on their way into the residual; nothing for codecs without one.
  virtual std::optional<VelocityRule> velocity() const { return std::nullopt; }
  // A worker refuses an element of a gradient whose magnitude has these bits or larger ones: it could not be sent at
  // once, and from the residual it would leave over several rounds at best. For codecs whose values are added on the
  // grid: GridLimitBits (grid_limit.h).
  virtual uint32_t gradient_limit_bits() const { return kernels::kGridLimitBits; }
  // What a frame carries where something keeps the rest: encoders with a residual leave it there. What was gathered for
  // a codec without one must be cut by this.
  virtual SentLimit sent_limit() const { return {}; }
  virtual bool defers() const { return false; }      // update frames may name elements that workers take back
  virtual double Density(uint64_t round) const = 0;  // the share of elements that is sent; 1 for dense codecs
  virtual RoundPlan InitialPlan() const = 0;
  virtual std::unique_ptr<Encoder> NewEncoder() const = 0;
  virtual std::unique_ptr<Accumulator> NewAccumulator() const = 0;
  virtual size_t accumulator_bytes() const = 0;  // an upper bound of Accumulator::memory_bytes
  // An accumulator for a job whose parameters lie in the memory of a device. Its sums lie on the device where the codec
  // can add there, else in host memory. `bucket` meets device_needs() and outlives the accumulator. Errors:
  // InvalidArgument for a bucket that a device does not take, ResourceExhausted.
  virtual DeviceNeeds device_needs() const;
  virtual absl::StatusOr<std::unique_ptr<Accumulator>> NewDeviceAccumulator(kernels::cuda::DeviceBucket* bucket) const;
  // An encoder whose RunInputs point to the memory of a device; its frames and what it leaves in `pending` have the
  // bits of NewEncoder's. `bucket` outlives the encoder. Errors: Unimplemented, where the codec has no such encoder.
  virtual absl::StatusOr<std::unique_ptr<Encoder>> NewDeviceEncoder(kernels::cuda::DeviceBucket* bucket) const;
  // Checks that the segments of a whole frame, in order, cover the bucket exactly once.
  virtual absl::Status CheckComplete(uint64_t round, const RoundPlan& plan,
                                     std::span<const wire::SegmentHeader> segments) const = 0;
  // Adds what `frame` sent back to the residual: all of it, or only at `positions` (ascending) where given.
  // residual[i] is the memory of run i; codecs without residual are given the memory where a gradient waits. Exact:
  // pending values come back to the last bit, for lossy quantisers to within one rounding of float32. What was added to
  // the residual meanwhile stays: Return is one addition more.
  virtual absl::Status Return(const EncodedFrame& frame, const std::vector<uint32_t>* positions,
                              std::span<float* const> residual) const = 0;
  // What `frame` sent, as Return would add it. Only of a codec that takes elements.
  virtual absl::StatusOr<Elements> Carried(const EncodedFrame& frame) const;
};

// Everything a codec is prepared from. `layout`, `job` and `backend` must outlive the codec. `backend` computes in host
// memory; the parts of a codec that compute on a device get it with their DeviceBucket.
struct CodecContext {
  const Job* job = nullptr;
  const BucketLayout* layout = nullptr;
  kernels::Backend* backend = nullptr;
  bool update = false;  // for an update codec: its frames are not added up
};

// Errors: those of the codec's family; Internal for a backend over a device's memory.
absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context);
// As above, with `spec` in the place of the bucket's own; `spec` need not outlive the call.
absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context, const CodecSpec& spec);

}  // namespace gradwire
