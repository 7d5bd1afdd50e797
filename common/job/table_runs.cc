// See table_runs.h.
#include "common/job/table_runs.h"

#include <limits>
#include <string>
#include <variant>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "common/job/codec_spec.h"

namespace gradwire {
namespace {

// Encoding, merging and decoding rows take hardly longer than with any longer ones, and four rows of 64 are few.
constexpr uint64_t kLeast = 256;
constexpr uint64_t kMost = 4096;
// What runs may take in every process: rows are looked up in them, so they should lie in a cache.
constexpr uint64_t kRunBytes = 24;
constexpr uint64_t kMostBytes = 4u << 20;

uint64_t ElementsOf(const v1::JobSpec& spec) {
  constexpr uint64_t kMany = std::numeric_limits<uint64_t>::max();
  uint64_t elements = 0;
  for (const v1::TensorSpec& tensor : spec.tensors()) {
    uint64_t of_this = 1;
    for (uint64_t d : tensor.shape()) of_this = d != 0 && of_this > kMany / d ? kMany : of_this * d;
    elements = of_this > kMany - elements ? kMany : elements + of_this;
  }
  return elements;
}

std::string WithRun(const std::string& codec, uint32_t run) {
  if (absl::StrContains(codec, "run=")) return codec;
  absl::StatusOr<CodecSpec> parsed = ParseCodecSpec(codec);
  if (!parsed.ok() || !IsZen(*parsed)) return codec;
  std::get<SparseSpec>(*parsed).run_elements = run;
  return ToString(*parsed);
}

}  // namespace

uint32_t TableRun(uint64_t elements) {
  uint64_t run = kLeast;
  while (run < kMost && elements / run > kMostBytes / kRunBytes) run *= 2;
  return static_cast<uint32_t>(run);
}

v1::JobSpec WithTableRuns(v1::JobSpec spec) {
  const uint32_t run = TableRun(ElementsOf(spec));
  spec.set_codec(WithRun(spec.codec(), run));
  for (v1::CodecRule& rule : *spec.mutable_rules()) rule.set_codec(WithRun(rule.codec(), run));
  return spec;
}

}  // namespace gradwire
