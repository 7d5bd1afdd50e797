// See message_codec.h. The cursor walks protobuf fields across slices and never looks inside a field.
#include "common/transport/grpc/message_codec.h"

#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/crc32c.h"
#include "common/base/little_endian.h"
#include "common/base/status_macros.h"

namespace gradwire::transport {
namespace {

constexpr uint8_t kFrameTag = (15 << 3) | 2;
constexpr int kMaxVarintBytes = 10;
constexpr size_t kCopyBelow = 4096;  // cheaper to copy than to reference

size_t VarintSize(uint64_t v) {
  size_t n = 1;
  while (v >= 0x80) {
    v >>= 7;
    ++n;
  }
  return n;
}

uint8_t* PutVarint(uint8_t* out, uint64_t v) {
  while (v >= 0x80) {
    *out++ = static_cast<uint8_t>(v | 0x80);
    v >>= 7;
  }
  *out++ = static_cast<uint8_t>(v);
  return out;
}

// Reads a sequence of slices as one string of bytes.
class Cursor {
 public:
  Cursor(std::span<const ::grpc::Slice> slices, size_t total) : slices_(slices), left_(total) { SkipEmpty(); }

  size_t left() const { return left_; }
  size_t slice_index() const { return slice_; }
  size_t offset() const { return offset_; }

  bool ReadByte(uint8_t* out) {
    if (left_ == 0) return false;
    *out = slices_[slice_].begin()[offset_];
    Advance(1);
    return true;
  }

  bool ReadVarint(uint64_t* out) {
    uint64_t v = 0;
    for (int i = 0; i < kMaxVarintBytes; ++i) {
      uint8_t b = 0;
      if (!ReadByte(&b)) return false;
      v |= static_cast<uint64_t>(b & 0x7F) << (7 * i);
      if (b < 0x80) {
        *out = v;
        return true;
      }
    }
    return false;
  }

  bool Skip(uint64_t n) {
    if (n > left_) return false;
    while (n > 0) {
      const size_t here = slices_[slice_].size() - offset_;
      const size_t step = n < here ? static_cast<size_t>(n) : here;
      Advance(step);
      n -= step;
    }
    return true;
  }

 private:
  void Advance(size_t n) {
    offset_ += n;
    left_ -= n;
    if (offset_ == slices_[slice_].size()) {
      ++slice_;
      offset_ = 0;
      SkipEmpty();
    }
  }
  void SkipEmpty() {
    while (slice_ < slices_.size() && slices_[slice_].size() == 0) ++slice_;
  }

  const std::span<const ::grpc::Slice> slices_;
  size_t left_;
  size_t slice_ = 0;
  size_t offset_ = 0;
};

absl::Status Malformed(const char* what) {
  return absl::InvalidArgumentError(std::string("malformed stream message: ") + what +
                                    "; both ends must speak the same proto/gradwire/v1");
}

// Finds where the control bytes end; the cursor then stands at the first byte of the frame, if there is one.
absl::Status FindFrame(Cursor& cursor, size_t total, size_t* control_bytes) {
  while (cursor.left() > 0) {
    const size_t field_begin = total - cursor.left();
    uint64_t tag = 0;
    uint64_t length = 0;
    if (!cursor.ReadVarint(&tag) || (tag >> 3) == 0 || (tag >> 3) > 0x1FFFFFFF) return Malformed("bad field tag");
    bool ok = true;
    switch (tag & 7) {
      case 0:
        ok = cursor.ReadVarint(&length);
        break;
      case 1:
        ok = cursor.Skip(8);
        break;
      case 5:
        ok = cursor.Skip(4);
        break;
      case 2:
        if (!cursor.ReadVarint(&length)) return Malformed("bad field length");
        if (tag == kFrameTag) {
          if (length != cursor.left()) return Malformed("the frame (field 15) is not exactly the rest of the message");
          *control_bytes = field_begin;
          return absl::OkStatus();
        }
        ok = cursor.Skip(length);
        break;
      default:
        return Malformed("unknown wire type");
    }
    if (!ok) return Malformed("a field is longer than the message");
  }
  *control_bytes = total;
  return absl::OkStatus();
}

// Field 2046 with four bytes.
constexpr char kAliveTag[2] = {static_cast<char>(0xF5), 0x7F};

// Of field 2047 with four bytes.
constexpr char kCheckTag[2] = {static_cast<char>(0xFD), 0x7F};

uint32_t CheckOf(std::string_view text, uint64_t first, uint64_t second = 0) {
  uint8_t bytes[16];
  Store<uint64_t>(bytes, first);
  Store<uint64_t>(bytes + 8, second);
  return Crc32c(bytes, Crc32c({reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
}

void CopyPrefix(std::span<const ::grpc::Slice> slices, size_t bytes, std::string* out) {
  out->reserve(bytes);
  for (const ::grpc::Slice& slice : slices) {
    if (out->size() == bytes) return;
    const size_t step = std::min(bytes - out->size(), slice.size());
    out->append(reinterpret_cast<const char*>(slice.begin()), step);
  }
}

// What a buffer holds; small messages lie in one slice.
class SlicesOf {
 public:
  explicit SlicesOf(const ::grpc::ByteBuffer& buffer) {
    if (buffer.TrySingleSlice(&one_).ok()) {
      all_ = {&one_, 1};
    } else {
      (void)buffer.Dump(&many_);  // fails for a buffer that was never filled; it has no slices either
      all_ = many_;
    }
  }
  SlicesOf(const SlicesOf&) = delete;
  SlicesOf& operator=(const SlicesOf&) = delete;

  std::span<::grpc::Slice> all() { return all_; }

 private:
  ::grpc::Slice one_;
  std::vector<::grpc::Slice> many_;
  std::span<::grpc::Slice> all_;
};

uint8_t* PutCheck(uint8_t* out, uint32_t crc) {
  out = std::copy(std::begin(kCheckTag), std::end(kCheckTag), out);
  Store<uint32_t>(out, crc);
  return out + sizeof(crc);
}

}  // namespace

void AppendCheck(std::string* message) {
  const uint32_t crc = CheckOf(*message, 0);
  message->resize(message->size() + kCheckBytes);
  PutCheck(reinterpret_cast<uint8_t*>(message->data() + message->size() - kCheckBytes), crc);
}

bool EndsWithCheck(std::string_view control) {
  return control.size() >= kCheckBytes &&
         control.substr(control.size() - kCheckBytes).starts_with(std::string_view(kCheckTag, sizeof(kCheckTag)));
}

absl::Status TakeCheck(size_t frame_bytes, uint64_t number, std::string* control) {
  const auto damaged = [] { return absl::DataLossError("a message was damaged on its way: it fails its CRC-32C"); };
  if (!EndsWithCheck(*control)) return damaged();
  const size_t size = control->size() - kCheckBytes;
  const auto stored = Load<uint32_t>(reinterpret_cast<const uint8_t*>(control->data()) + size + sizeof(kCheckTag));
  control->resize(size);
  return stored == CheckOf(*control, frame_bytes, number) ? absl::OkStatus() : damaged();
}

::grpc::ByteBuffer AliveMessage(uint64_t sent) {
  char bytes[kCheckBytes] = {kAliveTag[0], kAliveTag[1]};
  Store<uint32_t>(reinterpret_cast<uint8_t*>(bytes) + sizeof(kAliveTag), static_cast<uint32_t>(sent));
  return FromString({bytes, sizeof(bytes)});
}

bool IsAlive(const ::grpc::ByteBuffer& buffer) {
  return buffer.Length() == kCheckBytes && ToString(buffer).starts_with(std::string_view(kAliveTag, sizeof(kAliveTag)));
}

absl::Status CheckAlive(const ::grpc::ByteBuffer& buffer, uint64_t received) {
  if (ToString(buffer) == ToString(AliveMessage(received))) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("a message was lost on its way: ", received, " have come, more were sent"));
}

std::string StatusCheck(int code, std::string_view message) {
  return absl::StrCat(absl::Hex(CheckOf(message, static_cast<size_t>(code)), absl::kZeroPad8));
}

::grpc::ByteBuffer EncodeMessage(Message message, std::optional<uint64_t> number) {
  const size_t frame_bytes = TotalSize(message.frame);
  const bool copy = frame_bytes < kCopyBelow;
  const size_t before_frame = frame_bytes == 0 ? 0 : 1 + VarintSize(frame_bytes);
  const size_t head = message.control.size() + (number ? kCheckBytes : 0) + before_frame + (copy ? frame_bytes : 0);
  grpc_slice raw = grpc_slice_malloc(head);
  uint8_t* out = GRPC_SLICE_START_PTR(raw);
  out = std::copy(message.control.begin(), message.control.end(), out);
  if (number) out = PutCheck(out, CheckOf(message.control, frame_bytes, *number));
  if (frame_bytes > 0) {
    *out++ = kFrameTag;
    out = PutVarint(out, frame_bytes);
  }
  if (copy) {
    for (const Bytes& bytes : message.frame) {
      if (bytes.empty()) continue;
      std::memcpy(out, bytes.data(), bytes.size());
      out += bytes.size();
    }
    ::grpc::Slice all(raw, ::grpc::Slice::STEAL_REF);  // only now: the bytes of a tiny slice lie inside `raw`
    return ::grpc::ByteBuffer(&all, 1);
  }
  std::vector<::grpc::Slice> slices;
  slices.reserve(1 + message.frame.size());
  slices.emplace_back(raw, ::grpc::Slice::STEAL_REF);
  for (Bytes& bytes : message.frame) {
    if (bytes.empty()) continue;
    void* data = const_cast<uint8_t*>(bytes.data());
    const size_t size = bytes.size();
    slices.emplace_back(
        data, size, [](void* owner) { delete static_cast<Bytes*>(owner); }, new Bytes(std::move(bytes)));
  }
  return ::grpc::ByteBuffer(slices.data(), slices.size());
}

absl::StatusOr<Message> DecodeMessage(const ::grpc::ByteBuffer& buffer, std::optional<uint64_t> number) {
  SlicesOf held(buffer);
  const std::span<::grpc::Slice> slices = held.all();
  size_t total = 0;
  for (const ::grpc::Slice& slice : slices) total += slice.size();
  Message message;
  Cursor cursor(slices, total);
  size_t control_bytes = 0;
  absl::Status found = FindFrame(cursor, total, &control_bytes);
  if (!found.ok() && number) return absl::DataLossError(found.message());
  if (!found.ok()) return found;
  CopyPrefix(slices, control_bytes, &message.control);
  if (number) {
    GW_RETURN_IF_ERROR(TakeCheck(cursor.left(), *number, &message.control));
  } else if (EndsWithCheck(message.control)) {
    return absl::DataLossError("a message has a check, but its call does not say so: it was damaged on its way");
  }
  if (cursor.left() == 0) return message;
  const size_t first = cursor.slice_index();
  message.frame.reserve(slices.size() - first);
  for (size_t i = first; i < slices.size(); ++i) {
    const size_t begin = i == first ? cursor.offset() : 0;
    if (slices[i].size() == begin) continue;
    auto owner = std::make_shared<const ::grpc::Slice>(std::move(slices[i]));
    message.frame.emplace_back(owner, owner->begin() + begin, owner->size() - begin);
  }
  return message;
}

std::string ToString(const ::grpc::ByteBuffer& buffer) {
  std::string out;
  CopyPrefix(SlicesOf(buffer).all(), buffer.Length(), &out);
  return out;
}

::grpc::ByteBuffer FromString(std::string_view bytes) {
  ::grpc::Slice slice(bytes.data(), bytes.size());
  return ::grpc::ByteBuffer(&slice, 1);
}

}  // namespace gradwire::transport
