// Codec specs: "name:key=value,key=value", parsed and validated once, printed back in canonical form.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "absl/status/statusor.h"

namespace gradwire {

// "dense:values=fp32|bf16|fixed32|fixed16". fp32 sends gradients as they are; bf16 rounds to nearest even and keeps
// the rest in the residual; fixed32 and fixed16 are fixed point with one exponent per run, the rest in the residual.
struct DenseSpec {
  enum class Values : uint8_t { kFp32, kBf16, kFixed32, kFixed16 };
  Values values = Values::kFp32;
  bool fixed() const { return values == Values::kFixed32 || values == Values::kFixed16; }
  bool operator==(const DenseSpec&) const = default;
};

// "tagc:density=0.01,cells=auto|8|16|32,warmup_rounds=0,warmup_density=0.1,slack=1.0". TAGC (arXiv 2504.05638);
// where we deviate from the paper: README.md.
struct TagcSpec {
  double density = 0.01;       // fraction of elements that a worker sends per round, (0, 1]
  uint32_t cell_bits = 0;      // 8, 16, 32; 0: by max_workers (8 up to 4 workers, 16 up to 1024, else 32)
  uint32_t warmup_rounds = 0;  // density falls geometrically from warmup_density over this many rounds
  double warmup_density = 0.1;
  double slack = 1.0;  // cells relative to what the peeling threshold asks for; below 1 forces deferral
  // Density of round r (round 0 is the calibration round and sends nothing).
  double DensityAt(uint64_t round) const;
  bool operator==(const TagcSpec&) const = default;
};

using CodecSpec = std::variant<DenseSpec, TagcSpec>;

// Errors: InvalidArgument naming the unknown codec or key, the value found and the values allowed.
absl::StatusOr<CodecSpec> ParseCodecSpec(std::string_view text);
std::string ToString(const CodecSpec& spec);  // canonical: every key, fixed order, every digit

}  // namespace gradwire
