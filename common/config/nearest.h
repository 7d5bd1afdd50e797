// "Did you mean": the known name that a mistyped one is closest to.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gradwire {

// The known name with the fewest edits (insert, delete, replace, swap of neighbours; case, '_', '-' and '.' do not
// count), or an empty one where more than a third of its letters, and more than two, would have to change. Of several
// equally close ones the first.
std::string NearestName(std::string_view word, const std::vector<std::string>& known);

}  // namespace gradwire
