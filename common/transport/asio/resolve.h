// Host names to TCP endpoints.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <vector>

#include "absl/status/statusor.h"
#include "common/transport/address.h"

namespace gradwire::transport::tcp {

// At least one. Asks the system's resolver, unless the host is a number. Unavailable, with the system's reason.
absl::StatusOr<std::vector<boost::asio::ip::tcp::endpoint>> Resolve(const Address& address, bool passive);

}  // namespace gradwire::transport::tcp
