// Addresses of transports: inproc://name, grpc://host:port, unix:///path, tcp://host:port.
// Dial and Listen parse them here, so every transport refuses the same mistakes with the same words.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace gradwire::transport {

enum class Scheme { kInproc, kGrpc, kUnix, kTcp };

struct Address {
  Scheme scheme = Scheme::kGrpc;
  std::string host;   // kGrpc, kTcp: host name, IPv4, or IPv6 without its brackets
  uint16_t port = 0;  // kGrpc, kTcp: 0 asks the listener to choose one
  std::string name;   // kInproc: the endpoint; kUnix: the absolute path of the socket

  // The canonical text, which ParseAddress accepts.
  std::string ToString() const;
};

// InvalidArgument, naming the text, what is wrong and the schemes there are.
absl::StatusOr<Address> ParseAddress(std::string_view text);

}  // namespace gradwire::transport
