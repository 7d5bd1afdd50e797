// From a spec to a codec prepared for one bucket: the one place that knows every codec.
#include "common/base/hash.h"
#include "common/codec/codec.h"
#include "common/codec/dense_codec.h"
#include "common/codec/tagc/tagc_codec.h"

namespace gradwire {

uint32_t RoundPlan::Digest() const {
  uint64_t h = HashCombine(sketch_groups, cells_per_group);
  h = HashString({reinterpret_cast<const char*>(exponents.data()), exponents.size()}, h);
  return static_cast<uint32_t>(h);
}

absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context) {
  const CodecSpec& spec = context.job->codecs()[context.layout->codec];
  if (const auto* dense = std::get_if<DenseSpec>(&spec)) return MakeDenseCodec(context, *dense);
  return MakeTagcCodec(context, std::get<TagcSpec>(spec));
}

}  // namespace gradwire
