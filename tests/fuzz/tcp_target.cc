// What a tcp:// connection receives: preface and packets, in any pieces.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "common/transport/asio/message_reader.h"
#include "common/transport/asio/tcp_format.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

using transport::tcp::MessageReader;
using transport::tcp::Packet;

constexpr size_t kMaxMessageBytes = 20000;

// Everything that was understood, one packet after the other, and how it ended.
struct Received {
  std::vector<uint8_t> packets;
  absl::Status end;
  bool operator==(const Received&) const = default;
};

void Append(const Packet& packet, std::vector<uint8_t>* out) {
  Require(packet.control.size() == packet.header.control_bytes, "the control part is as long as its header says");
  Require(TotalSize(packet.body) == packet.header.body_bytes, "the body is as long as its header says");
  Require(packet.control.size() + TotalSize(packet.body) <= kMaxMessageBytes, "the limit holds");
  const auto header = transport::tcp::StoreHeader(packet.header);
  out->insert(out->end(), header.begin(), header.end());
  out->insert(out->end(), packet.control.begin(), packet.control.end());
  for (const Bytes& slice : packet.body) out->insert(out->end(), slice.data(), slice.data() + slice.size());
}

// At most `step` bytes at a time.
Received Receive(Input bytes, size_t step) {
  MessageReader reader(std::make_shared<transport::tcp::BufferPool>(), kMaxMessageBytes);
  Received received;
  while (!bytes.empty()) {
    size_t n = 0;
    for (const std::span<uint8_t> space : reader.Space()) {
      const size_t part = std::min({space.size(), step - n, bytes.size()});
      std::copy_n(bytes.begin(), part, space.begin());
      bytes = bytes.subspan(part);
      n += part;
      if (part < space.size()) break;
    }
    Require(n != 0, "there is room for more");
    reader.Filled(n);
    for (bool more = true; more;) {
      const absl::StatusOr<std::optional<Packet>> packet = reader.Next();
      if (!packet.ok()) {
        received.end = packet.status();
        return received;
      }
      more = packet->has_value();
      if (more) Append(**packet, &received.packets);
    }
  }
  return received;
}

}  // namespace

// u16 bytes at a time, u8 headers whose CRC is made right, then the connection's bytes.
void RunTcp(Input input) {
  Reader reader(input);
  const size_t step = 1 + reader.Take<uint16_t>();
  const int repaired = reader.Take<uint8_t>();
  std::vector<uint8_t> bytes(reader.rest().begin(), reader.rest().end());
  size_t at = transport::tcp::kPrefaceBytes;
  for (int i = 0; i < repaired && at + transport::tcp::kHeaderBytes <= bytes.size(); ++i) {
    transport::tcp::Header header;
    header.type = static_cast<transport::tcp::PacketType>(bytes[at]);
    header.code = static_cast<absl::StatusCode>(bytes[at + 1]);
    header.control_bytes = bytes[at + 4] | static_cast<uint32_t>(bytes[at + 5]) << 8;
    header.body_bytes = bytes[at + 8] | static_cast<uint32_t>(bytes[at + 9]) << 8;
    std::ranges::copy(transport::tcp::StoreHeader(header), bytes.begin() + static_cast<ptrdiff_t>(at));
    at += transport::tcp::kHeaderBytes + header.control_bytes + header.body_bytes;
  }
  const Received whole = Receive(bytes, bytes.size() + 1);
  const Received pieces = Receive(bytes, step);
  Require(whole.packets == pieces.packets, "pieces do not change the packets");
  Require(whole.end.code() == pieces.end.code(), "pieces do not change the verdict");
  Require(whole.packets.empty() ||
              std::ranges::equal(whole.packets,
                                 Input(bytes).subspan(transport::tcp::kPrefaceBytes).first(whole.packets.size())),
          "store(load(x)) == x");
}

Seeds TcpSeeds() {
  Seeds seeds;
  for (size_t body_bytes : {0, 1, 100, 4064, 5000, 20001}) {
    const auto preface = transport::tcp::StorePreface();
    std::vector<uint8_t> seed = {static_cast<uint8_t>(body_bytes % 251), 0, 9};
    seed.insert(seed.end(), preface.begin(), preface.end());
    for (uint8_t type = 1; type <= 8; ++type) {
      const bool has_body = type == 1 || type == 2 || type == 4;
      const bool has_control = type != 5 && type != 7;
      const transport::tcp::Header header{static_cast<transport::tcp::PacketType>(type), absl::StatusCode::kOk,
                                          has_control ? 5u : 0u, has_body ? static_cast<uint32_t>(body_bytes) : 0u};
      const auto stored = transport::tcp::StoreHeader(header);
      seed.insert(seed.end(), stored.begin(), stored.end());
      seed.insert(seed.end(), header.control_bytes + header.body_bytes, type);
    }
    seeds.push_back(std::move(seed));
  }
  return seeds;
}

}  // namespace gradwire::fuzz
