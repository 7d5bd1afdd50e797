// A fuzz target: a decoder of remote or file bytes, what must hold whatever the bytes are, and inputs to begin with.
// The same targets run under libFuzzer (fuzz_main.cc, `tests/run fuzz`) and over the kept inputs in the unit tests
// (corpus_test.cc).
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

namespace gradwire::fuzz {

using Input = std::span<const uint8_t>;

struct Target {
  const char* name;
  // Aborts the process where a property does not hold. Deterministic.
  void (*run)(Input input);
  // Valid inputs, made by this build's encoders.
  std::vector<std::vector<uint8_t>> (*seeds)();
  // Inputs are chunks (chunk_input.h), which a mutator must keep whole to get behind their checksums.
  bool chunks = false;
};

// All of them, in the order of the README.
std::span<const Target> Targets();
// Null where there is none of this name.
const Target* FindTarget(std::string_view name);

// A property of the code under test.
inline void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "property violated: %s\n", what);
  std::abort();
}

// Takes values off the front of an input; zeros behind its end.
class Reader {
 public:
  explicit Reader(Input input) : rest_(input) {}
  template <typename T>
  T Take() {
    T value = 0;
    for (size_t i = 0; i < sizeof(T) && !rest_.empty(); ++i, rest_ = rest_.subspan(1)) {
      value = static_cast<T>(value | static_cast<T>(static_cast<T>(rest_[0]) << (8 * i)));
    }
    return value;
  }
  Input rest() const { return rest_; }

 private:
  Input rest_;
};

}  // namespace gradwire::fuzz
