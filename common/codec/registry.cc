// From a spec to its kind of codec: the one place that knows every codec.
#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/codec/dense/dense_codec.h"
#include "common/codec/family.h"
#include "common/codec/homomorphic/homomorphic_codec.h"
#include "common/codec/powersgd/powersgd_codec.h"
#include "common/codec/quantized/quantized_codec.h"
#include "common/codec/sparse/sparse_codec.h"
#include "common/codec/tagc/tagc_codec.h"

namespace gradwire {
namespace {

struct Families {
  const CodecFamily& operator()(const DenseSpec&) const { return dense::Family(); }
  const CodecFamily& operator()(const TagcSpec&) const { return tagc::Family(); }
  const CodecFamily& operator()(const QuantizedSpec&) const { return quantized::Family(); }
  const CodecFamily& operator()(const SparseSpec&) const { return sparse::Family(); }
  const CodecFamily& operator()(const HomomorphicSpec&) const { return homomorphic::Family(); }
  const CodecFamily& operator()(const PowerSgdSpec&) const { return powersgd::Family(); }
};

}  // namespace

const CodecFamily& FamilyOf(const CodecSpec& spec) { return std::visit(Families{}, spec); }
const CodecFamily& FamilyOf(const Job& job, const BucketLayout& slice) { return FamilyOf(job.codecs()[slice.codec]); }

absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context) {
  return MakeCodec(context, context.job->codecs()[context.layout->codec]);
}

absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context, const CodecSpec& spec) {
  if (!context.backend->host_memory()) {
    return absl::InternalError(absl::StrCat("a codec was given the backend '", std::string(context.backend->name()),
                                            "', which cannot read its arrays: they are in host memory"));
  }
  return FamilyOf(spec).Make(context, spec);
}

}  // namespace gradwire
