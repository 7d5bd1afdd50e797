// Parsing and printing of codec specs.
#include "common/codec/codec_spec.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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
std::string Shortest(double value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value, std::chars_format::general);
  return error == std::errc() ? std::string(text, end) : std::string();
}

absl::Status RefuseRest(std::string_view codec, const KeyValues& values, std::string_view allowed) {
  if (values.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("codec '%s' has no setting '%s'; it has: %s", std::string(codec),
                                                    values.begin()->first, std::string(allowed)));
}

constexpr std::pair<std::string_view, DenseSpec::Values> kDenseValues[] = {
    {"fp32", DenseSpec::Values::kFp32},
    {"bf16", DenseSpec::Values::kBf16},
    {"fixed32", DenseSpec::Values::kFixed32},
    {"fixed16", DenseSpec::Values::kFixed16},
};

absl::StatusOr<CodecSpec> ParseDense(KeyValues values) {
  DenseSpec spec;
  if (const auto it = values.find("values"); it != values.end()) {
    const auto* found = std::find_if(std::begin(kDenseValues), std::end(kDenseValues),
                                     [&](const auto& v) { return v.first == it->second; });
    if (found == std::end(kDenseValues)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("codec 'dense': values=%s is unknown; use fp32, bf16, fixed32 or fixed16", it->second));
    }
    spec.values = found->second;
    values.erase(it);
  }
  GW_RETURN_IF_ERROR(RefuseRest("dense", values, "values"));
  return spec;
}

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
  GW_RETURN_IF_ERROR(TakeNumber("tagc", "density", 1e-6, 1.0, &values, &spec.density));
  GW_RETURN_IF_ERROR(TakeNumber("tagc", "warmup_rounds", 0u, 100'000'000u, &values, &spec.warmup_rounds));
  GW_RETURN_IF_ERROR(TakeNumber("tagc", "warmup_density", 1e-6, 1.0, &values, &spec.warmup_density));
  GW_RETURN_IF_ERROR(TakeNumber("tagc", "slack", 0.1, 8.0, &values, &spec.slack));
  GW_RETURN_IF_ERROR(RefuseRest("tagc", values, "density, cells, warmup_rounds, warmup_density, slack"));
  return spec;
}

}  // namespace

double TagcSpec::DensityAt(uint64_t round) const {
  if (round == 0) return 0;
  if (warmup_density <= density || round > warmup_rounds) return density;
  const double progress = static_cast<double>(round - 1) / static_cast<double>(warmup_rounds);
  return warmup_density * std::pow(density / warmup_density, progress);
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
  return absl::InvalidArgumentError(
      absl::StrFormat("unknown codec '%s'; known: dense (dense:fp32, dense:bf16, dense:fixed32, dense:fixed16), tagc "
                      "(tagc:density=0.01)",
                      std::string(name)));
}

std::string ToString(const CodecSpec& spec) {
  if (const auto* dense = std::get_if<DenseSpec>(&spec)) {
    for (const auto& [name, values] : kDenseValues) {
      if (values == dense->values) return absl::StrFormat("dense:values=%s", std::string(name));
    }
  }
  const auto& tagc = std::get<TagcSpec>(spec);
  const std::string cells = tagc.cell_bits == 0 ? "auto" : std::to_string(tagc.cell_bits);
  return absl::StrFormat("tagc:density=%s,cells=%s,warmup_rounds=%d,warmup_density=%s,slack=%s", Shortest(tagc.density),
                         cells, tagc.warmup_rounds, Shortest(tagc.warmup_density), Shortest(tagc.slack));
}

}  // namespace gradwire
