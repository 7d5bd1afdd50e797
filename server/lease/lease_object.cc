// See lease_object.h.
#include "server/lease/lease_object.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

using nlohmann::json;

constexpr int64_t kMsPerSecond = 1000;
constexpr int kMaxDepth = 64;
// leaseDurationSeconds is an int32.
constexpr int64_t kMaxSeconds = std::numeric_limits<int32_t>::max();

absl::Status Unreadable(std::string_view what) {
  return absl::DataLossError(absl::StrCat("the lease object cannot be read: ", std::string(what)));
}

// The member `key` of an object, or null.
const json* Find(const json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

// A part of `object` that is an object itself; null where it is missing.
absl::StatusOr<const json*> Part(const json& object, const char* key) {
  const json* const part = Find(object, key);
  if (part != nullptr && !part->is_object()) return Unreadable(absl::StrCat(key, " is not an object"));
  return part;
}

// The text of `key`; empty where it is missing.
absl::StatusOr<std::string> Text(const json* object, const char* key) {
  const json* const text = object == nullptr ? nullptr : Find(*object, key);
  if (text == nullptr) return std::string();
  if (!text->is_string()) return Unreadable(absl::StrCat(key, " is not a string"));
  return text->get<std::string>();
}

// Zero where it is missing.
absl::StatusOr<int64_t> Count(const json* object, const char* key) {
  const json* const count = object == nullptr ? nullptr : Find(*object, key);
  if (count == nullptr) return 0;
  if (!count->is_number_unsigned() || count->get<uint64_t>() > static_cast<uint64_t>(kMaxSeconds)) {
    return Unreadable(absl::StrCat(key, " is not a number from 0 to ", kMaxSeconds));
  }
  return count->get<int64_t>();
}

// Kubernetes' MicroTime.
std::string MicroTime(absl::Time time) { return absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", time, absl::UTCTimeZone()); }

}  // namespace

LeaseObject::LeaseObject(const std::string& space, const std::string& name)
    : json_({{"apiVersion", "coordination.k8s.io/v1"},
             {"kind", "Lease"},
             {"metadata", {{"namespace", space}, {"name", name}}},
             {"spec", json::object()}}) {}

absl::StatusOr<LeaseObject> LeaseObject::Parse(std::string_view text) {
  LeaseObject object;
  bool too_deep = false;  // to be written back, which recurses
  const json::parser_callback_t within = [&too_deep](int depth, json::parse_event_t, json&) {
    too_deep = too_deep || depth > kMaxDepth;
    return depth <= kMaxDepth;
  };
  object.json_ = json::parse(text, within, /*allow_exceptions=*/false);
  if (too_deep) return Unreadable(absl::StrCat("its parts are nested deeper than ", kMaxDepth));
  if (!object.json_.is_object()) return Unreadable("it is not a JSON object");
  GW_RETURN_IF_ERROR(object.Read());
  return object;
}

absl::Status LeaseObject::Read() {
  GW_ASSIGN_OR_RETURN(const std::string kind, Text(&json_, "kind"));
  if (kind != "Lease") return Unreadable(absl::StrCat("its kind is '", kind.substr(0, 40), "', not Lease"));
  GW_ASSIGN_OR_RETURN(const json* const metadata, Part(json_, "metadata"));
  GW_ASSIGN_OR_RETURN(version_, Text(metadata, "resourceVersion"));
  if (version_.empty()) return Unreadable("it has no resourceVersion");
  GW_ASSIGN_OR_RETURN(const json* const annotations, Part(*metadata, "annotations"));
  GW_ASSIGN_OR_RETURN(const std::string epoch, Text(annotations, kEpochAnnotation));
  GW_ASSIGN_OR_RETURN(last_primary_, Text(annotations, kPrimaryAnnotation));
  if (epoch.empty() != last_primary_.empty() || (!epoch.empty() && !absl::SimpleAtoi(epoch, &last_epoch_))) {
    return Unreadable(absl::StrCat("the annotations ", kEpochAnnotation, " and ", kPrimaryAnnotation,
                                   " do not name the last primary; put back what was there"));
  }
  GW_ASSIGN_OR_RETURN(const json* const spec, Part(json_, "spec"));
  GW_ASSIGN_OR_RETURN(holder_, Text(spec, "holderIdentity"));
  GW_ASSIGN_OR_RETURN(const int64_t seconds, Count(spec, "leaseDurationSeconds"));
  lives_ms_ = seconds * kMsPerSecond;
  return Count(spec, "leaseTransitions").status();
}

std::string LeaseObject::Serialize() const {
  return json_.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

void LeaseObject::Hold(const std::string& identity, int64_t ttl_ms, absl::Time now) {
  json& spec = json_["spec"];
  if (holder_ != identity) {
    spec["acquireTime"] = MicroTime(now);
    const json* const before = Find(spec, "leaseTransitions");
    const int64_t transitions = before == nullptr ? 0 : before->get<int64_t>();
    // A new object has had no holder before.
    spec["leaseTransitions"] = version_.empty() ? 0 : std::min(transitions + 1, kMaxSeconds);
  }
  spec["holderIdentity"] = holder_ = identity;
  spec["leaseDurationSeconds"] = (ttl_ms + kMsPerSecond - 1) / kMsPerSecond;
  spec["renewTime"] = MicroTime(now);
}

void LeaseObject::GiveBack(absl::Time now) {
  json_["spec"]["holderIdentity"] = "";
  json_["spec"]["renewTime"] = MicroTime(now);
  holder_.clear();
}

void LeaseObject::Announce(uint64_t epoch, const std::string& name) {
  json_["metadata"]["annotations"][kEpochAnnotation] = absl::StrCat(epoch);
  json_["metadata"]["annotations"][kPrimaryAnnotation] = name;
  last_epoch_ = epoch;
  last_primary_ = name;
}

}  // namespace gradwire
