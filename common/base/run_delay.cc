// See run_delay.h.
#include "common/base/run_delay.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace gradwire {

std::optional<TimeNs> RunDelayOfThisThread() {
  const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  std::array<char, 128> text;  // nanoseconds on a core, nanoseconds ready without one, times on a core
  const ssize_t bytes = read(file, text.data(), text.size());
  close(file);
  if (bytes <= 0) return std::nullopt;
  const std::vector<absl::string_view> words =
      absl::StrSplit(absl::string_view(text.data(), static_cast<size_t>(bytes)), absl::ByAnyChar(" \n"));
  TimeNs delay = 0;
  if (words.size() < 2 || !absl::SimpleAtoi(words[1], &delay)) return std::nullopt;
  return delay;
}

}  // namespace gradwire
