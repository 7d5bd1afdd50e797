// See update_compression.h.
#include "server/job/update_compression.h"

#include <algorithm>
#include <utility>

#include "common/base/status_macros.h"
#include "common/job/update_codec.h"

namespace gradwire {

UpdateCompression::UpdateCompression(const CodecContext& context, std::unique_ptr<UpdateCompressor> compressor)
    : context_(context), compressor_(std::move(compressor)) {
  if (KeepsUpdateResidual(*context_.job, context_.layout->codec)) residual_.resize(context_.layout->elements);
}

absl::StatusOr<UpdateCompression> UpdateCompression::Make(const Job* job, const BucketLayout* layout,
                                                          kernels::Backend* backend) {
  const CodecContext context{job, layout, backend};
  GW_ASSIGN_OR_RETURN(std::unique_ptr<UpdateCompressor> compressor, UpdateCompressor::Make(context));
  return UpdateCompression(context, std::move(compressor));
}

absl::Status UpdateCompression::Compress(const RoundPlan& plan, UpdateFrame* update) {
  if (compressor_ == nullptr) return absl::OkStatus();
  return compressor_->Compress(plan, residual(), &change_, update);
}

absl::Status UpdateCompression::Replay(const RoundPlan& plan, const UpdateFrame& update) {
  if (residual_.empty()) return absl::OkStatus();
  return ReplayResidual(*context_.job, *context_.layout, plan, update.mean, *update.decoded, *context_.backend,
                        residual_.data(), &change_);
}

void UpdateCompression::Settle() {
  if (!residual_.empty()) change_.MoveTo(&residual_);
}

void UpdateCompression::LoadResidual(const float* from) { std::copy_n(from, residual_.size(), residual_.begin()); }

}  // namespace gradwire
