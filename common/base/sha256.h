// SHA-256 over a sequence of spans: the digest of parameters that replicas and shards compare.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace gradwire {

// Not thread-safe. Usage: Update any number of times, then Hex once.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void Update(std::span<const uint8_t> data);
  void Update(std::span<const float> values) {
    Update({reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()});
  }
  std::string Hex();  // 64 lower-case hexadecimal digits

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradwire
