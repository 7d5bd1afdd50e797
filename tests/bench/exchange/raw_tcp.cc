// See raw_tcp.h. A request is one byte (P, L, C, E) and eight bytes of length.
#include "tests/bench/exchange/raw_tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "common/base/crc32c.h"
#include "tests/bench/exchange/peer_process.h"

namespace gradwire::bench {
namespace {

struct [[gnu::packed]] Request {
  char op;
  uint64_t bytes;
};

bool ReadAll(int fd, uint8_t* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = recv(fd, data, bytes, 0);
    if (n <= 0) return false;
    data += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool WriteAll(int fd, const void* data, size_t bytes) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = send(fd, p, bytes, MSG_NOSIGNAL);
    if (n <= 0) return false;
    p += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

// What checksums are for: the compiler cannot know that nobody looks.
volatile uint32_t checksums = 0;

bool Drain(int fd, uint64_t bytes, std::vector<uint8_t>& scratch) {
  while (bytes > 0) {
    const ssize_t n = recv(fd, scratch.data(), std::min<uint64_t>(bytes, scratch.size()), 0);
    if (n <= 0) return false;
    bytes -= static_cast<uint64_t>(n);
  }
  return true;
}

bool DrainChecked(int fd, uint64_t bytes, std::vector<uint8_t>& scratch) {
  while (bytes > 0) {
    const size_t step = std::min<uint64_t>(bytes, kRawCheckedBytes);
    if (!ReadAll(fd, scratch.data(), step)) return false;
    checksums = Crc32c({scratch.data(), step});
    bytes -= step;
  }
  return true;
}

bool Fill(int fd, uint64_t bytes, const std::vector<uint8_t>& buffer, bool checked = false) {
  for (uint64_t sent = 0; sent < bytes;) {
    const size_t offset = sent % buffer.size();
    const size_t most = checked ? kRawCheckedBytes : kRawChunkBytes;
    const size_t step = std::min<uint64_t>({bytes - sent, buffer.size() - offset, most});
    if (checked) checksums = Crc32c({buffer.data() + offset, step});
    if (!WriteAll(fd, buffer.data() + offset, step)) return false;
    sent += step;
  }
  return true;
}

void NoDelay(int fd) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

void ServeConnection(int fd) {
  NoDelay(fd);
  std::vector<uint8_t> scratch(kRawChunkBytes);
  const std::vector<uint8_t> source(64 << 20, 7);
  Request request{};
  while (ReadAll(fd, reinterpret_cast<uint8_t*>(&request), sizeof(request))) {
    if (request.op == 'P' && !(Drain(fd, request.bytes, scratch) && WriteAll(fd, "k", 1))) break;
    if (request.op == 'L' && !Fill(fd, request.bytes, source)) break;
    if (request.op == 'C' && !Fill(fd, request.bytes, source, true)) break;
    if (request.op == 'E' &&
        !(ReadAll(fd, scratch.data(), request.bytes) && WriteAll(fd, scratch.data(), request.bytes)))
      break;
  }
  close(fd);
}

void Require(bool ok, const char* what) {
  if (ok) return;
  std::perror(what);
  std::exit(1);
}

}  // namespace

std::string CongestionControl() {
  std::string name = "unknown";
  std::ifstream("/proc/sys/net/ipv4/tcp_congestion_control") >> name;
  return name;
}

void RunRawTcpPeer() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(name);
  Require(bind(listener, reinterpret_cast<sockaddr*>(&name), size) == 0 && listen(listener, 4) == 0 &&
              getsockname(listener, reinterpret_cast<sockaddr*>(&name), &size) == 0,
          "listen");
  std::thread server([listener] {
    for (int fd; (fd = accept(listener, nullptr, nullptr)) >= 0;) ServeConnection(fd);
  });
  ServePeer(std::to_string(ntohs(name.sin_port)));
  shutdown(listener, SHUT_RDWR);
  server.join();
  close(listener);
}

RawTcpClient::RawTcpClient(const std::string& port) : scratch_(kRawChunkBytes) {
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  name.sin_port = htons(static_cast<uint16_t>(std::stoi(port)));
  fd_ = socket(AF_INET, SOCK_STREAM, 0);
  Require(connect(fd_, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0, "connect");
  NoDelay(fd_);
}

RawTcpClient::~RawTcpClient() { close(fd_); }

void RawTcpClient::Push(size_t bytes, const std::vector<uint8_t>& buffer) {
  const Request request{'P', bytes};
  Require(WriteAll(fd_, &request, sizeof(request)) && Fill(fd_, bytes, buffer) && ReadAll(fd_, scratch_.data(), 1),
          "push");
}

void RawTcpClient::Pull(size_t bytes) {
  const Request request{'L', bytes};
  Require(WriteAll(fd_, &request, sizeof(request)) && Drain(fd_, bytes, scratch_), "pull");
}

void RawTcpClient::PullChecked(size_t bytes) {
  const Request request{'C', bytes};
  Require(WriteAll(fd_, &request, sizeof(request)) && DrainChecked(fd_, bytes, scratch_), "pull");
}

void RawTcpClient::Echo(size_t bytes) {
  uint8_t packet[sizeof(Request) + 65536];
  Require(bytes <= 65536, "echo size");
  const Request request{'E', bytes};
  std::memcpy(packet, &request, sizeof(request));
  std::memcpy(packet + sizeof(request), scratch_.data(), bytes);
  Require(WriteAll(fd_, packet, sizeof(request) + bytes) && ReadAll(fd_, scratch_.data(), bytes), "echo");
}

}  // namespace gradwire::bench
