// Names and other text that peers and files give: what may be in them, and how what may not is shown. The one place for
// it: whoever takes a name from a message checks it here before it reaches a log, a status, a label of a metric or a
// file.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace gradwire {

inline constexpr size_t kMaxNameBytes = 128;        // of jobs and workers
inline constexpr size_t kMaxServerNameBytes = 512;  // of servers, which are host and addresses by default
inline constexpr size_t kMaxShownBytes = 200;       // of a stranger's text in a message

// 1 to kMaxNameBytes of [A-Za-z0-9._-]: jobs and workers. These are also names of files.
bool IsName(std::string_view text);
// 1 to kMaxServerNameBytes of printable ASCII without blanks: servers, standbys, addresses.
bool IsServerName(std::string_view text);
// UTF-8 without anything that a terminal or an editor obeys instead of showing: controls, line separators, changes of
// the writing direction. Any length.
bool IsPlainText(std::string_view text);

// InvalidArgument, saying `what` it is and what is allowed.
absl::Status CheckServerName(std::string_view what, std::string_view text);

// `text` with everything that is not plain escaped (\n, \t, \xNN), and "..." in place of what exceeds `limit` bytes.
std::string Printable(std::string_view text, size_t limit = kMaxShownBytes);

}  // namespace gradwire
