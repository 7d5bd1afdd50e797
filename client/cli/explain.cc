// `gradwire codec explain`: a codec spec in words. See commands.h.
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "common/base/status_macros.h"
#include "common/codec/family.h"
#include "common/job/codec_spec.h"

namespace gradwire::cli {

absl::Status ExplainCodec(const std::string& text, uint64_t elements, bool json, std::ostream& out) {
  GW_ASSIGN_OR_RETURN(const CodecSpec spec, ParseCodecSpec(text));
  const Explanation e = FamilyOf(spec).Explain(spec, elements);
  const double dense_bytes = 4.0 * static_cast<double>(elements);
  if (json) {
    out << absl::StrFormat("{\"codec\":%s,\"elements\":%d,\"push_bytes_about\":%.0f,\"float32_bytes\":%.0f}\n",
                           Quoted(ToString(spec)), elements, e.push_bytes, dense_bytes);
    return absl::OkStatus();
  }
  out << ToString(spec) << "\n" << e.text;
  out << absl::StrFormat("  About %s per worker and step for %d elements (float32: %s, %.1f times as much).\n",
                         HumanBytes(e.push_bytes), elements, HumanBytes(dense_bytes),
                         e.push_bytes > 0 ? dense_bytes / e.push_bytes : 0.0);
  return absl::OkStatus();
}

}  // namespace gradwire::cli
