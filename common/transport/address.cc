// Parsing of transport addresses; see address.h.
#include "common/transport/address.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace gradwire::transport {
namespace {

constexpr size_t kMaxUnixPath = 107;  // sun_path without its terminator
constexpr size_t kMaxName = 255;

absl::Status Bad(std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("address \"", std::string(text), "\": ", std::string(why),
                   "; use grpc://host:port, tcp://host:port, unix:///path/of/socket or inproc://name"));
}

// Brackets and what separates the parts of an address would change how its text is read back.
bool IsOfHost(char c) { return absl::ascii_isgraph(static_cast<unsigned char>(c)) && !absl::StrContains("/?#@[]", c); }

// Splits host:port and [v6]:port.
absl::StatusOr<Address> ParseHostPort(Scheme scheme, std::string_view text, std::string_view rest) {
  Address address;
  address.scheme = scheme;
  std::string_view port;
  if (!rest.empty() && rest.front() == '[') {
    const size_t close = rest.find(']');
    if (close == std::string_view::npos || close + 1 >= rest.size() || rest[close + 1] != ':')
      return Bad(text, "an IPv6 address is written [address]:port");
    address.host = std::string(rest.substr(1, close - 1));
    port = rest.substr(close + 2);
  } else {
    const size_t colon = rest.rfind(':');
    if (colon == std::string_view::npos) return Bad(text, "the port is missing");
    address.host = std::string(rest.substr(0, colon));
    if (address.host.find(':') != std::string::npos) return Bad(text, "an IPv6 address is written [address]:port");
    port = rest.substr(colon + 1);
  }
  if (address.host.empty()) return Bad(text, "the host is missing");
  if (!std::all_of(address.host.begin(), address.host.end(), IsOfHost)) {
    return Bad(text, "the host has a character of no host");
  }
  uint32_t number = 0;
  if (port.empty() || port.find_first_not_of("0123456789") != std::string_view::npos ||
      !absl::SimpleAtoi(std::string(port), &number) || number > 65535)
    return Bad(text, "the port must be a number from 0 to 65535");
  address.port = static_cast<uint16_t>(number);
  return address;
}

}  // namespace

std::string Address::ToString() const {
  switch (scheme) {
    case Scheme::kInproc:
      return absl::StrCat("inproc://", name);
    case Scheme::kUnix:
      return absl::StrCat("unix://", name);
    case Scheme::kGrpc:
    case Scheme::kTcp:
      break;
  }
  const bool v6 = host.find(':') != std::string::npos;
  return absl::StrCat(scheme == Scheme::kTcp ? "tcp://" : "grpc://", v6 ? "[" : "", host, v6 ? "]:" : ":", port);
}

absl::StatusOr<Address> ParseAddress(std::string_view text) {
  const size_t end = text.find("://");
  if (end == std::string_view::npos) return Bad(text, "there is no scheme");
  const std::string_view scheme = text.substr(0, end);
  const std::string_view rest = text.substr(end + 3);
  if (scheme == "grpc") return ParseHostPort(Scheme::kGrpc, text, rest);
  if (scheme == "tcp") return ParseHostPort(Scheme::kTcp, text, rest);
  Address address;
  address.name = std::string(rest);
  if (rest.find('\0') != std::string_view::npos) return Bad(text, "there is a zero byte in it");
  if (scheme == "inproc") {
    address.scheme = Scheme::kInproc;
    if (rest.empty() || rest.size() > kMaxName) return Bad(text, "the name must have 1 to 255 bytes");
    return address;
  }
  if (scheme == "unix") {
    address.scheme = Scheme::kUnix;
    if (rest.empty() || rest.front() != '/') return Bad(text, "the path must be absolute");
    if (rest.size() > kMaxUnixPath) return Bad(text, "the path of a socket has at most 107 bytes");
    return address;
  }
  return Bad(text, absl::StrCat("scheme \"", std::string(scheme), "\" is not known"));
}

}  // namespace gradwire::transport
