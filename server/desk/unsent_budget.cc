// See unsent_budget.h.
#include "server/desk/unsent_budget.h"

#include <utility>

#include "absl/strings/str_format.h"

namespace gradwire {

// Owns a chunk on its way.
struct UnsentBudget::Counted {
  Counted(std::shared_ptr<UnsentBudget> budget, const Bytes& chunk) : budget(std::move(budget)), chunk(chunk) {
    this->budget->bytes_ += chunk.size();
  }
  ~Counted() { budget->bytes_ -= chunk.size(); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

  const std::shared_ptr<UnsentBudget> budget;
  const Bytes chunk;
};

absl::Status UnsentBudget::CheckRoom(uint64_t bytes) const {
  const uint64_t unsent = bytes_;
  if (unsent + bytes <= limit_bytes_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%d bytes of answers wait to be sent to this worker, and %d more would pass its limit of %d: read what was "
      "asked for before asking for more",
      unsent, bytes, limit_bytes_));
}

Bytes UnsentBudget::Count(const std::shared_ptr<UnsentBudget>& budget, const Bytes& chunk) {
  const auto owner = std::make_shared<const Counted>(budget, chunk);
  return {owner, chunk.data(), chunk.size()};
}

}  // namespace gradwire
