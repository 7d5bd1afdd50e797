// How the server's log looks: a line for each entry, whatever its text says.
#pragma once

#include <string>

namespace gradwire {

// Entries of the default logger from now on: time, level, text. What is in the text that is not plain
// (common/base/names.h) is escaped, so that no peer can begin a line of its own or speak to a terminal.
void SetLogFormat();

// For a server in somebody else's process, whose standard output it leaves alone: the same, from `level` on (debug,
// info, warning, error). Of several calls the last one's level counts.
void LogToStandardError(const std::string& level);

}  // namespace gradwire
