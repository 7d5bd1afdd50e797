// Runs every fuzz target over its seeds and its kept inputs (corpus/NAME/), without a fuzzer: what was found once does
// not come back.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/fuzz/chunk_input.h"
#include "tests/fuzz/target.h"

namespace gradwire::fuzz {
namespace {

class FuzzCorpus : public ::testing::TestWithParam<Target> {};

TEST_P(FuzzCorpus, HoldsForSeeds) {
  for (const std::vector<uint8_t>& seed : GetParam().seeds()) GetParam().run(seed);
}

TEST_P(FuzzCorpus, HoldsForKeptInputs) {
  const std::filesystem::path folder = std::filesystem::path(GRADWIRE_FUZZ_CORPUS) / GetParam().name;
  ASSERT_TRUE(std::filesystem::is_directory(folder)) << folder << " is missing";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    SCOPED_TRACE(entry.path());
    GetParam().run({bytes.data(), bytes.size()});
  }
}

TEST_P(FuzzCorpus, HoldsForNothing) { GetParam().run({}); }

// A little of what the fuzzer does, where there is none: the mutator's own changes, none of bytes.
TEST_P(FuzzCorpus, HoldsForMutatedChunks) {
  if (!GetParam().chunks) return;
  const std::vector<std::vector<uint8_t>> seeds = GetParam().seeds();
  std::vector<uint8_t> input(1 << 14);
  for (uint32_t i = 0; i < 2000; ++i) {
    if (i % 8 == 0) input = seeds[i / 8 % seeds.size()];
    size_t size = input.size();
    input.resize(1 << 14);
    size = MutateChunks(input.data(), size, input.size(), i, [](uint8_t*, size_t bytes, size_t) { return bytes; });
    input.resize(size);
    GetParam().run(input);
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, FuzzCorpus, ::testing::ValuesIn(Targets().begin(), Targets().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace gradwire::fuzz
