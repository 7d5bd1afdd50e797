// See unsent_budget.h.
#include "server/desk/unsent_budget.h"

#include <utility>

#include "absl/strings/str_format.h"

namespace gradwire {

// Owns an answer on its way.
struct UnsentBudget::Counted {
  Counted(std::shared_ptr<UnsentBudget> budget, std::shared_ptr<const void> answer, uint64_t bytes)
      : budget(std::move(budget)), answer(std::move(answer)), bytes(bytes) {
    this->budget->bytes_ += bytes;
  }
  ~Counted() { budget->bytes_ -= bytes; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

  const std::shared_ptr<UnsentBudget> budget;
  const std::shared_ptr<const void> answer;
  const uint64_t bytes;
};

absl::Status UnsentBudget::CheckRoom(uint64_t bytes) const {
  const uint64_t unsent = bytes_;
  if (unsent + bytes <= limit_bytes_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%d bytes of answers wait to be sent to this worker, and %d more would pass its limit of %d: read what was "
      "asked for before asking for more",
      unsent, bytes, limit_bytes_));
}

std::shared_ptr<const void> UnsentBudget::Count(std::shared_ptr<UnsentBudget> budget,
                                                std::shared_ptr<const void> answer, uint64_t bytes) {
  return std::make_shared<const Counted>(std::move(budget), std::move(answer), bytes);
}

}  // namespace gradwire
