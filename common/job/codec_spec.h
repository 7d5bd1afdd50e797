// Codec specs: "name:key=value,key=value", parsed and validated once, printed back in canonical form.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

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

// "tagc:density=0.01,bits=auto|2..16,cells=auto|8|16|32,form=auto|list|sketch,warmup_rounds=0,warmup_density=0.1,
// slack=1.0". TAGC (arXiv 2504.05638); where we deviate from the paper: README.md.
struct TagcSpec {
  // How a frame writes its elements down. kAuto: as what takes fewest bytes, which is a list where frames go straight
  // to a shard. kSketch: as a sketch, beside which shards take lists, too.
  enum class Form : uint8_t { kAuto, kList, kSketch };
  double density = 0.01;  // fraction of elements that a worker sends per round, (0, 1]
  static constexpr uint32_t kAutoBits = 5;
  // Of an integer that a worker sends, at most, sign counted; 0: kAutoBits, and where cell_bits is given as many as the
  // cells have room for.
  uint32_t bits = 0;
  uint32_t cell_bits = 0;  // of an integer of the sums: 8, 16, 32; 0: the least that hold bits of max_workers
  Form form = Form::kAuto;
  uint32_t warmup_rounds = 0;  // density falls geometrically from warmup_density over this many rounds
  double warmup_density = 0.1;
  double slack = 1.0;  // cells of a sketch relative to what the peeling threshold asks for; below 1 forces deferral
  // Density of round r (round 0 is the calibration round and sends nothing).
  double DensityAt(uint64_t round) const;
  bool operator==(const TagcSpec&) const = default;
};

// Every element in a few bits, with scales per run; frames decode to float32 and are summed on the grid. Definitions,
// sources and what we deviate in: README.md.
//   "fp16"  "onebit"  "signsgd"  "signum:momentum=0.9"  "efsignsgd"  "terngrad:clip=0"
//   "qsgd:bits=4"  "linear:bits=4,norm=max"  "natural:bits=4,norm=max"
struct QuantizedSpec {
  enum class Scheme : uint8_t { kFp16, kOneBit, kSignSgd, kSigNum, kEfSignSgd, kTernGrad, kQsgd, kLinear, kNatural };
  enum class Norm : uint8_t { kMax, kL2 };  // linear, natural: what a run is divided by; qsgd has kL2
  Scheme scheme = Scheme::kFp16;
  uint32_t bits = 4;       // qsgd, linear, natural: per element, sign counted; 2 to 8
  Norm norm = Norm::kMax;  // linear, natural
  float momentum = 0.9f;   // signum: [0, 1)
  float clip = 0;          // terngrad: standard deviations beyond which a run is clipped; 0: it is not
  bool operator==(const QuantizedSpec&) const = default;
};

// A part of the elements, values in float32 or less. Frames carry positions and values; sums on the grid.
//   "topk:density=0.01,values=fp32|fp16|bf16|int8|int6|int4|2bit,warmup_rounds=0,warmup_density=0.1"
//   "threshold:value=0.001,values=fp32"  "randomk:density=0.01,values=fp32"
//   "dgc:density=0.01,values=fp32,momentum=0.9,nesterov=false,clip=0,warmup_rounds=0,warmup_density=0.1"
//   "zen:index=smallest|auto|coo|bitmap,values=fp32|fp16|bf16,run=16"  "adaptive:run=64"
//   "union:values=int8", an update codec alone: the elements that the round's mean has
struct SparseSpec {
  enum class Choice : uint8_t { kTopK, kThreshold, kRandomK, kDgc, kNonZero, kAdaptive, kUnion };
  enum class Values : uint8_t { kFp32, kFp16, kBf16, kInt8, kInt4, k2Bit, kInt6 };
  enum class Index : uint8_t { kSmallest, kAuto, kCoordinates, kBitmap };
  Choice choice = Choice::kTopK;
  // topk, dgc, randomk: fraction of the elements that a worker sends per round, (0, 1]; zen, adaptive, union: 1.
  double density = 0.01;
  double threshold = 0.001;  // threshold: magnitudes from here on are sent
  Values values = Values::kFp32;
  uint32_t warmup_rounds = 0;  // topk, dgc: as TagcSpec
  double warmup_density = 0.1;
  float momentum = 0.9f;  // dgc: of the worker's velocity, [0, 1)
  bool nesterov = false;  // dgc
  float clip = 0;         // dgc: norm of a tensor's gradient, over all workers, beyond which it is scaled; 0: it is not
  Index index = Index::kSmallest;  // zen: how positions travel; auto is the smaller of coo and bitmap
  uint32_t run_elements = 0;       // zen, adaptive: dealt to a shard as one, if fewer than the job's; 0: the job's
  double DensityAt(uint64_t round) const;  // topk, dgc, randomk; as TagcSpec
  bool operator==(const SparseSpec&) const = default;
};

// Every element in a few bits on a range that all workers have agreed on, so that frames are merged as integers.
// Definitions, sources and what we deviate in: README.md.
//   "uniform:bits=4,rounding=nearest|stochastic"  "thc:bits=4,granularity=30,p=0.03125"
struct HomomorphicSpec {
  enum class Scheme : uint8_t { kUniform, kThc };
  enum class Rounding : uint8_t { kNearest, kStochastic };
  Scheme scheme = Scheme::kUniform;
  uint32_t bits = 4;                       // per element on the wire; uniform: 2 to 8, thc: 1 to 6
  Rounding rounding = Rounding::kNearest;  // uniform
  uint32_t granularity = 30;               // thc: largest integer of its table, even, 2^bits to 254
  double p = 1.0 / 32;                     // thc: of normal numbers, the part that its range leaves out
  bool operator==(const HomomorphicSpec&) const = default;
};

// Each matrix by two thin factors, summed over the workers in two rounds. Definition, source and what we deviate in:
// README.md.  "powersgd:rank=2"
struct PowerSgdSpec {
  uint32_t rank = 2;  // columns of a factor, 1 to 32
  bool operator==(const PowerSgdSpec&) const = default;
};

using CodecSpec = std::variant<DenseSpec, TagcSpec, QuantizedSpec, SparseSpec, HomomorphicSpec, PowerSgdSpec>;

// Whether workers send all elements with it: how much a frame carries grows with what it is of.
inline bool AllTravel(const CodecSpec& codec) {
  return std::holds_alternative<DenseSpec>(codec) || std::holds_alternative<QuantizedSpec>(codec) ||
         std::holds_alternative<HomomorphicSpec>(codec);
}

// Errors: InvalidArgument naming the unknown codec or key, the value found and the values allowed.
absl::StatusOr<CodecSpec> ParseCodecSpec(std::string_view text);
bool IsZen(const CodecSpec& codec);
std::vector<std::string> CodecNames();        // of every codec that ParseCodecSpec knows
std::string ToString(const CodecSpec& spec);  // canonical: every key but form=auto, fixed order, every digit
// The same of what both ends of a frame must agree on: without tagc's form, which is its writer's choice.
std::string AgreedOf(const CodecSpec& spec);

}  // namespace gradwire
