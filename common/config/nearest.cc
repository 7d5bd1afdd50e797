// See nearest.h. The distance is that of optimal string alignment (Damerau 1964, restricted).
#include "common/config/nearest.h"

#include <algorithm>

#include "absl/strings/ascii.h"

namespace gradwire {
namespace {

constexpr size_t kMaxWordBytes = 128;  // what is longer is no misspelling

std::string Letters(std::string_view word) {
  std::string letters;
  for (char c : word) {
    if (c != '_' && c != '-' && c != '.') letters.push_back(absl::ascii_tolower(static_cast<unsigned char>(c)));
  }
  return letters;
}

size_t Distance(const std::string& a, const std::string& b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

}  // namespace

std::string NearestName(std::string_view word, const std::vector<std::string>& known) {
  if (word.size() > kMaxWordBytes) return "";
  const std::string letters = Letters(word);
  std::string nearest;
  size_t least = SIZE_MAX;
  for (const std::string& name : known) {
    const size_t distance = Distance(letters, Letters(name));
    if (distance >= least || distance > std::max<size_t>(2, name.size() / 3)) continue;
    least = distance;
    nearest = name;
  }
  return nearest;
}

}  // namespace gradwire
