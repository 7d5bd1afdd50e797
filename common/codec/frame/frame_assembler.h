// Receives the chunks of one worker's frame, merges each as it arrives, and takes everything back out if the frame is
// abandoned. Sits between the transport and an Accumulator on a shard server.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/codec/codec.h"

namespace gradwire {

// Digest of a frame, chunk by chunk from 0: CRC-32C over all headers. A segment header holds the CRC of its payload, so
// the headers stand for the bytes behind them.
uint32_t ExtendDigest(const wire::Chunk& chunk, uint32_t digest);

// Not thread-safe: the owner of the accumulator serialises calls. Holds what was received (shared, not copied) until
// Commit or Abandon, at most `frame_limit_bytes`; nothing where the accumulator can take the frame out by itself.
class FrameAssembler {
 public:
  // All pointers must outlive the assembler. `plan` is that of `round`.
  FrameAssembler(const Codec* codec, const BucketLayout* layout, Accumulator* accumulator, const RoundPlan* plan,
                 uint64_t round, uint64_t frame_limit_bytes);
  ~FrameAssembler();  // abandons what was not committed
  FrameAssembler(const FrameAssembler&) = delete;
  FrameAssembler& operator=(const FrameAssembler&) = delete;

  // Checks identity and order, then merges every segment. `chunk` is used during the call only; `received` are the
  // bytes it was parsed from, in slices. An error takes the whole frame back out; the assembler is then empty and
  // refuses further chunks. Errors: InvalidArgument, DataLoss, ResourceExhausted (frame too large); FailedPrecondition
  // (another plan, another shape).
  absl::Status Add(const wire::Chunk& chunk, std::span<const Bytes> received);
  // True once the last chunk was merged and the frame is known to cover its bucket exactly once.
  bool complete() const { return complete_; }
  bool abstained() const { return abstained_; }
  uint64_t bytes() const { return bytes_; }
  uint32_t digest() const { return digest_; }  // ExtendDigest over all chunks: tells a repeat from a different frame
  std::span<const float> learning_rates() const { return learning_rates_; }  // once complete
  // The frame stays merged; drops the chunks.
  void Commit();
  // Removes what was merged. Where memory runs out on the way it stops, and the accumulator is spoiled.
  void Abandon();
  // The accumulator holds parts of a frame that nobody can take out any more: it must not be finished.
  bool spoiled() const { return spoiled_; }

 private:
  absl::Status CheckIdentity(const wire::FrameHeader& header) const;
  absl::Status Merge(const wire::Chunk& chunk);
  void TakeOut();

  const Codec* codec_;
  const BucketLayout* layout_;
  Accumulator* accumulator_;
  std::unique_ptr<FrameMerge> merge_;  // null: segments go to the accumulator one by one
  const RoundPlan* plan_;
  const uint32_t plan_digest_;  // every chunk names it
  uint64_t round_;
  uint64_t frame_limit_bytes_;
  struct Held {
    std::vector<Bytes> received;  // none if merge_ is revocable
    size_t merged = 0;            // segments, from the first on
  };
  std::vector<Held> chunks_;                   // merged so far
  std::vector<wire::SegmentHeader> segments_;  // of chunks_ that were merged, in order
  std::array<uint64_t, 4> ends_ = {};          // of what they cover, by PlaceOf (frame_assembler.cc)
  std::vector<float> learning_rates_;
  uint64_t bytes_ = 0;
  uint32_t digest_ = 0;
  bool complete_ = false;
  bool abstained_ = false;
  bool failed_ = false;
  bool spoiled_ = false;
};

}  // namespace gradwire
