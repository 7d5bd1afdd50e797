// See unsent_budget.h.
#include "server/desk/unsent_budget.h"

#include <utility>

#include "absl/status/status.h"
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

absl::StatusOr<std::vector<Bytes>> UnsentBudget::Count(const std::shared_ptr<UnsentBudget>& budget,
                                                       std::span<const Bytes> chunks) {
  const uint64_t size = TotalSize(chunks);
  // Sound without a lock: the limit may be passed by one answer per thread.
  const uint64_t unsent = budget->bytes_;
  if (unsent + size > budget->limit_bytes_) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%d bytes of answers wait to be sent to this worker, and %d more would pass its limit of %d: read what was "
        "asked for before asking for more",
        unsent, size, budget->limit_bytes_));
  }
  std::vector<Bytes> counted;
  counted.reserve(chunks.size());
  for (const Bytes& chunk : chunks) {
    const auto owner = std::make_shared<const Counted>(budget, chunk);
    counted.emplace_back(owner, chunk.data(), chunk.size());
  }
  return counted;
}

}  // namespace gradwire
