// See message_file.h. YAML is walked along the message's descriptor, so every error knows its line.
#include "common/config/message_file.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <sys/stat.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/status_macros.h"
#include "common/config/nearest.h"

namespace gradwire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr size_t kShownBytes = 60;  // of a value in a message

// YAML's aliases let a short text stand for a long one. What they stand for may have this many times the text's bytes,
// and this many bytes whatever the text.
constexpr size_t kMaxAliasGrowth = 4;
constexpr size_t kAliasFreeBytes = 1u << 20;

std::string Shown(std::string_view value) {
  if (value.size() <= kShownBytes) return absl::StrCat("'", std::string(value), "'");
  return absl::StrCat("'", std::string(value.substr(0, kShownBytes)), "...'");
}

std::string UnknownField(std::string_view name, const Descriptor* type) {
  std::vector<std::string> known;
  for (int i = 0; i < type->field_count(); ++i) known.push_back(type->field(i)->name());
  const std::string nearest = NearestName(name, known);
  const std::string hint = nearest.empty() ? absl::StrCat("the fields are ", absl::StrJoin(known, ", "))
                                           : absl::StrCat("did you mean '", nearest, "'?");
  return absl::StrCat(type->full_name(), " has no field ", Shown(name), ": ", hint);
}

// ---- Protobuf text format ----

// Keeps the first error, with its position.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (line_ != 0) return;
    line_ = line + 1;
    column_ = column + 1;
    message_ = message;
  }
  // An unknown field is told its nearest name; `type` is the message that was parsed, or holds it.
  std::string ToString(const Descriptor* type) const {
    const std::vector<std::string> words = absl::StrSplit(message_, '"');  // type and field are quoted
    std::string text = message_;
    if (words.size() == 5 && absl::StrContains(words[2], "has no field named")) {
      const Descriptor* found = type->file()->pool()->FindMessageTypeByName(words[1]);
      if (found != nullptr) text = UnknownField(words[3], found);
    }
    return absl::StrCat("line ", line_, ", column ", column_, ": ", text);
  }

 private:
  int line_ = 0;
  int column_ = 0;
  std::string message_;
};

absl::Status ParseText(const std::string& text, const std::string& origin, Message* message) {
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (parser.ParseFromString(text, message)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(origin, ": ", error.ToString(message->GetDescriptor())));
}

// ---- YAML ----

class YamlReader {
 public:
  YamlReader(const std::string& origin, size_t text_bytes)
      : origin_(origin), left_bytes_(std::max(kAliasFreeBytes, kMaxAliasGrowth * text_bytes)) {}

  absl::Status Read(const YAML::Node& node, const std::string& path, Message* message) {
    const Descriptor* type = message->GetDescriptor();
    if (!node.IsMap()) return Wrong(node, path, "a map of the fields of " + type->full_name());
    std::set<const FieldDescriptor*> seen;
    for (const auto& entry : node) {
      if (!entry.first.IsScalar()) return Error(entry.first, path, "a field's name must be a plain word");
      const std::string& name = entry.first.Scalar();
      const FieldDescriptor* field = type->FindFieldByName(name);
      if (field == nullptr) return Error(entry.first, path, UnknownField(name, type));
      const std::string here = path.empty() ? name : absl::StrCat(path, ".", name);
      if (!seen.insert(field).second) return Error(entry.first, here, "appears twice");
      // Nothing stands nowhere: yaml-cpp gives it the place of what comes next.
      if (entry.second.IsNull()) return Error(entry.first, here, "has no value");
      GW_RETURN_IF_ERROR(ReadField(entry.second, here, field, message));
    }
    return absl::OkStatus();
  }

  absl::Status Error(const YAML::Node& node, const std::string& path, const std::string& what) const {
    return absl::InvalidArgumentError(
        absl::StrCat(origin_, ": line ", node.Mark().line + 1, ": ", path, path.empty() ? "" : ": ", what));
  }

 private:
  absl::Status Wrong(const YAML::Node& node, const std::string& path, const std::string& expected) const {
    const std::string found = node.IsNull()       ? "nothing"
                              : node.IsScalar()   ? Shown(node.Scalar())
                              : node.IsSequence() ? "a list"
                                                  : "a map";
    return Error(node, path, absl::StrCat("expected ", expected, ", found ", found));
  }

  // Counts a value each time it is read; without aliases that is once.
  absl::Status Count(const YAML::Node& node, const std::string& path) {
    const size_t bytes = 1 + (node.IsScalar() ? node.Scalar().size() : 0);
    if (bytes > left_bytes_) {
      return Error(node, path,
                   absl::StrCat("aliases repeat too much: at most ", kMaxAliasGrowth, " times the bytes of the file"));
    }
    left_bytes_ -= bytes;
    return absl::OkStatus();
  }

  absl::Status ReadField(const YAML::Node& node, const std::string& path, const FieldDescriptor* field,
                         Message* message) {
    if (!field->is_repeated() || !node.IsSequence()) return ReadValue(node, path, field, message);
    int index = 0;
    for (const YAML::Node& item : node) {
      GW_RETURN_IF_ERROR(ReadValue(item, absl::StrCat(path, "[", index++, "]"), field, message));
    }
    return absl::OkStatus();
  }

  // Sets a singular field, or appends to a repeated one.
  absl::Status ReadValue(const YAML::Node& node, const std::string& path, const FieldDescriptor* field,
                         Message* message) {
    GW_RETURN_IF_ERROR(Count(node, path));
    const Reflection* reflection = message->GetReflection();
    const bool list = field->is_repeated();
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && !field->is_map()) {
      return Read(node, path,
                  list ? reflection->AddMessage(message, field) : reflection->MutableMessage(message, field));
    }
    if (field->is_map() || field->type() == FieldDescriptor::TYPE_BYTES) {
      return Error(node, path, "this field cannot be written in YAML; use protobuf text format");
    }
    const std::string expected = Expected(field);
    if (!node.IsScalar()) return Wrong(node, path, expected);
    const std::string& text = node.Scalar();
    bool ok = true;
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        list ? reflection->AddString(message, field, text) : reflection->SetString(message, field, text);
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        ok = text == "true" || text == "false";
        list ? reflection->AddBool(message, field, text == "true")
             : reflection->SetBool(message, field, text == "true");
        break;
      case FieldDescriptor::CPPTYPE_ENUM: {
        const EnumValueDescriptor* value = field->enum_type()->FindValueByName(text);
        if (value == nullptr) return UnknownEnum(node, path, field);
        list ? reflection->AddEnum(message, field, value) : reflection->SetEnum(message, field, value);
        break;
      }
      case FieldDescriptor::CPPTYPE_INT32:
        ok = SetNumber<int32_t>(text, &Reflection::AddInt32, &Reflection::SetInt32, field, message);
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        ok = SetNumber<int64_t>(text, &Reflection::AddInt64, &Reflection::SetInt64, field, message);
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        ok = SetNumber<uint32_t>(text, &Reflection::AddUInt32, &Reflection::SetUInt32, field, message);
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        ok = SetNumber<uint64_t>(text, &Reflection::AddUInt64, &Reflection::SetUInt64, field, message);
        break;
      case FieldDescriptor::CPPTYPE_FLOAT:
        ok = SetNumber<float>(text, &Reflection::AddFloat, &Reflection::SetFloat, field, message);
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        ok = SetNumber<double>(text, &Reflection::AddDouble, &Reflection::SetDouble, field, message);
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE:
        break;  // above
    }
    return ok ? absl::OkStatus() : Wrong(node, path, expected);
  }

  template <typename T>
  static bool Parse(const std::string& text, T* value) {
    if constexpr (std::is_same_v<T, float>) return absl::SimpleAtof(text, value);
    if constexpr (std::is_same_v<T, double>) return absl::SimpleAtod(text, value);
    if constexpr (std::is_integral_v<T>) return absl::SimpleAtoi(text, value);
  }

  template <typename T>
  static bool SetNumber(const std::string& text, void (Reflection::*add)(Message*, const FieldDescriptor*, T) const,
                        void (Reflection::*set)(Message*, const FieldDescriptor*, T) const,
                        const FieldDescriptor* field, Message* message) {
    T value{};
    if (!Parse(text, &value)) return false;
    (message->GetReflection()->*(field->is_repeated() ? add : set))(message, field, value);
    return true;
  }

  template <typename T>
  static std::string Integer() {
    return absl::StrCat("a whole number from ", std::numeric_limits<T>::min(), " to ", std::numeric_limits<T>::max());
  }

  static std::string Expected(const FieldDescriptor* field) {
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return Integer<int32_t>();
      case FieldDescriptor::CPPTYPE_INT64:
        return Integer<int64_t>();
      case FieldDescriptor::CPPTYPE_UINT32:
        return Integer<uint32_t>();
      case FieldDescriptor::CPPTYPE_UINT64:
        return Integer<uint64_t>();
      case FieldDescriptor::CPPTYPE_FLOAT:
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return "a number";
      case FieldDescriptor::CPPTYPE_BOOL:
        return "true or false";
      case FieldDescriptor::CPPTYPE_ENUM:
        return absl::StrCat("a value of ", field->enum_type()->full_name());
      default:
        return "a text";
    }
  }

  absl::Status UnknownEnum(const YAML::Node& node, const std::string& path, const FieldDescriptor* field) const {
    std::vector<std::string> known;
    for (int i = 0; i < field->enum_type()->value_count(); ++i) known.push_back(field->enum_type()->value(i)->name());
    return Wrong(node, path, "one of " + absl::StrJoin(known, ", "));
  }

  const std::string& origin_;
  size_t left_bytes_;  // of what may still be read
};

// Hears of the events of a text's documents; knows where the last of them begins.
class DocumentFinder final : public YAML::EventHandler {
 public:
  int line() const { return line_; }

  void OnDocumentStart(const YAML::Mark& mark) override { line_ = mark.line + 1; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

 private:
  int line_ = 0;
};

absl::Status ParseYaml(const std::string& text, const std::string& origin, Message* message) {
  try {
    // Not YAML::LoadAll: of a text like "," it makes empty documents without end.
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    DocumentFinder finder;
    if (!parser.HandleNextDocument(finder)) return absl::OkStatus();
    if (parser.HandleNextDocument(finder)) {
      return absl::InvalidArgumentError(
          absl::StrCat(origin, ": line ", finder.line(), ": one document was expected, another one begins"));
    }
    const YAML::Node document = YAML::Load(text);
    if (document.IsNull()) return absl::OkStatus();
    return YamlReader(origin, text.size()).Read(document, "", message);
  } catch (const YAML::Exception& error) {  // the edge of yaml-cpp, which reports by exceptions
    return absl::InvalidArgumentError(absl::StrCat(origin, ": line ", error.mark.line + 1, ", column ",
                                                   error.mark.column + 1, ": not YAML: ", error.msg));
  }
}

// ---- Files ----

absl::StatusOr<MessageFormat> FormatOf(const std::string& path) {
  const std::string name = absl::AsciiStrToLower(path);
  for (const std::string_view ending : {".yaml", ".yml", ".json"}) {
    if (name.ends_with(ending)) return MessageFormat::kYaml;
  }
  for (const std::string_view ending : {".textproto", ".txtpb", ".pbtxt", ".prototxt"}) {
    if (name.ends_with(ending)) return MessageFormat::kText;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the name of '", path,
                   "' does not tell its format: end it in .yaml, .yml or .json for YAML, in .textproto, .txtpb or "
                   ".pbtxt for protobuf text format"));
}

absl::Status CannotRead(const std::string& path, int error) {
  return absl::ErrnoToStatus(error, absl::StrCat("cannot read '", path, "'"));
}

}  // namespace

absl::Status ParseMessageText(std::string_view text, const std::string& origin, MessageFormat format,
                              google::protobuf::Message* message) {
  message->Clear();
  const std::string copy(text);
  if (copy.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(origin, ": is not a text: it has a zero byte"));
  }
  GW_RETURN_IF_ERROR(format == MessageFormat::kYaml ? ParseYaml(copy, origin, message)
                                                    : ParseText(copy, origin, message));
  std::vector<const FieldDescriptor*> set;
  message->GetReflection()->ListFields(*message, &set);
  if (!set.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(origin, ": ",
                                                 absl::StripAsciiWhitespace(copy).empty() ? "is empty" : "sets nothing",
                                                 ": write fields of ", message->GetDescriptor()->full_name()));
}

absl::Status ReadMessageFile(const std::string& path, google::protobuf::Message* message) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return CannotRead(path, errno);
  if (S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' is a folder; name a file in it"));
  }
  GW_ASSIGN_OR_RETURN(const MessageFormat format, FormatOf(path));
  if (static_cast<uint64_t>(info.st_size) > kMaxMessageFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' has ", info.st_size, " bytes; the limit is ", kMaxMessageFileBytes));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return CannotRead(path, errno);
  std::ostringstream text;
  text << file.rdbuf();
  if (text.bad()) return CannotRead(path, EIO);
  return ParseMessageText(text.str(), path, format, message);
}

}  // namespace gradwire
