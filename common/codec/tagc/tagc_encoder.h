// The worker's side of the TAGC codec.
#pragma once

#include <vector>

#include "common/codec/codec.h"
#include "common/codec/tagc/tagc_shape.h"

namespace gradwire::tagc {

class TagcEncoder final : public Encoder {
 public:
  explicit TagcEncoder(const TagcShape& shape) : shape_(shape) {}

  absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan,
                                      std::span<const RunInput> runs) override;

 private:
  // Of run i, by the frame's plan; appends what is sent.
  void TakeSelected(uint64_t round, size_t i, const RunInput& input, EncodedFrame* frame);
  void FillCells(const kernels::SketchArgs& sketch, const EncodedFrame& frame);

  const TagcShape shape_;
  // Scratch, kept between rounds.
  std::vector<int8_t> ranges_;
  std::vector<uint32_t> run_positions_;
  std::vector<int32_t> run_integers_;
  std::vector<uint8_t> cells_;
};

}  // namespace gradwire::tagc
