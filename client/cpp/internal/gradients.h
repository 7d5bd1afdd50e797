// Gradients on their way to the encoder: the non-finite check, the worker's preconditioner (PUSH_STEP), the residual
// of every tensor and the choice of what is sent. Residuals are kept per tensor, so they survive another grouping.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/internal/tensor_elements.h"
#include "client/cpp/internal/tensor_memory.h"
#include "common/codec/codec.h"
#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire::client {

// Not thread-safe as a whole. TakeIn and Select run on an encoding thread, for different tensors at once where the
// memory is the host's. TakenOf, InputsOf, Encoded and Keep run on one, for different slices at once, when all tensors
// of the slice were taken in and selected. Returned, Undo and Deferred, and Keep as well, run on the applying thread,
// for slices that the encoding threads are done with in their round. Frames of several rounds may be on their way: what
// they carry is in them alone, and comes back by addition, in any order. Slices share no elements.
class GradientStore {
 public:
  // `codecs`: for each tensor one codec it travels by (null for a tensor without elements). Job and codecs outlive
  // this.
  GradientStore(const Job* job, std::vector<const Codec*> codecs, std::shared_ptr<TensorMemory> memory);

  // Takes in the gradient of a tensor for `round`, once per step. Taken, before an encoder sees the tensor, waits for
  // the verdict. InvalidArgument for a non-finite element unless NONFINITE_SANITIZE says what to do: nothing was taken
  // in.
  void TakeIn(uint32_t tensor, const GivenGradient& gradient, uint64_t round);
  absl::Status Taken(uint32_t tensor);
  // Of all tensors of a bucket: the first error.
  absl::Status TakenOf(std::span<const BucketPart> parts);
  absl::Status Ingest(uint32_t tensor, const GivenGradient& gradient, uint64_t round) {
    TakeIn(tensor, gradient, round);
    return Taken(tensor);
  }
  // Chooses what a sparse codec sends in `round`; before every encoding of the tensor.
  void Select(uint32_t tensor, uint64_t round);
  std::vector<RunInput> InputsOf(const BucketLayout& layout);
  // The frame of a slice, by its encoder. Errors: those of Encoder::Encode.
  absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan, const BucketLayout& layout,
                                      Encoder* encoder);
  // The encoder that takes these inputs; borrowed, the same one in every call.
  Encoder* EncoderOf(const Codec& codec) { return memory_->EncoderOf(codec); }
  const TensorMemory& memory() const { return *memory_; }

  // What became of this round's values, in rounds behind round 0. Encoded: they are in a frame now. Keep: in none, they
  // wait for the next round.
  void Encoded(const BucketLayout& layout);
  void Keep(const BucketLayout& layout);
  // The frame was not merged (too late, or refused): what it carried waits for the next round. A velocity stays 0
  // where it was sent: its momentum has been spent.
  absl::Status Returned(const BucketLayout& layout, const Codec& codec, const EncodedFrame& frame);
  // Jobs that skip rounds with gradients that are not finite: everything of the slice is as it was before TakeIn.
  void Undo(const BucketLayout& layout);
  // Merged, but the elements at `positions` could not be decoded by anyone.
  absl::Status Deferred(const BucketLayout& layout, const Codec& codec, const EncodedFrame& frame,
                        const std::vector<uint32_t>& positions);
  // What a checkpoint keeps of a tensor between two rounds; empty where there is none.
  struct Kept {
    HostView pending;
    HostView second_moment;
    HostView velocity;
    uint64_t steps = 0;
  };
  Kept KeptOf(uint32_t tensor) const;
  // The memory that takes it again (TensorMemory::Fill). `has_pending`: the checkpoint has something that waits to
  // be sent.
  struct Memory {
    std::span<float> pending;
    std::span<float> second_moment;
    std::span<float> velocity;
  };
  Memory MemoryOf(uint32_t tensor, bool has_pending, uint64_t steps);
  // The round is over: the caller's gradient memory is not referred to any more.
  void EndRound();

  // Since this was made; may be read from any thread.
  uint64_t sanitized_elements() const { return sanitized_elements_.load(std::memory_order_relaxed); }

 private:
  struct State {
    const Codec* codec = nullptr;
    // Arrays of the memory. Residual codecs: residual, plus this round's gradient until it is sent. Others: empty, or
    // what is waiting to be sent (a returned gradient, or steps of PUSH_STEP).
    std::span<float> pending;
    std::span<float> second_moment;  // PUSH_STEP
    uint64_t steps = 0;              // PUSH_STEP
    std::span<float> velocity;       // codecs with a velocity()
    // The gradient was given by rows, to a codec that takes elements: `pending` is empty, and these wait in its place,
    // in the order in which they came back.
    bool by_rows = false;
    TensorElements waiting;
    std::span<float> idle;  // an array of zeros that was `pending`

    // What these were before this round, in jobs that may skip it; empty where they were.
    struct Before {
      std::span<float> pending;
      std::span<float> second_moment;
      std::span<float> velocity;
      uint64_t steps = 0;
      TensorElements waiting;
    } before;

    // Of this round.
    const float* gradient = nullptr;
    uint64_t round = 0;
    std::optional<absl::Status> taken;  // none: not known yet
    const float* source = nullptr;      // what codecs without residual read; null: nothing was taken in
    bool from_pending = false;          // that is `pending`
    bool gathered = false;              // `pending` or `waiting` may have what earlier rounds did not send
    TensorElements elements;            // by rows: what encoders read
    std::optional<uint64_t> selected;   // the round that `choice` was made for
    Choice choice;
  };

  // Of a codec that takes elements.
  void TakeInRows(uint32_t tensor, const RowGradient& gradient);
  // The gradient given whole, until the round ends.
  absl::StatusOr<const float*> HeldOf(uint32_t tensor, const RowGradient& gradient);
  // Adds what waited to the elements, and holds back what is too large for one frame.
  void AddWaiting(State* state);
  // What waits goes into an array, for gradients that are given whole; and back.
  void WaitInArray(uint32_t tensor);
  void WaitByElement(State* state);
  bool HasRows(const BucketLayout& layout) const;
  Elements ElementsOfSlice(const BucketLayout& layout) const;
  void ReturnElements(const BucketLayout& layout, const Elements& carried);
  float DecayOf(const State& state) const;  // of what waits, per round
  // Brings `values` to where encoders read this round. `checked`: unless FindOutOfGrid found something in the tensor.
  void Pass(uint32_t tensor, const float* values, bool checked);
  absl::Status Refuse(uint32_t tensor, uint64_t bad);
  absl::Status Refuse(uint32_t tensor, uint64_t bad, float value) const;
  void Sanitized() { sanitized_elements_.fetch_add(1, std::memory_order_relaxed); }
  void Save(State* state);
  // For a codec without residual: what was gathered over several rounds and is too large for one frame leaves over
  // several, too.
  void HoldBack(uint32_t tensor);
  void Gathered(State* state);
  absl::Status Sanitize(uint32_t tensor);
  // The memory of the runs of `layout`; zeros where there was none.
  std::vector<float*> ResidualOf(const BucketLayout& layout);
  float* ResidualOf(const Run& run);

  const Job* const job_;
  const std::shared_ptr<TensorMemory> memory_;
  std::vector<State> tensors_;
  absl::Mutex waiting_mu_;  // of State::pending, which both threads may be the first to need, waiting and gathered
  std::atomic<uint64_t> sanitized_elements_{0};
};

}  // namespace gradwire::client
