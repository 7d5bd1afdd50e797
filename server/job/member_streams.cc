// See member_streams.h.
#include "server/job/member_streams.h"

#include <utility>

namespace gradwire {

void MemberStreams::Attach(MemberId member, std::shared_ptr<Outbox> out) {
  std::shared_ptr<UnsentBudget>& unsent = unsent_[member];
  if (unsent == nullptr) unsent = std::make_shared<UnsentBudget>(unsent_limit_bytes_);
  out->CountInto(unsent);
  open_.emplace(member, std::move(out));
}

void MemberStreams::Detach(MemberId member, const std::shared_ptr<Outbox>& out) {
  const auto [begin, end] = open_.equal_range(member);
  for (auto it = begin; it != end; ++it) {
    if (it->second != out) continue;
    open_.erase(it);
    return;
  }
}

MemberStreams::Streams MemberStreams::Depart(MemberId member, Streams* unread) {
  const auto [begin, end] = open_.equal_range(member);
  Streams streams;
  for (auto it = begin; it != end; ++it) streams.push_back(it->second);
  open_.erase(begin, end);
  departed_.insert(departed_.end(), streams.begin(), streams.end());
  std::erase_if(departed_, [](const std::weak_ptr<Outbox>& stream) { return stream.expired(); });
  for (; departed_.size() > kMaxDeparted; departed_.pop_front()) {
    if (std::shared_ptr<Outbox> stream = departed_.front().lock()) unread->push_back(std::move(stream));
  }
  return streams;
}

MemberStreams::Streams MemberStreams::TakeAll() {
  Streams streams;
  for (auto& [member, stream] : open_) streams.push_back(std::move(stream));
  open_.clear();
  return streams;
}

}  // namespace gradwire
