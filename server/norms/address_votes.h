// Where the shards of a job are, by what its members say. Any worker may join a job, also one that has it wrong or
// means ill, so one of them alone does not decide for the others.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "server/rounds/membership.h"

namespace gradwire {

// What most members say holds; where several lists have as many, the one that holds already does. Lists are kept of the
// kLists that most members say; of the others it is known which members say the same. Not thread-safe.
class AddressVotes {
 public:
  static constexpr size_t kLists = 8;

  void Vote(MemberId member, const std::vector<std::string>& addresses);
  void Forget(MemberId member);
  // By shard; empty: nobody has said anything yet. Stays what it is when nobody is left.
  const std::vector<std::string>& current() const { return current_; }

 private:
  using Digest = std::string;

  size_t Count(const Digest& digest) const;
  void Decide();

  std::map<MemberId, Digest> votes_;
  std::map<Digest, std::vector<std::string>> lists_;
  Digest current_digest_;
  std::vector<std::string> current_;
};

}  // namespace gradwire
