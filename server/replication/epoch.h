// Server epochs: a term, which grows with every promotion, and a count of starts within it. The larger epoch is the
// later server. Contract: proto/REPLICATION.md, "Epochs".
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

namespace gradwire {

inline constexpr int kStartBits = 32;

inline uint64_t TermOf(uint64_t epoch) { return epoch >> kStartBits; }
inline uint64_t StartsOf(uint64_t epoch) { return epoch & ((uint64_t{1} << kStartBits) - 1); }
// The first epoch of the term behind that of `epoch`.
inline uint64_t NextTerm(uint64_t epoch) { return (TermOf(epoch) + 1) << kStartBits | 1; }

// No server of one lineage is so many promotions ahead of another: who says so is not believed.
inline constexpr uint64_t kMaxTermsAhead = 1u << 16;
// A later epoch that a server of epoch `own` may be told of.
inline bool CredibleAfter(uint64_t own, uint64_t epoch) {
  return epoch >> 62 == 0 && TermOf(epoch) <= TermOf(own) + kMaxTermsAhead;
}

// "TERM.STARTS", for people.
inline std::string EpochText(uint64_t epoch) { return absl::StrCat(TermOf(epoch), ".", StartsOf(epoch)); }

}  // namespace gradwire
