// The epochs of this server since it began to serve. See proto/REPLICATION.md, "Epochs".
#pragma once

#include <atomic>
#include <cstdint>

namespace gradwire {

// Thread-safe; one thread changes it.
class ServedEpochs {
 public:
  // This server serves what it has recovered or copied, from now on.
  void Begin(uint64_t epoch) {
    first_ = epoch;
    last_ = epoch;
  }
  // It goes on with a larger one, and has lost nothing.
  void Raise(uint64_t epoch) { last_ = epoch; }

  uint64_t first() const { return first_; }
  uint64_t now() const { return last_; }
  // Whoever was told `epoch` has seen nothing of before Begin.
  bool Has(uint64_t epoch) const { return first_ <= epoch && epoch <= last_; }

 private:
  std::atomic<uint64_t> first_ = 0;
  std::atomic<uint64_t> last_ = 0;
};

}  // namespace gradwire
