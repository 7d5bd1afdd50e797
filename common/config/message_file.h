// Files that people write: a protobuf message as YAML, JSON or protobuf text format. The fields are those of the
// message by their names in the .proto file, so nothing about a message is listed here a second time.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "google/protobuf/message.h"

namespace gradwire {

// A larger file is refused before it is read.
inline constexpr size_t kMaxMessageFileBytes = 64u << 20;

enum class MessageFormat {
  kText,  // protobuf text format
  kYaml,  // YAML, of which JSON is a part
};

// Parses `text` into `message`, which is cleared before. InvalidArgument names `origin`, the line, the field, what was
// found and what was expected; a field that does not exist is an error that names the nearest one. A text that sets
// nothing is an error. YAML takes numbers, true and false, names of enum values, maps for messages, and lists, or a
// single value where a list has one. Fields of type bytes and map are not supported there. Aliases may make a YAML text
// stand for 4 times its bytes (or 1 MiB), not more.
absl::Status ParseMessageText(std::string_view text, const std::string& origin, MessageFormat format,
                              google::protobuf::Message* message);

// Reads and parses a file; the ending of its name tells the format: .yaml, .yml, .json; .textproto, .txtpb, .pbtxt,
// .prototxt. Errors: NotFound (there is no such file), InvalidArgument (another ending, a folder, too large, and those
// of ParseMessageText), PermissionDenied or Unknown (cannot be read; says why).
absl::Status ReadMessageFile(const std::string& path, google::protobuf::Message* message);

}  // namespace gradwire
