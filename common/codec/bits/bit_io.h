// Little-endian bit streams: bit i of the stream is bit i % 8 of byte i / 8.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace gradwire {

// Appends bits to memory that the caller has sized: ceil(bits / 8) bytes. Call Flush once at the end.
class BitWriter {
 public:
  static constexpr uint64_t kMaxBits = 56;  // of PutLong
  static constexpr size_t kSlackBytes = 8;  // behind the memory, which PutLong may write

  explicit BitWriter(uint8_t* out) : out_(out) {}

  // The `bits` (0 to 32) low bits of `value`; the others must be 0.
  void Put(uint32_t value, int bits) {
    buffer_ |= static_cast<uint64_t>(value) << used_;
    used_ += bits;
    if (used_ < 32) return;
    const uint32_t word = static_cast<uint32_t>(buffer_);
    std::memcpy(out_, &word, 4);
    out_ += 4;
    buffer_ >>= 32;
    used_ -= 32;
  }
  // The `bits` (0 to kMaxBits) low bits of `value`; the others must be 0.
  void PutLong(uint64_t value, int bits) {
    if (used_ >= 8) Drain();
    buffer_ |= value << used_;
    used_ += bits;
    Drain();
  }
  void Zeros(uint64_t n) {
    for (; n > 32; n -= 32) Put(0, 32);
    Put(0, static_cast<int>(n));
  }
  void Flush() {
    for (; used_ > 0; used_ -= 8, buffer_ >>= 8) *out_++ = static_cast<uint8_t>(buffer_);
    used_ = 0;
  }

 private:
  // Writes all whole bytes. Precondition: used_ < 64.
  void Drain() {
    std::memcpy(out_, &buffer_, 8);
    out_ += used_ >> 3;
    buffer_ >>= used_ & ~7;
    used_ &= 7;
  }

  uint8_t* out_;
  uint64_t buffer_ = 0;
  int used_ = 0;
};

// Reads bits and never reads past the end: bits behind it are 0, and overrun() says that some were asked for.
class BitReader {
 public:
  explicit BitReader(std::span<const uint8_t> in, uint64_t position = 0)
      : in_(in), end_(uint64_t{in.size()} * 8), position_(position) {}

  // The next `bits` (0 to 32) bits.
  uint32_t Take(int bits) {
    const uint64_t window = Window();
    position_ += static_cast<uint64_t>(bits);
    return static_cast<uint32_t>(window & ((uint64_t{1} << bits) - 1));
  }
  // Skips zeros up to and including the next one bit and returns how many zeros there were; ends at the end of input.
  uint64_t TakeUnary() {
    uint64_t zeros = 0;
    while (position_ < end_) {
      const uint64_t window = Window();
      if (window != 0) {
        const int run = std::countr_zero(window);
        position_ += static_cast<uint64_t>(run) + 1;
        return zeros + static_cast<uint64_t>(run);
      }
      zeros += kWindowBits;
      position_ += kWindowBits;
    }
    position_ = end_ + 1;  // there was no one bit
    return zeros;
  }
  uint64_t position() const { return position_; }
  bool overrun() const { return position_ > end_; }
  // True if fewer than 8 bits are left and all of them are 0.
  bool AtPaddedEnd() const { return position_ <= end_ && end_ - position_ < 8 && Window() == 0; }

 private:
  static constexpr int kWindowBits = 57;  // whole bits at any offset within a byte

  uint64_t Window() const {
    const uint64_t byte = position_ >> 3;
    uint64_t word = 0;
    if (byte + 8 <= in_.size()) {
      std::memcpy(&word, in_.data() + byte, 8);
    } else if (byte < in_.size()) {
      std::memcpy(&word, in_.data() + byte, in_.size() - byte);
    }
    return (word >> (position_ & 7)) & ((uint64_t{1} << kWindowBits) - 1);
  }

  std::span<const uint8_t> in_;
  uint64_t end_;
  uint64_t position_;
};

}  // namespace gradwire
