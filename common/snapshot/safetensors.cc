// See safetensors.h.
#include "common/snapshot/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr char kMetadata[] = "__metadata__";

struct TypeName {
  TensorType type;
  const char* name;
  uint64_t bytes;
};
constexpr TypeName kTypes[] = {{TensorType::kF32, "F32", 4}, {TensorType::kI8, "I8", 1}, {TensorType::kU32, "U32", 4}};

const TypeName& NameOf(TensorType type) {
  return *std::find_if(std::begin(kTypes), std::end(kTypes), [type](const TypeName& t) { return t.type == type; });
}

absl::Status Bad(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrFormat("not a safetensors file: %s", what));
}

absl::StatusOr<TensorEntry> ParseEntry(const std::string& name, const nlohmann::json& json) {
  if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string() || !json.contains("shape") ||
      !json["shape"].is_array() || !json.contains("data_offsets") || !json["data_offsets"].is_array() ||
      json["data_offsets"].size() != 2) {
    return Bad(absl::StrFormat("tensor '%s' has no dtype, shape and data_offsets", name));
  }
  TensorEntry entry;
  entry.name = name;
  const std::string dtype = json["dtype"].get<std::string>();
  const auto type =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeName& t) { return t.name == dtype; });
  if (type == std::end(kTypes)) return Bad(absl::StrFormat("tensor '%s' has dtype '%s'", name, dtype));
  entry.type = type->type;
  uint64_t bytes = type->bytes;
  for (const nlohmann::json& extent : json["shape"]) {
    if (!extent.is_number_unsigned()) return Bad(absl::StrFormat("the shape of tensor '%s'", name));
    entry.shape.push_back(extent.get<uint64_t>());
    if (__builtin_mul_overflow(bytes, entry.shape.back(), &bytes)) {
      return Bad(absl::StrFormat("tensor '%s' is too large", name));
    }
  }
  const nlohmann::json& offsets = json["data_offsets"];
  if (!offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned() ||
      offsets[1].get<uint64_t>() < offsets[0].get<uint64_t>() ||
      offsets[1].get<uint64_t>() - offsets[0].get<uint64_t>() != bytes) {
    return Bad(absl::StrFormat("the offsets of tensor '%s' do not fit its shape", name));
  }
  entry.begin = offsets[0].get<uint64_t>();
  entry.bytes = bytes;
  return entry;
}

}  // namespace

bool IsUtf8(const std::string& text) {
  const nlohmann::json json = text;
  return nlohmann::json::parse(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)) == json;
}

std::vector<uint8_t> MakeSafetensorsHeader(std::vector<TensorEntry>* entries,
                                           const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json[kMetadata] = metadata;
  uint64_t end = 0;
  for (TensorEntry& entry : *entries) {
    const TypeName& type = NameOf(entry.type);
    entry.begin = end;
    entry.bytes = type.bytes;
    for (uint64_t extent : entry.shape) entry.bytes *= extent;
    end += entry.bytes;
    json[entry.name] = {{"dtype", type.name}, {"shape", entry.shape}, {"data_offsets", {entry.begin, end}}};
  }
  std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  std::vector<uint8_t> bytes(kLengthBytes + text.size());
  const uint64_t length = text.size();
  std::memcpy(bytes.data(), &length, kLengthBytes);
  std::memcpy(bytes.data() + kLengthBytes, text.data(), text.size());
  return bytes;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::span<const uint8_t> file, uint64_t file_bytes) {
  uint64_t length = 0;
  if (file.size() < kLengthBytes) return Bad("it is too short");
  std::memcpy(&length, file.data(), kLengthBytes);
  if (length > kMaxHeaderBytes || length > file.size() - kLengthBytes) return Bad("its header is cut off");
  const auto* text = reinterpret_cast<const char*>(file.data() + kLengthBytes);
  const nlohmann::json json = nlohmann::json::parse(text, text + length, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad("its header is no JSON object");
  SafetensorsHeader header;
  header.data_begin = kLengthBytes + length;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadata) {
      if (!value.is_object()) return Bad("its metadata");
      for (const auto& [key, text_value] : value.items()) {
        if (!text_value.is_string()) return Bad("its metadata");
        header.metadata[key] = text_value.get<std::string>();
      }
      continue;
    }
    GW_ASSIGN_OR_RETURN(TensorEntry entry, ParseEntry(name, value));
    ranges.emplace_back(entry.begin, entry.bytes);
    header.entries[name] = std::move(entry);
  }
  std::sort(ranges.begin(), ranges.end());
  uint64_t end = 0;
  for (const auto& [begin, bytes] : ranges) {
    if (begin != end) return Bad("its tensors overlap or leave gaps");
    end += bytes;
  }
  if (end != file_bytes - header.data_begin) return Bad(absl::StrFormat("its tensors have %d bytes", end));
  return header;
}

}  // namespace gradwire
