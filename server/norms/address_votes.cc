// See address_votes.h.
#include "server/norms/address_votes.h"

#include <algorithm>
#include <cstdint>
#include <span>

#include "common/base/sha256.h"

namespace gradwire {
namespace {

std::string DigestOf(const std::vector<std::string>& addresses) {
  Sha256 sha;
  for (const std::string& address : addresses) {
    const std::string framed = std::to_string(address.size()) + ":" + address;
    sha.Update(std::span(reinterpret_cast<const uint8_t*>(framed.data()), framed.size()));
  }
  return sha.Hex();
}

}  // namespace

void AddressVotes::Vote(MemberId member, const std::vector<std::string>& addresses) {
  const Digest digest = DigestOf(addresses);
  votes_[member] = digest;
  lists_.emplace(digest, addresses);
  Decide();
}

void AddressVotes::Forget(MemberId member) {
  votes_.erase(member);
  Decide();
}

size_t AddressVotes::Count(const Digest& digest) const {
  return static_cast<size_t>(
      std::count_if(votes_.begin(), votes_.end(), [&](const auto& vote) { return vote.second == digest; }));
}

void AddressVotes::Decide() {
  size_t most = current_digest_.empty() ? 0 : Count(current_digest_);
  for (const auto& [digest, addresses] : lists_) {
    const size_t count = Count(digest);
    if (count <= most) continue;
    most = count;
    current_digest_ = digest;
    current_ = addresses;
  }
  std::erase_if(lists_, [this](const auto& list) { return Count(list.first) == 0; });
  while (lists_.size() > kLists) {
    lists_.erase(std::min_element(lists_.begin(), lists_.end(),
                                  [this](const auto& a, const auto& b) { return Count(a.first) < Count(b.first); }));
  }
}

}  // namespace gradwire
