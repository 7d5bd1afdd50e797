// Headers of safetensors files: what is written is read, what is not one is refused.
#include "common/snapshot/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace gradwire {
namespace {

std::vector<uint8_t> FileOf(const std::string& json, uint64_t data_bytes) {
  std::vector<uint8_t> file(8 + json.size() + data_bytes);
  const uint64_t length = json.size();
  std::memcpy(file.data(), &length, 8);
  std::memcpy(file.data() + 8, json.data(), json.size());
  return file;
}

TEST(Safetensors, HeaderComesBack) {
  std::vector<TensorEntry> entries = {{"layer.weight", TensorType::kF32, {2, 3}},
                                      {"scalar \"quoted\"", TensorType::kF32, {}},
                                      {"none", TensorType::kF32, {0, 7}},
                                      {"exponents/0", TensorType::kI8, {5}},
                                      {"geometry/0", TensorType::kU32, {2}}};
  std::vector<uint8_t> file = MakeSafetensorsHeader(&entries, {{"format", "pt"}});
  EXPECT_EQ(file.size() % 8, 0u);
  const uint64_t data_begin = file.size();
  file.resize(file.size() + 24 + 4 + 0 + 5 + 8);
  const auto header = ParseSafetensorsHeader(file, file.size());
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->data_begin, data_begin);
  EXPECT_EQ(header->metadata.at("format"), "pt");
  ASSERT_EQ(header->entries.size(), entries.size());
  for (const TensorEntry& entry : entries) {
    const TensorEntry& found = header->entries.at(entry.name);
    EXPECT_EQ(found.type, entry.type);
    EXPECT_EQ(found.shape, entry.shape);
    EXPECT_EQ(found.begin, entry.begin);
    EXPECT_EQ(found.bytes, entry.bytes);
  }
  EXPECT_EQ(header->entries.at("exponents/0").begin, 28u);
}

TEST(Safetensors, WhatIsNoneIsRefused) {
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  EXPECT_TRUE(ParseSafetensorsHeader(FileOf(good, 8), FileOf(good, 8).size()).ok());
  for (const std::string bad :
       {R"()", R"([])", R"({"a":1})", R"({"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}})",
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})",
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})",
        R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})",
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
        R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", R"({"__metadata__":{"k":1}})",
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})"}) {
    const std::vector<uint8_t> file = FileOf(bad, 8);
    EXPECT_FALSE(ParseSafetensorsHeader(file, file.size()).ok()) << bad;
  }
  std::vector<uint8_t> file = FileOf(good, 8);
  for (size_t n = 0; n < file.size() - 8; ++n) {
    EXPECT_FALSE(ParseSafetensorsHeader(std::span(file).first(n), file.size()).ok()) << n;
  }
  EXPECT_FALSE(ParseSafetensorsHeader(file, file.size() + 1).ok()) << "bytes behind the tensors";
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {  // anything at all must be read without harm
    std::vector<uint8_t> damaged = file;
    for (int k = 0; k < 3; ++k) damaged[random() % damaged.size()] = static_cast<uint8_t>(random());
    ParseSafetensorsHeader(damaged, damaged.size()).IgnoreError();
  }
}

}  // namespace
}  // namespace gradwire
