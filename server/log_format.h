// How the server's log looks: a line for each entry, whatever its text says.
#pragma once

namespace gradwire {

// Entries of the default logger from now on: time, level, text. What is in the text that is not plain
// (common/base/names.h) is escaped, so that no peer can begin a line of its own or speak to a terminal.
void SetLogFormat();

}  // namespace gradwire
