// Headers of safetensors files: what is accepted names bytes of the file only, and can be written again.
#include <algorithm>
#include <cstring>
#include <string>

#include "common/snapshot/safetensors.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

std::vector<uint8_t> WithLength(Input text) {
  std::vector<uint8_t> file(8);
  const uint64_t length = text.size();
  std::memcpy(file.data(), &length, sizeof(length));
  file.insert(file.end(), text.begin(), text.end());
  return file;
}

bool Same(const TensorEntry& a, const TensorEntry& b) {
  return a.name == b.name && a.type == b.type && a.shape == b.shape && a.begin == b.begin && a.bytes == b.bytes;
}

}  // namespace

// u32 bytes of tensors, header without its length.
void RunSafetensors(Input input) {
  Reader reader(input);
  const uint64_t tensor_bytes = reader.Take<uint32_t>();
  const std::vector<uint8_t> file = WithLength(reader.rest());
  const absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(file, file.size() + tensor_bytes);
  if (!header.ok()) return;
  std::vector<TensorEntry> entries;
  for (const auto& [name, entry] : header->entries) {
    Require(entry.begin <= tensor_bytes && entry.bytes <= tensor_bytes - entry.begin, "tensors lie in the file");
    entries.push_back(entry);
  }
  std::ranges::sort(entries, {}, [](const TensorEntry& e) { return std::pair(e.begin, e.bytes); });
  const std::vector<uint8_t> written = MakeSafetensorsHeader(&entries, header->metadata);
  const absl::StatusOr<SafetensorsHeader> again = ParseSafetensorsHeader(written, written.size() + tensor_bytes);
  Require(again.ok() && again->metadata == header->metadata &&
              std::ranges::equal(again->entries, header->entries,
                                 [](const auto& a, const auto& b) { return Same(a.second, b.second); }),
          "a header that is read, written and read stays what it is");
}

Seeds SafetensorsSeeds() {
  std::vector<TensorEntry> entries = {{"layer.weight", TensorType::kF32, {4, 5}},
                                      {"empty", TensorType::kF32, {0}},
                                      {"exponents/0", TensorType::kI8, {3}},
                                      {"geometry/0", TensorType::kU32, {2}}};
  const std::vector<uint8_t> header = MakeSafetensorsHeader(&entries, {{"format", "pt"}});
  const uint64_t bytes = entries.back().begin + entries.back().bytes;
  std::vector<uint8_t> seed;
  for (int i = 0; i < 4; ++i) seed.push_back(static_cast<uint8_t>(bytes >> (8 * i)));
  seed.insert(seed.end(), header.begin() + 8, header.end());
  return {seed};
}

}  // namespace gradwire::fuzz
