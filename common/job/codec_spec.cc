// Parsing and printing of codec specs.
#include "common/job/codec_spec.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <map>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

using KeyValues = std::map<std::string, std::string, std::less<>>;

absl::StatusOr<KeyValues> SplitKeyValues(std::string_view codec, std::string_view text) {
  KeyValues out;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string_view item = text.substr(0, comma);
    text.remove_prefix(std::min(comma + 1, text.size()));
    const size_t eq = item.find('=');
    if (eq == std::string_view::npos || eq == 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("codec '%s': '%s' is not of the form key=value", std::string(codec), std::string(item)));
    }
    if (!out.emplace(item.substr(0, eq), item.substr(eq + 1)).second) {
      return absl::InvalidArgumentError(
          absl::StrFormat("codec '%s': '%s' is set twice", std::string(codec), std::string(item.substr(0, eq))));
    }
  }
  return out;
}

// Takes `key` out of `values`; leaves `*out` if it is not there.
template <typename T>
absl::Status TakeNumber(std::string_view codec, std::string_view key, T low, T high, KeyValues* values, T* out) {
  const auto it = values->find(key);
  if (it == values->end()) return absl::OkStatus();
  const std::string& text = it->second;
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= low && value <= high)) {
    return absl::InvalidArgumentError(absl::StrCat("codec '", std::string(codec), "': ", std::string(key), "=", text,
                                                   " must be a number from ", low, " to ", high));
  }
  *out = value;
  values->erase(it);
  return absl::OkStatus();
}

// The shortest text that is parsed to the same number.
template <typename T>
std::string Shortest(T value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value, std::chars_format::general);
  return error == std::errc() ? std::string(text, end) : std::string();
}

absl::Status RefuseRest(std::string_view codec, const KeyValues& values, std::string_view allowed) {
  if (values.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("codec '%s' has no setting '%s'; it has: %s", std::string(codec),
                                                    values.begin()->first, std::string(allowed)));
}

template <typename T>
using Choices = std::span<const std::pair<std::string_view, T>>;

template <typename T>
std::string NamesOf(Choices<T> choices) {
  return absl::StrJoin(choices, ", ", [](std::string* out, const auto& choice) { out->append(choice.first); });
}

template <typename T>
std::string NameOf(Choices<T> choices, T value) {
  return std::string(
      std::find_if(choices.begin(), choices.end(), [value](const auto& c) { return c.second == value; })->first);
}

// Takes `key` out of `values`; leaves `*out` if it is not there.
template <typename T>
absl::Status TakeChoice(std::string_view codec, std::string_view key, Choices<T> choices, KeyValues* values, T* out) {
  const auto it = values->find(key);
  if (it == values->end()) return absl::OkStatus();
  const auto found =
      std::find_if(choices.begin(), choices.end(), [&](const auto& choice) { return choice.first == it->second; });
  if (found == choices.end()) {
    return absl::InvalidArgumentError(absl::StrCat("codec '", std::string(codec), "': ", std::string(key), "=",
                                                   it->second, " is unknown; use one of ", NamesOf(choices)));
  }
  *out = found->second;
  values->erase(it);
  return absl::OkStatus();
}

constexpr std::pair<std::string_view, DenseSpec::Values> kDenseValues[] = {
    {"fp32", DenseSpec::Values::kFp32},
    {"bf16", DenseSpec::Values::kBf16},
    {"fixed32", DenseSpec::Values::kFixed32},
    {"fixed16", DenseSpec::Values::kFixed16},
};

absl::StatusOr<CodecSpec> ParseDense(KeyValues values) {
  DenseSpec spec;
  GW_RETURN_IF_ERROR(TakeChoice<DenseSpec::Values>("dense", "values", kDenseValues, &values, &spec.values));
  GW_RETURN_IF_ERROR(RefuseRest("dense", values, "values"));
  return spec;
}

constexpr std::pair<std::string_view, TagcSpec::Form> kForms[] = {
    {"auto", TagcSpec::Form::kAuto}, {"list", TagcSpec::Form::kList}, {"sketch", TagcSpec::Form::kSketch}};

absl::StatusOr<CodecSpec> ParseTagc(KeyValues values) {
  TagcSpec spec;
  if (const auto it = values.find("cells"); it != values.end()) {
    if (it->second == "auto") {
      spec.cell_bits = 0;
    } else if (it->second == "8" || it->second == "16" || it->second == "32") {
      spec.cell_bits = static_cast<uint32_t>(std::stoi(it->second));
    } else {
      return absl::InvalidArgumentError(
          absl::StrFormat("codec 'tagc': cells=%s is unknown; use auto, 8, 16 or 32 (bits)", it->second));
    }
    values.erase(it);
  }
  if (const auto it = values.find("bits"); it != values.end() && it->second == "auto") values.erase(it);
  GW_RETURN_IF_ERROR(TakeNumber("tagc", "bits", 2u, 16u, &values, &spec.bits));
  GW_RETURN_IF_ERROR(TakeChoice<TagcSpec::Form>("tagc", "form", kForms, &values, &spec.form));
  GW_RETURN_IF_ERROR(TakeNumber("tagc", "density", 1e-6, 1.0, &values, &spec.density));
  GW_RETURN_IF_ERROR(TakeNumber("tagc", "warmup_rounds", 0u, 100'000'000u, &values, &spec.warmup_rounds));
  GW_RETURN_IF_ERROR(TakeNumber("tagc", "warmup_density", 1e-6, 1.0, &values, &spec.warmup_density));
  GW_RETURN_IF_ERROR(TakeNumber("tagc", "slack", 0.1, 8.0, &values, &spec.slack));
  GW_RETURN_IF_ERROR(RefuseRest("tagc", values, "density, bits, cells, form, warmup_rounds, warmup_density, slack"));
  return spec;
}

using Scheme = QuantizedSpec::Scheme;

constexpr std::pair<std::string_view, Scheme> kSchemes[] = {
    {"fp16", Scheme::kFp16},     {"onebit", Scheme::kOneBit},       {"signsgd", Scheme::kSignSgd},
    {"signum", Scheme::kSigNum}, {"efsignsgd", Scheme::kEfSignSgd}, {"terngrad", Scheme::kTernGrad},
    {"qsgd", Scheme::kQsgd},     {"linear", Scheme::kLinear},       {"natural", Scheme::kNatural},
};
constexpr std::pair<std::string_view, QuantizedSpec::Norm> kNorms[] = {
    {"max", QuantizedSpec::Norm::kMax},
    {"l2", QuantizedSpec::Norm::kL2},
};
constexpr std::pair<std::string_view, SparseSpec::Choice> kSparseChoices[] = {
    {"topk", SparseSpec::Choice::kTopK},       {"threshold", SparseSpec::Choice::kThreshold},
    {"randomk", SparseSpec::Choice::kRandomK}, {"dgc", SparseSpec::Choice::kDgc},
    {"zen", SparseSpec::Choice::kNonZero},     {"adaptive", SparseSpec::Choice::kAdaptive},
    {"union", SparseSpec::Choice::kUnion},
};
// All but the last, which is an update codec alone.
constexpr std::span<const std::pair<std::string_view, SparseSpec::Choice>> kPushedChoices(kSparseChoices,
                                                                                          std::size(kSparseChoices) -
                                                                                              1);
constexpr std::pair<std::string_view, SparseSpec::Values> kSparseValues[] = {
    {"fp32", SparseSpec::Values::kFp32}, {"fp16", SparseSpec::Values::kFp16}, {"bf16", SparseSpec::Values::kBf16},
    {"int8", SparseSpec::Values::kInt8}, {"int6", SparseSpec::Values::kInt6}, {"int4", SparseSpec::Values::kInt4},
    {"2bit", SparseSpec::Values::k2Bit},
};
// Of zen, which has no residual that could keep what coarser ones drop.
constexpr std::span<const std::pair<std::string_view, SparseSpec::Values>> kZenValues(kSparseValues, 3);
constexpr std::pair<std::string_view, SparseSpec::Index> kIndexForms[] = {
    {"smallest", SparseSpec::Index::kSmallest},
    {"auto", SparseSpec::Index::kAuto},
    {"coo", SparseSpec::Index::kCoordinates},
    {"bitmap", SparseSpec::Index::kBitmap},
};
constexpr uint32_t kAdaptiveRunElements = 64;
constexpr uint32_t kLeastRunElements = 4;
constexpr uint32_t kMostRunElements = 65536;

constexpr std::pair<std::string_view, bool> kSwitch[] = {{"false", false}, {"true", true}};

using Homomorphic = HomomorphicSpec::Scheme;

constexpr std::pair<std::string_view, Homomorphic> kHomomorphicSchemes[] = {
    {"uniform", Homomorphic::kUniform},
    {"thc", Homomorphic::kThc},
};
constexpr std::pair<std::string_view, HomomorphicSpec::Rounding> kRoundings[] = {
    {"nearest", HomomorphicSpec::Rounding::kNearest},
    {"stochastic", HomomorphicSpec::Rounding::kStochastic},
};

absl::StatusOr<CodecSpec> ParseHomomorphic(std::string_view name, Homomorphic scheme, KeyValues values) {
  HomomorphicSpec spec;
  spec.scheme = scheme;
  if (scheme == Homomorphic::kUniform) {
    GW_RETURN_IF_ERROR(TakeNumber(name, "bits", 2u, 8u, &values, &spec.bits));
    GW_RETURN_IF_ERROR(TakeChoice<HomomorphicSpec::Rounding>(name, "rounding", kRoundings, &values, &spec.rounding));
    GW_RETURN_IF_ERROR(RefuseRest(name, values, "bits, rounding"));
    return spec;
  }
  GW_RETURN_IF_ERROR(TakeNumber(name, "bits", 1u, 6u, &values, &spec.bits));
  spec.granularity = std::max(spec.granularity, 1u << spec.bits);
  GW_RETURN_IF_ERROR(TakeNumber(name, "granularity", 1u << spec.bits, 254u, &values, &spec.granularity));
  GW_RETURN_IF_ERROR(TakeNumber(name, "p", 1e-6, 0.5, &values, &spec.p));
  GW_RETURN_IF_ERROR(RefuseRest(name, values, "bits, granularity, p"));
  if (spec.granularity % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("codec 'thc': granularity=%d must be even, so that zero is in the middle", spec.granularity));
  }
  return spec;
}

absl::StatusOr<CodecSpec> ParseQuantized(std::string_view name, Scheme scheme, KeyValues values) {
  QuantizedSpec spec;
  spec.scheme = scheme;
  std::string_view settings = "none";
  switch (scheme) {
    case Scheme::kSigNum:
      settings = "momentum";
      GW_RETURN_IF_ERROR(TakeNumber(name, "momentum", 0.0f, 0.9999f, &values, &spec.momentum));
      break;
    case Scheme::kTernGrad:
      settings = "clip";
      GW_RETURN_IF_ERROR(TakeNumber(name, "clip", 0.0f, 100.0f, &values, &spec.clip));
      break;
    case Scheme::kQsgd:
      settings = "bits";
      spec.norm = QuantizedSpec::Norm::kL2;
      GW_RETURN_IF_ERROR(TakeNumber(name, "bits", 2u, 8u, &values, &spec.bits));
      break;
    case Scheme::kLinear:
    case Scheme::kNatural:
      settings = "bits, norm";
      GW_RETURN_IF_ERROR(TakeNumber(name, "bits", 2u, 8u, &values, &spec.bits));
      GW_RETURN_IF_ERROR(TakeChoice<QuantizedSpec::Norm>(name, "norm", kNorms, &values, &spec.norm));
      break;
    default:
      break;
  }
  GW_RETURN_IF_ERROR(RefuseRest(name, values, settings));
  return spec;
}

// zen, adaptive.
absl::StatusOr<CodecSpec> ParseNonZero(std::string_view name, SparseSpec::Choice choice, KeyValues values) {
  SparseSpec spec;
  spec.choice = choice;
  spec.density = 1;  // at most
  spec.run_elements = kAdaptiveRunElements;
  std::string_view settings = "run";
  if (choice == SparseSpec::Choice::kNonZero) {
    settings = "index, values, run";
    spec.run_elements = 0;  // Job::Make chooses
    GW_RETURN_IF_ERROR(TakeChoice<SparseSpec::Index>(name, "index", kIndexForms, &values, &spec.index));
    GW_RETURN_IF_ERROR(TakeChoice<SparseSpec::Values>(name, "values", kZenValues, &values, &spec.values));
  }
  GW_RETURN_IF_ERROR(TakeNumber(name, "run", kLeastRunElements, kMostRunElements, &values, &spec.run_elements));
  if (spec.run_elements != 0 && !std::has_single_bit(spec.run_elements)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("codec '%s': run=%d must be a power of two", std::string(name), spec.run_elements));
  }
  GW_RETURN_IF_ERROR(RefuseRest(name, values, settings));
  return spec;
}

absl::StatusOr<CodecSpec> ParseSparse(std::string_view name, SparseSpec::Choice choice, KeyValues values) {
  if (choice == SparseSpec::Choice::kNonZero || choice == SparseSpec::Choice::kAdaptive) {
    return ParseNonZero(name, choice, std::move(values));
  }
  SparseSpec spec;
  spec.choice = choice;
  std::string_view settings = "density, values";
  GW_RETURN_IF_ERROR(TakeChoice<SparseSpec::Values>(name, "values", kSparseValues, &values, &spec.values));
  if (choice == SparseSpec::Choice::kThreshold) {
    settings = "value, values";
    GW_RETURN_IF_ERROR(TakeNumber(name, "value", 1e-30, 1e5, &values, &spec.threshold));
  } else if (choice == SparseSpec::Choice::kUnion) {
    settings = "values";
    spec.density = 1;  // at most
  } else {
    GW_RETURN_IF_ERROR(TakeNumber(name, "density", 1e-6, 1.0, &values, &spec.density));
  }
  if (choice == SparseSpec::Choice::kTopK || choice == SparseSpec::Choice::kDgc) {
    settings = "density, values, warmup_rounds, warmup_density";
    GW_RETURN_IF_ERROR(TakeNumber(name, "warmup_rounds", 0u, 100'000'000u, &values, &spec.warmup_rounds));
    GW_RETURN_IF_ERROR(TakeNumber(name, "warmup_density", 1e-6, 1.0, &values, &spec.warmup_density));
  }
  if (choice == SparseSpec::Choice::kDgc) {
    settings = "density, values, momentum, nesterov, clip, warmup_rounds, warmup_density";
    GW_RETURN_IF_ERROR(TakeNumber(name, "momentum", 0.0f, 0.9999f, &values, &spec.momentum));
    GW_RETURN_IF_ERROR(TakeChoice<bool>(name, "nesterov", kSwitch, &values, &spec.nesterov));
    GW_RETURN_IF_ERROR(TakeNumber(name, "clip", 0.0f, 1e9f, &values, &spec.clip));
  }
  GW_RETURN_IF_ERROR(RefuseRest(name, values, settings));
  return spec;
}

constexpr char kPowerSgd[] = "powersgd";
constexpr uint32_t kMostRank = 32;

absl::StatusOr<CodecSpec> ParsePowerSgd(KeyValues values) {
  PowerSgdSpec spec;
  GW_RETURN_IF_ERROR(TakeNumber(kPowerSgd, "rank", 1u, kMostRank, &values, &spec.rank));
  GW_RETURN_IF_ERROR(RefuseRest(kPowerSgd, values, "rank"));
  return spec;
}

// Falls geometrically from `warmup` to `density` over `rounds`; 0 in the calibration round.
double WarmedDensity(uint64_t round, double density, double warmup, uint32_t rounds) {
  if (round == 0) return 0;
  if (warmup <= density || round > rounds) return density;
  return warmup * std::pow(density / warmup, static_cast<double>(round - 1) / static_cast<double>(rounds));
}

std::string Print(const DenseSpec& spec) {
  return absl::StrCat("dense:values=", NameOf<DenseSpec::Values>(kDenseValues, spec.values));
}

std::string Print(const TagcSpec& spec) {
  const std::string cells = spec.cell_bits == 0 ? "auto" : std::to_string(spec.cell_bits);
  // Shape digests in journals are made of these words (AgreedOf), and are older than forms and bits.
  const std::string bits = spec.bits == 0 ? "" : absl::StrCat("bits=", spec.bits, ",");
  const std::string form =
      spec.form == TagcSpec::Form::kAuto ? "" : absl::StrCat("form=", NameOf<TagcSpec::Form>(kForms, spec.form), ",");
  return absl::StrFormat("tagc:density=%s,%scells=%s,%swarmup_rounds=%d,warmup_density=%s,slack=%s",
                         Shortest(spec.density), bits, cells, form, spec.warmup_rounds, Shortest(spec.warmup_density),
                         Shortest(spec.slack));
}

std::string Print(const QuantizedSpec& spec) {
  const std::string name = NameOf<Scheme>(kSchemes, spec.scheme);
  switch (spec.scheme) {
    case Scheme::kSigNum:
      return absl::StrCat(name, ":momentum=", Shortest(spec.momentum));
    case Scheme::kTernGrad:
      return absl::StrCat(name, ":clip=", Shortest(spec.clip));
    case Scheme::kQsgd:
      return absl::StrCat(name, ":bits=", spec.bits);
    case Scheme::kLinear:
    case Scheme::kNatural:
      return absl::StrCat(name, ":bits=", spec.bits, ",norm=", NameOf<QuantizedSpec::Norm>(kNorms, spec.norm));
    default:
      return name;
  }
}

std::string Print(const SparseSpec& spec) {
  const std::string name = NameOf<SparseSpec::Choice>(kSparseChoices, spec.choice);
  const std::string values = NameOf<SparseSpec::Values>(kSparseValues, spec.values);
  switch (spec.choice) {
    case SparseSpec::Choice::kThreshold:
      return absl::StrCat(name, ":value=", Shortest(spec.threshold), ",values=", values);
    case SparseSpec::Choice::kRandomK:
      return absl::StrCat(name, ":density=", Shortest(spec.density), ",values=", values);
    case SparseSpec::Choice::kNonZero:
      return absl::StrCat(name, ":index=", NameOf<SparseSpec::Index>(kIndexForms, spec.index), ",values=", values,
                          spec.run_elements == 0 ? "" : absl::StrCat(",run=", spec.run_elements));
    case SparseSpec::Choice::kAdaptive:
      return absl::StrCat(name, ":run=", spec.run_elements);
    case SparseSpec::Choice::kUnion:
      return absl::StrCat(name, ":values=", values);
    case SparseSpec::Choice::kTopK:
    case SparseSpec::Choice::kDgc:
      break;
  }
  std::string velocity;
  if (spec.choice == SparseSpec::Choice::kDgc) {
    velocity = absl::StrCat(",momentum=", Shortest(spec.momentum), ",nesterov=", NameOf<bool>(kSwitch, spec.nesterov),
                            ",clip=", Shortest(spec.clip));
  }
  return absl::StrCat(name, ":density=", Shortest(spec.density), ",values=", values, velocity,
                      ",warmup_rounds=", spec.warmup_rounds, ",warmup_density=", Shortest(spec.warmup_density));
}

std::string Print(const HomomorphicSpec& spec) {
  const std::string name = NameOf<Homomorphic>(kHomomorphicSchemes, spec.scheme);
  if (spec.scheme == Homomorphic::kUniform) {
    return absl::StrCat(name, ":bits=", spec.bits,
                        ",rounding=", NameOf<HomomorphicSpec::Rounding>(kRoundings, spec.rounding));
  }
  return absl::StrCat(name, ":bits=", spec.bits, ",granularity=", spec.granularity, ",p=", Shortest(spec.p));
}

std::string Print(const PowerSgdSpec& spec) { return absl::StrCat(kPowerSgd, ":rank=", spec.rank); }

}  // namespace

double TagcSpec::DensityAt(uint64_t round) const {
  return WarmedDensity(round, density, warmup_density, warmup_rounds);
}

double SparseSpec::DensityAt(uint64_t round) const {
  return WarmedDensity(round, density, warmup_density,
                       choice == Choice::kTopK || choice == Choice::kDgc ? warmup_rounds : 0);
}

absl::StatusOr<CodecSpec> ParseCodecSpec(std::string_view text) {
  const size_t colon = std::min(text.find(':'), text.size());
  const std::string_view name = text.substr(0, colon);
  const std::string_view rest = colon < text.size() ? text.substr(colon + 1) : std::string_view();
  // "dense:fp32" is short for "dense:values=fp32".
  if (name == "dense" && !rest.empty() && rest.find('=') == std::string_view::npos) {
    return ParseDense({{"values", std::string(rest)}});
  }
  GW_ASSIGN_OR_RETURN(KeyValues values, SplitKeyValues(name, rest));
  if (name == "dense") return ParseDense(std::move(values));
  if (name == "tagc") return ParseTagc(std::move(values));
  for (const auto& [known, scheme] : kSchemes) {
    if (name == known) return ParseQuantized(name, scheme, std::move(values));
  }
  for (const auto& [known, choice] : kSparseChoices) {
    if (name == known) return ParseSparse(name, choice, std::move(values));
  }
  for (const auto& [known, scheme] : kHomomorphicSchemes) {
    if (name == known) return ParseHomomorphic(name, scheme, std::move(values));
  }
  if (name == kPowerSgd) return ParsePowerSgd(std::move(values));
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown codec '", std::string(name), "'; known: dense (dense:", NamesOf<DenseSpec::Values>(kDenseValues),
      "), tagc (tagc:density=0.01), ", NamesOf<SparseSpec::Choice>(kPushedChoices), ", ", NamesOf<Scheme>(kSchemes),
      ", ", NamesOf<Homomorphic>(kHomomorphicSchemes), ", ", kPowerSgd));
}

bool IsZen(const CodecSpec& codec) {
  const SparseSpec* const sparse = std::get_if<SparseSpec>(&codec);
  return sparse != nullptr && sparse->choice == SparseSpec::Choice::kNonZero;
}

std::vector<std::string> CodecNames() {
  std::vector<std::string> names = {"dense", "tagc"};
  const auto add = [&names](const auto& choices) {
    for (const auto& choice : choices) names.emplace_back(choice.first);
  };
  add(kPushedChoices);
  add(kSchemes);
  add(kHomomorphicSchemes);
  names.emplace_back(kPowerSgd);
  return names;
}

std::string ToString(const CodecSpec& spec) {
  return std::visit([](const auto& s) { return Print(s); }, spec);
}

std::string AgreedOf(const CodecSpec& spec) {
  const auto* const tagc = std::get_if<TagcSpec>(&spec);
  if (tagc == nullptr) return ToString(spec);
  TagcSpec agreed = *tagc;
  agreed.form = TagcSpec::Form::kAuto;
  return ToString(agreed);
}

}  // namespace gradwire
