// The lineage of a server: its own, or that of the primary whose jobs it has copied. Epochs are compared within one
// lineage only. Contract: proto/REPLICATION.md, "Lineages".
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace gradwire {

// A value. Its key is a secret of the servers of the lineage: who knows it may take over from them. Its id is not.
class Lineage {
 public:
  static constexpr size_t kKeyBytes = 16;

  Lineage() = default;  // none
  static Lineage Random();
  // InvalidArgument unless `key` has kKeyBytes.
  static absl::StatusOr<Lineage> OfKey(std::string_view key);
  // The other way round of Hex. InvalidArgument for anything else.
  static absl::StatusOr<Lineage> Parse(std::string_view hex);

  bool none() const { return key_.empty(); }
  const std::string& key() const { return key_; }
  std::string Hex() const;
  // 64 bits of the key's SHA-256, never 0; 0 for none.
  uint64_t id() const;
  // In a time that does not tell where they differ. False where either is none.
  bool SameAs(const Lineage& other) const;

 private:
  std::string key_;
};

}  // namespace gradwire
