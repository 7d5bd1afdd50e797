// See resolve.h.
#include "common/transport/asio/resolve.h"

#include <boost/asio/io_context.hpp>

#include "absl/strings/str_cat.h"

namespace gradwire::transport::tcp {

namespace asio = boost::asio;
using asio::ip::tcp;

absl::StatusOr<std::vector<tcp::endpoint>> Resolve(const Address& address, bool passive) {
  boost::system::error_code error;
  const auto number = asio::ip::make_address(address.host, error);
  if (!error) return std::vector<tcp::endpoint>{tcp::endpoint(number, address.port)};
  asio::io_context context;
  tcp::resolver resolver(context);
  const auto flags = passive ? tcp::resolver::passive : tcp::resolver::flags();
  const auto found = resolver.resolve(address.host, std::to_string(address.port), flags, error);
  std::vector<tcp::endpoint> endpoints;
  if (!error)
    for (const auto& entry : found) endpoints.push_back(entry.endpoint());
  if (!endpoints.empty()) return endpoints;
  return absl::UnavailableError(absl::StrCat("cannot look up the host of ", address.ToString(), ": ", error.message()));
}

}  // namespace gradwire::transport::tcp
