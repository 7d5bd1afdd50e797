// See message_reader.h.
#include "common/transport/asio/message_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire::transport::tcp {
namespace {

constexpr size_t kAlignment = BufferPool::kAlignment;

}  // namespace

MessageReader::MessageReader(std::shared_ptr<BufferPool> pool, size_t max_message_bytes)
    : pool_(std::move(pool)), max_message_bytes_(max_message_bytes) {}

std::array<std::span<uint8_t>, 2> MessageReader::Space() {
  const std::span<uint8_t> head = std::span(head_).subspan(end_);
  if (!in_slices_) return {head, std::span<uint8_t>()};
  // Behind the last byte of a packet the next header may follow.
  return {std::span(fill_, slice_left_), body_left_ == 0 ? head : std::span<uint8_t>()};
}

void MessageReader::Filled(size_t n) {
  if (discarding_) return;
  if (in_slices_) {
    const size_t of_slice = std::min(n, slice_left_);
    fill_ += of_slice;
    slice_left_ -= of_slice;
    n -= of_slice;
  }
  end_ += n;
}

void MessageReader::Discard() {
  discarding_ = true;
  in_slices_ = false;
  packet_.reset();
  slice_.reset();
  begin_ = end_ = 0;
  Release();
}

void MessageReader::Hold(size_t bytes) {
  if (turn_.load(std::memory_order_relaxed) == 0) turn_.store(pool_->NextTurn(), std::memory_order_relaxed);
  held_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  pool_->AddHeld(bytes);
}

void MessageReader::Release() {
  const size_t held = held_bytes_.exchange(0, std::memory_order_relaxed);
  turn_.store(0, std::memory_order_relaxed);
  if (held != 0) pool_->SubtractHeld(held);
}

absl::StatusOr<std::optional<Packet>> MessageReader::Checked(Packet packet) {
  const uint32_t check = PartsCheck(packet.header.type, packet.control, packet.body);
  if (check == packet.header.check) return packet;
  return absl::DataLossError(absl::StrFormat("a packet of type %d fails its CRC-32C (computed 0x%08x, stored 0x%08x)",
                                             static_cast<int>(packet.header.type), check, packet.header.check));
}

absl::StatusOr<std::optional<Packet>> MessageReader::Next() {
  if (discarding_) return std::nullopt;
  if (!has_preface_) {
    GW_RETURN_IF_ERROR(ReadPreface());
    if (!has_preface_) return std::nullopt;
  }
  if (!packet_) {
    if (end_ - begin_ < kHeaderBytes) {
      Compact();
      return std::nullopt;
    }
    GW_RETURN_IF_ERROR(BeginPacket());
  }
  if (!in_slices_) {
    if (end_ - begin_ < packet_->header.control_bytes + packet_->header.body_bytes) {
      Compact();
      return std::nullopt;
    }
    return Checked(TakeSmall());
  }
  while (slice_left_ == 0) {
    const uint8_t* body = fill_ - body_in_slice_;
    if (control_in_slice_ != 0)
      packet_->control.assign(reinterpret_cast<const char*>(body - control_in_slice_), control_in_slice_);
    if (body_in_slice_ != 0) packet_->body.emplace_back(std::move(slice_), body, body_in_slice_);
    if (body_left_ == 0) {
      in_slices_ = false;
      Release();
      return Checked(*std::exchange(packet_, std::nullopt));
    }
    control_in_slice_ = 0;
    BeginSlice();
  }
  return std::nullopt;
}

absl::Status MessageReader::ReadPreface() {
  GW_RETURN_IF_ERROR(CheckPreface(head().first(std::min(end_ - begin_, kPrefaceBytes))));
  if (end_ - begin_ < kPrefaceBytes) return absl::OkStatus();
  begin_ += kPrefaceBytes;
  has_preface_ = true;
  return absl::OkStatus();
}

absl::Status MessageReader::BeginPacket() {
  GW_ASSIGN_OR_RETURN(const Header header, LoadHeader(head().first<kHeaderBytes>()));
  begin_ += kHeaderBytes;
  const size_t bytes = size_t{header.control_bytes} + header.body_bytes;
  if (bytes > max_message_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a message of ", bytes, " bytes is larger than the receiver's limit of ", max_message_bytes_));
  }
  packet_.emplace().header = header;
  in_slices_ = kHeaderBytes + bytes > kHeadBytes;
  if (in_slices_) {
    control_in_slice_ = header.control_bytes;
    body_left_ = header.body_bytes;
    BeginSlice();
  }
  return absl::OkStatus();
}

void MessageReader::BeginSlice() {
  // A body is held for as long as its receiver likes, and counted by its bytes: a large control part beside it would be
  // held with it.
  body_in_slice_ = control_in_slice_ > kHeadBytes ? 0 : std::min(body_left_, kSliceBytes);
  body_left_ -= body_in_slice_;
  const size_t pad = (kAlignment - control_in_slice_ % kAlignment) % kAlignment;
  slice_ = pool_->Take(pad + control_in_slice_ + body_in_slice_);
  Hold(pad + control_in_slice_ + body_in_slice_);
  fill_ = slice_.get() + pad;
  slice_left_ = control_in_slice_ + body_in_slice_;
  const size_t here = std::min(slice_left_, end_ - begin_);
  if (here != 0) std::memcpy(fill_, head_.data() + begin_, here);
  begin_ += here;
  fill_ += here;
  slice_left_ -= here;
  Compact();
}

Packet MessageReader::TakeSmall() {
  Packet packet = *std::exchange(packet_, std::nullopt);
  const uint8_t* p = head_.data() + begin_;
  packet.control.assign(reinterpret_cast<const char*>(p), packet.header.control_bytes);
  if (packet.header.body_bytes != 0)
    packet.body.push_back(Bytes::Copy({p + packet.header.control_bytes, packet.header.body_bytes}));
  begin_ += packet.header.control_bytes + packet.header.body_bytes;
  return packet;
}

void MessageReader::Compact() {
  if (begin_ == 0) return;
  if (end_ != begin_) std::memmove(head_.data(), head_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
}

}  // namespace gradwire::transport::tcp
