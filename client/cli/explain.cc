// `gradwire codec explain`: a codec spec in words. See commands.h.
#include <cmath>
#include <variant>

#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "common/base/status_macros.h"
#include "common/codec/codec_spec.h"

namespace gradwire::cli {
namespace {

struct Explanation {
  std::string text;
  double push_bytes = 0;  // per step, of one worker, about
};

constexpr double kPeelingLoad = 0.74;  // non-zeros per cell that a sketch still decodes

Explanation Explain(const DenseSpec& spec, uint64_t elements) {
  const double n = static_cast<double>(elements);
  switch (spec.values) {
    case DenseSpec::Values::kFp32:
      return {"  values=fp32    every element as it is; no residual\n", 4 * n};
    case DenseSpec::Values::kBf16:
      return {"  values=bf16    every element rounded to bfloat16; the rest goes to the residual\n", 2 * n};
    case DenseSpec::Values::kFixed32:
      return {"  values=fixed32 32-bit integers with one exponent per run; the rest goes to the residual\n", 4 * n};
    case DenseSpec::Values::kFixed16:
      return {"  values=fixed16 16-bit integers with one exponent per run; the rest goes to the residual\n", 2 * n};
  }
  return {};
}

Explanation Explain(const TagcSpec& spec, uint64_t elements) {
  Explanation e;
  e.text += absl::StrFormat(
      "  density=%g  of each tensor, the largest %g %% of the elements are sent; the others wait in "
      "the residual\n",
      spec.density, 100 * spec.density);
  e.text +=
      spec.cell_bits == 0
          ? "  cells=auto    bits per cell of the sketch, chosen by the job's max_workers so that sums cannot "
            "overflow\n"
          : absl::StrFormat("  cells=%d      bits per cell of the sketch; more workers need more\n", spec.cell_bits);
  e.text += spec.warmup_rounds == 0
                ? "  warmup_rounds=0  the density is the same from the first round on\n"
                : absl::StrFormat("  warmup_rounds=%d  the density falls from %g to %g over so many rounds\n",
                                  spec.warmup_rounds, spec.warmup_density, spec.density);
  e.text += absl::StrFormat(
      "  slack=%g      cells relative to what decoding needs; below 1, elements are deferred a round\n", spec.slack);
  const double chosen = spec.density * static_cast<double>(elements);
  const double p = spec.density;
  const double entropy_bits =
      p >= 1 ? 0 : static_cast<double>(elements) * -(p * std::log2(p) + (1 - p) * std::log2(1 - p));
  const double cell_bits = spec.cell_bits == 0 ? 16 : spec.cell_bits;
  e.push_bytes = entropy_bits / 8 + chosen / kPeelingLoad * spec.slack * cell_bits / 8;
  return e;
}

}  // namespace

absl::Status ExplainCodec(const std::string& text, uint64_t elements, bool json, std::ostream& out) {
  GW_ASSIGN_OR_RETURN(const CodecSpec spec, ParseCodecSpec(text));
  const Explanation e = std::visit([elements](const auto& s) { return Explain(s, elements); }, spec);
  const double dense_bytes = 4.0 * static_cast<double>(elements);
  if (json) {
    out << absl::StrFormat("{\"codec\":%s,\"elements\":%d,\"push_bytes_about\":%.0f,\"float32_bytes\":%.0f}\n",
                           Quoted(ToString(spec)), elements, e.push_bytes, dense_bytes);
    return absl::OkStatus();
  }
  out << ToString(spec) << "\n" << e.text;
  if (std::holds_alternative<TagcSpec>(spec)) {
    out << "  Workers' frames are merged without decoding them; what cannot be decoded is deferred, never estimated.\n";
  }
  out << absl::StrFormat("  About %s per worker and step for %d elements (float32: %s, %.1f times as much).\n",
                         HumanBytes(e.push_bytes), elements, HumanBytes(dense_bytes),
                         e.push_bytes > 0 ? dense_bytes / e.push_bytes : 0.0);
  return absl::OkStatus();
}

}  // namespace gradwire::cli
