// See lineage.h.
#include "common/storage/lineage.h"

#include <algorithm>
#include <cctype>
#include <random>
#include <span>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "common/base/little_endian.h"
#include "common/base/sha256.h"

namespace gradwire {

Lineage Lineage::Random() {
  std::random_device device;  // the system's own generator
  Lineage made;
  for (size_t i = 0; i < kKeyBytes; ++i) made.key_ += static_cast<char>(device());
  return made;
}

absl::StatusOr<Lineage> Lineage::OfKey(std::string_view key) {
  if (key.size() != kKeyBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the key of a lineage has %d bytes, not %d", key.size(), kKeyBytes));
  }
  Lineage made;
  made.key_ = key;
  return made;
}

absl::StatusOr<Lineage> Lineage::Parse(std::string_view hex) {
  const bool digits = std::all_of(hex.begin(), hex.end(), [](unsigned char c) { return std::isxdigit(c) != 0; });
  if (hex.size() != 2 * kKeyBytes || !digits) {
    return absl::InvalidArgumentError(absl::StrFormat("not %d hexadecimal digits", 2 * kKeyBytes));
  }
  return OfKey(absl::HexStringToBytes(std::string(hex)));
}

std::string Lineage::Hex() const { return absl::BytesToHexString(key_); }

uint64_t Lineage::id() const {
  if (none()) return 0;
  Sha256 digest;
  digest.Update(std::span(reinterpret_cast<const uint8_t*>(key_.data()), key_.size()));
  const std::string bytes = absl::HexStringToBytes(digest.Hex().substr(0, 2 * sizeof(uint64_t)));
  const uint64_t id = Load<uint64_t>(reinterpret_cast<const uint8_t*>(bytes.data()));
  return id != 0 ? id : 1;
}

bool Lineage::SameAs(const Lineage& other) const {
  if (none() || key_.size() != other.key_.size()) return false;
  unsigned char differs = 0;
  for (size_t i = 0; i < key_.size(); ++i) differs |= static_cast<unsigned char>(key_[i] ^ other.key_[i]);
  return differs == 0;
}

}  // namespace gradwire
