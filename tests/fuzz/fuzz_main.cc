// The fuzzer: all targets behind libFuzzer's entry points.
//   gradwire_fuzz --target=NAME [libFuzzer's flags] CORPUS...      fuzzes one target
//   gradwire_fuzz --list                                           names the targets
//   gradwire_fuzz --target=NAME --write-seeds=FOLDER               writes its seeds
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include "tests/fuzz/chunk_input.h"
#include "tests/fuzz/target.h"

// Of libFuzzer.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace gradwire::fuzz {
namespace {

const Target* g_target = nullptr;  // libFuzzer calls plain functions

[[noreturn]] void Usage() {
  std::fprintf(stderr, "usage: gradwire_fuzz --list | --target=NAME [--write-seeds=FOLDER] [libFuzzer's flags]\n");
  std::exit(2);
}

void WriteSeeds(const std::string& folder) {
  int number = 0;
  for (const std::vector<uint8_t>& seed : g_target->seeds()) {
    std::ofstream file(folder + "/seed-" + std::to_string(number++), std::ios::binary);
    file.write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
    if (!file.good()) {
      std::fprintf(stderr, "cannot write seeds to %s\n", folder.c_str());
      std::exit(1);
    }
  }
}

void ParseFlags(int argc, char** argv) {
  std::string seeds;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--list") {
      for (const Target& target : Targets()) std::printf("%s\n", target.name);
      std::exit(0);
    } else if (flag.starts_with("--target=")) {
      g_target = FindTarget(flag.substr(flag.find('=') + 1));
    } else if (flag.starts_with("--write-seeds=")) {
      seeds = flag.substr(flag.find('=') + 1);
    } else if (flag.starts_with("--")) {
      Usage();
    }
  }
  if (g_target == nullptr) Usage();
  if (seeds.empty()) return;
  WriteSeeds(seeds);
  std::exit(0);
}

}  // namespace
}  // namespace gradwire::fuzz

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  gradwire::fuzz::ParseFlags(*argc, *argv);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  gradwire::fuzz::g_target->run({data, size});
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  if (!gradwire::fuzz::g_target->chunks) return LLVMFuzzerMutate(data, size, max_size);
  return gradwire::fuzz::MutateChunks(data, size, max_size, seed, &LLVMFuzzerMutate);
}
