// See update_codec.h.
#include "common/job/update_codec.h"

#include <optional>

#include "absl/strings/str_format.h"

namespace gradwire {
namespace {

using Scheme = QuantizedSpec::Scheme;

absl::Status Refused(const CodecSpec& spec, const char* why) {
  return absl::InvalidArgumentError(absl::StrFormat("update_codec '%s': %s", ToString(spec), why));
}

// Whether what a shard does not send waits for the next round: a scheme that is biased, but whose definition has no
// residual (signs), or that is unbiased has none.
bool KeepsRest(Scheme scheme) {
  switch (scheme) {
    case Scheme::kFp16:
    case Scheme::kOneBit:
    case Scheme::kEfSignSgd:
      return true;
    case Scheme::kSignSgd:
    case Scheme::kSigNum:
    case Scheme::kTernGrad:
    case Scheme::kQsgd:
    case Scheme::kLinear:
    case Scheme::kNatural:
      return false;
  }
  return false;
}

}  // namespace

absl::Status CheckUpdateCodec(const CodecSpec& spec) {
  if (const auto* dense = std::get_if<DenseSpec>(&spec)) {
    if (!dense->fixed()) return absl::OkStatus();
    return Refused(spec,
                   "fixed point needs exponents that all workers have agreed on, a mean has none; use dense:bf16, fp16 "
                   "or qsgd");
  }
  if (const auto* quantized = std::get_if<QuantizedSpec>(&spec)) {
    if (quantized->scheme != Scheme::kSigNum) return absl::OkStatus();
    return Refused(spec, "the momentum is the workers'; use signsgd, which makes the vote of their signs");
  }
  if (const auto* sparse = std::get_if<SparseSpec>(&spec)) {
    using Choice = SparseSpec::Choice;
    const bool chosen_by_value = sparse->choice == Choice::kTopK || sparse->choice == Choice::kThreshold;
    if (chosen_by_value || sparse->choice == Choice::kRandomK || sparse->choice == Choice::kUnion)
      return absl::OkStatus();
    return Refused(spec, "it is a codec of what one worker pushes; use topk, threshold, randomk or union");
  }
  return Refused(
      spec,
      "its frames are there to be merged, and an update is merged already; use topk, threshold or randomk to "
      "send a part of it, union or a quantizer to send all of it in fewer bits");
}

absl::Status CheckPushCodec(const CodecSpec& spec) {
  const auto* sparse = std::get_if<SparseSpec>(&spec);
  if (sparse == nullptr || sparse->choice != SparseSpec::Choice::kUnion) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "codec '%s': it is what shards send back, so an update_codec; workers push by topk, tagc or another codec",
      ToString(spec)));
}

bool KeepsUpdateResidual(const Job& job, uint32_t codec) {
  const std::optional<CodecSpec>& spec = job.update_codecs()[codec];
  if (!spec) return false;
  if (const auto* dense = std::get_if<DenseSpec>(&*spec)) return dense->values == DenseSpec::Values::kBf16;
  if (const auto* quantized = std::get_if<QuantizedSpec>(&*spec)) return KeepsRest(quantized->scheme);
  return std::holds_alternative<SparseSpec>(*spec);
}

bool SendsElementsOfMean(const Job& job, uint32_t codec) {
  const std::optional<CodecSpec>& spec = job.update_codecs()[codec];
  const auto* sparse = spec ? std::get_if<SparseSpec>(&*spec) : nullptr;
  return sparse != nullptr && sparse->choice == SparseSpec::Choice::kUnion;
}

}  // namespace gradwire
