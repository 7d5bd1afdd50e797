// From a spec to a codec prepared for one bucket: the one place that knows every codec.
#include "common/codec/codec.h"
#include "common/codec/dense/dense_codec.h"
#include "common/codec/homomorphic/homomorphic_codec.h"
#include "common/codec/powersgd/powersgd_codec.h"
#include "common/codec/quantized/quantized_codec.h"
#include "common/codec/sparse/sparse_codec.h"
#include "common/codec/tagc/tagc_codec.h"

namespace gradwire {

absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context) {
  return MakeCodec(context, context.job->codecs()[context.layout->codec]);
}

absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context, const CodecSpec& spec) {
  if (const auto* dense = std::get_if<DenseSpec>(&spec)) return MakeDenseCodec(context, *dense);
  if (const auto* quantized = std::get_if<QuantizedSpec>(&spec))
    return quantized::MakeQuantizedCodec(context, *quantized);
  if (const auto* sparse = std::get_if<SparseSpec>(&spec)) return sparse::MakeSparseCodec(context, *sparse);
  if (const auto* homomorphic = std::get_if<HomomorphicSpec>(&spec))
    return homomorphic::MakeHomomorphicCodec(context, *homomorphic);
  if (std::holds_alternative<PowerSgdSpec>(spec)) return powersgd::MakePowerSgdCodec(context);
  return MakeTagcCodec(context, std::get<TagcSpec>(spec));
}

}  // namespace gradwire
