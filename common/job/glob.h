// Matching whose cost is bounded: patterns and names that a peer sends.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace gradwire {

// GlobMatch (job.h) in at most *steps comparisons of characters; those that it took are subtracted. Nothing: it would
// take more.
std::optional<bool> GlobMatchWithin(std::string_view pattern, std::string_view text, uint64_t* steps);

}  // namespace gradwire
