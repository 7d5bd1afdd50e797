// Immutable bytes with shared ownership: what frames are made of, on every transport and in the journal.
// A slice of a Bytes shares its owner, so a chunk that arrived from the network is kept, merged and forwarded
// without being copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace gradwire {

// Value type. Copying shares the memory. Thread-safe as long as nobody writes through the owner.
class Bytes {
 public:
  Bytes() = default;
  Bytes(std::shared_ptr<const void> owner, const uint8_t* data, size_t size)
      : owner_(std::move(owner)), data_(data), size_(size) {}

  static Bytes FromVector(std::vector<uint8_t> v) {
    auto owner = std::make_shared<const std::vector<uint8_t>>(std::move(v));
    return Bytes(owner, owner->data(), owner->size());
  }
  static Bytes FromString(std::string s) {
    auto owner = std::make_shared<const std::string>(std::move(s));
    return Bytes(owner, reinterpret_cast<const uint8_t*>(owner->data()), owner->size());
  }
  static Bytes Copy(std::span<const uint8_t> s) { return FromVector(std::vector<uint8_t>(s.begin(), s.end())); }
  // Borrows: the caller keeps `s` alive and unchanged until the last copy of the result is gone.
  static Bytes Borrow(std::span<const uint8_t> s) { return Bytes(nullptr, s.data(), s.size()); }

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::span<const uint8_t> span() const { return {data_, size_}; }
  Bytes Slice(size_t begin, size_t size) const { return Bytes(owner_, data_ + begin, size); }

 private:
  std::shared_ptr<const void> owner_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

inline size_t TotalSize(std::span<const Bytes> list) {
  size_t total = 0;
  for (const Bytes& b : list) total += b.size();
  return total;
}

}  // namespace gradwire
