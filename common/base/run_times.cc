// See run_times.h.
#include "common/base/run_times.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace gradwire {

std::optional<RunTimes> RunTimesOfThisThread() {
  const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  std::array<char, 128> text;  // nanoseconds on a core, nanoseconds ready without one, times on a core
  const ssize_t bytes = read(file, text.data(), text.size());
  close(file);
  if (bytes <= 0) return std::nullopt;
  const std::vector<absl::string_view> words =
      absl::StrSplit(absl::string_view(text.data(), static_cast<size_t>(bytes)), absl::ByAnyChar(" \n"));
  RunTimes of;
  uint64_t times = 0;  // 0 where the kernel does not count
  if (words.size() < 3 || !absl::SimpleAtoi(words[0], &of.ran) || !absl::SimpleAtoi(words[1], &of.delayed) ||
      !absl::SimpleAtoi(words[2], &times) || times == 0)
    return std::nullopt;
  return of;
}

}  // namespace gradwire
