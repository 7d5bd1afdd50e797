// The yardstick: one blocking TCP connection over loopback that moves the same bytes with nothing around them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire::bench {

constexpr size_t kRawChunkBytes = 1 << 20;      // per read and write
constexpr size_t kRawCheckedBytes = 256 << 10;  // the same, with checksums

// The congestion control that connections of this machine get.
std::string CongestionControl();

// In the peer process: listens on a port of its own and serves one connection after the other, on one thread.
void RunRawTcpPeer();

class RawTcpClient {
 public:
  explicit RawTcpClient(const std::string& port);
  ~RawTcpClient();
  RawTcpClient(const RawTcpClient&) = delete;
  RawTcpClient& operator=(const RawTcpClient&) = delete;

  // Sends `bytes` from `buffer`, again and again, and waits for one byte that says they were read.
  void Push(size_t bytes, const std::vector<uint8_t>& buffer);
  // Receives `bytes`.
  void Pull(size_t bytes);
  // The same, and both ends compute the CRC-32C of each kRawCheckedBytes: the sender right before they leave.
  void PullChecked(size_t bytes);
  // `bytes` there and back.
  void Echo(size_t bytes);

 private:
  int fd_ = -1;
  std::vector<uint8_t> scratch_;
};

}  // namespace gradwire::bench
