// Turns the bytes of a connection into packets. Large bodies are received where they stay; nothing is copied but what
// comes along with a header. Does no I/O: the owner asks where bytes go, puts them there, and says how many came.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/bytes.h"
#include "common/transport/asio/buffer_pool.h"
#include "common/transport/asio/tcp_format.h"

namespace gradwire::transport::tcp {

struct Packet {
  Header header;
  std::string control;
  std::vector<Bytes> body;  // in slices of at most kSliceBytes, each aligned to BufferPool::kAlignment
};

// Not thread-safe, but for held_bytes and turn. Memory: a head of kHeadBytes, and what came of the packet under way
// plus at most one slice: a peer that announces more than it sends takes no more than that.
class MessageReader {
 public:
  static constexpr size_t kHeadBytes = 4096;
  static constexpr size_t kSliceBytes = 1u << 20;

  MessageReader(std::shared_ptr<BufferPool> pool, size_t max_message_bytes);
  ~MessageReader() { Release(); }
  MessageReader(const MessageReader&) = delete;
  MessageReader& operator=(const MessageReader&) = delete;

  // Where the next bytes go: two pieces, the second of which may be empty. Valid until Filled.
  std::array<std::span<uint8_t>, 2> Space();
  // The first `n` bytes of the space were filled.
  void Filled(size_t n);
  // The next packet that is complete. Errors: those of CheckPreface and LoadHeader; DataLoss for parts that fail
  // their check; ResourceExhausted: after any of them, nothing more can be read.
  absl::StatusOr<std::optional<Packet>> Next();

  // From now on what comes is dropped.
  void Discard();

  // Memory that the packet under way takes, and which packet of its pool's readers that was, counted as they began; 0
  // where it takes none. From any thread.
  size_t held_bytes() const { return held_bytes_.load(std::memory_order_relaxed); }
  uint64_t turn() const { return turn_.load(std::memory_order_relaxed); }

  bool has_preface() const { return has_preface_; }  // it came, and both speak a version
  // What has come and was not understood.
  std::span<const uint8_t> head() const { return std::span(head_).subspan(begin_, end_ - begin_); }

 private:
  absl::Status ReadPreface();
  absl::Status BeginPacket();
  void BeginSlice();
  Packet TakeSmall();
  // The packet is whole.
  static absl::StatusOr<std::optional<Packet>> Checked(Packet packet);
  void Hold(size_t bytes);
  void Release();
  void Compact();

  const std::shared_ptr<BufferPool> pool_;
  const size_t max_message_bytes_;
  bool has_preface_ = false;
  bool discarding_ = false;
  // What came is in [begin_, end_): headers and small packets, whole or in part.
  alignas(BufferPool::kAlignment) std::array<uint8_t, kHeadBytes> head_;
  size_t begin_ = 0;
  size_t end_ = 0;

  std::optional<Packet> packet_;  // under way; its header has been taken from the head
  bool in_slices_ = false;        // it is received into slices, not into the head
  std::shared_ptr<uint8_t> slice_;
  uint8_t* fill_ = nullptr;      // of slice_: where the next byte goes
  size_t slice_left_ = 0;        // bytes that slice_ still waits for
  size_t body_left_ = 0;         // bytes of the body in later slices
  size_t control_in_slice_ = 0;  // bytes of control at the front of slice_
  size_t body_in_slice_ = 0;
  std::atomic<size_t> held_bytes_ = 0;
  std::atomic<uint64_t> turn_ = 0;
};

}  // namespace gradwire::transport::tcp
