// `gradwire layout`: the shard map of a spec as people and scripts read it. See commands.h.
#include <algorithm>
#include <optional>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands.h"
#include "common/base/status_macros.h"
#include "common/job/compatibility.h"
#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire::cli {
namespace {

std::string RoleName(v1::Role role) { return v1::Role_Name(role).substr(sizeof("ROLE_") - 1); }

bool RuleMatches(const v1::CodecRule& rule, const Tensor& tensor) {
  if (!rule.pattern().empty() && !GlobMatch(rule.pattern(), tensor.name)) return false;
  if (rule.roles_size() > 0 && std::find(rule.roles().begin(), rule.roles().end(), tensor.role) == rule.roles().end()) {
    return false;
  }
  return rule.max_elements() == 0 || tensor.elements <= rule.max_elements();
}

// How tensors travel, and how they come back.
std::string CodecsOf(const Job& job, uint32_t codec) {
  const std::optional<CodecSpec>& back = job.update_codecs()[codec];
  return ToString(job.codecs()[codec]) + (back ? ", back " + ToString(*back) : "");
}

std::string Reason(const Job& job, const Tensor& tensor) {
  for (int i = 0; i < job.spec().rules_size(); ++i) {
    const v1::CodecRule& rule = job.spec().rules(i);
    if (!RuleMatches(rule, tensor)) continue;
    std::vector<std::string> conditions;
    if (!rule.pattern().empty()) conditions.push_back("name " + rule.pattern());
    if (rule.roles_size() > 0) conditions.push_back("role " + RoleName(tensor.role));
    if (rule.max_elements() != 0) conditions.push_back(absl::StrFormat("at most %d elements", rule.max_elements()));
    return absl::StrFormat("rule %d: %s", i, conditions.empty() ? "any tensor" : absl::StrJoin(conditions, ", "));
  }
  return "the job's codec: no rule matches";
}

double Balance(const Layout& layout, uint64_t elements) {
  uint64_t largest = 0;
  for (uint32_t s = 0; s < layout.shard_count(); ++s) largest = std::max(largest, layout.shard_elements(s));
  return elements == 0 ? 1.0 : static_cast<double>(largest) * layout.shard_count() / static_cast<double>(elements);
}

// What the job cannot have besides, by the table of common/job/compatibility.h.
void PrintImpossible(const Job& job, std::ostream& out) {
  bool first = true;
  for (const Conflict& conflict : Conflicts()) {
    const bool has_first = job.features().Has(conflict.first);
    if (has_first == job.features().Has(conflict.second)) continue;
    const Feature has = has_first ? conflict.first : conflict.second;
    const Feature other = has_first ? conflict.second : conflict.first;
    if (AxisOf(other) == AxisOf(has)) continue;  // another choice of the same kind
    if (first) out << "\nwhat does not go with this job (all of it: gradwire features)\n";
    first = false;
    out << absl::StrFormat("  %s, because of %s: %s\n", std::string(NameOf(other)), std::string(NameOf(has)),
                           std::string(conflict.reason));
  }
}

void PrintTables(const Job& job, const Layout& layout, std::ostream& out) {
  out << absl::StrFormat("job %s: %d tensors, %d elements, %d buckets, %d shards, layout %016x\n\n", job.spec().name(),
                         job.tensors().size(), job.elements(), layout.bucket_count(), layout.shard_count(),
                         layout.digest());
  out << absl::StrFormat("%-40s %12s %-10s %-44s %s\n", "tensor", "elements", "role", "codec", "why");
  for (const Tensor& tensor : job.tensors()) {
    out << absl::StrFormat("%-40s %12d %-10s %-44s %s\n", tensor.name, tensor.elements, RoleName(tensor.role),
                           CodecsOf(job, tensor.codec), Reason(job, tensor));
  }
  out << absl::StrFormat("\n%6s %12s %-44s %s\n", "bucket", "elements", "codec", "tensors");
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    uint64_t elements = 0;
    for (const BucketPart& part : layout.parts(b)) elements += part.end - part.begin;
    const auto parts = layout.parts(b);
    out << absl::StrFormat(
        "%6d %12d %-44s %s\n", b, elements, CodecsOf(job, layout.slices()[layout.first_slice(b)].codec),
        absl::StrJoin(parts, ", ",
                      [&job](std::string* s, const BucketPart& part) { s->append(job.tensors()[part.tensor].name); }));
  }
  out << absl::StrFormat("\n%6s %12s %12s %7s\n", "shard", "elements", "float32", "slices");
  for (uint32_t s = 0; s < layout.shard_count(); ++s) {
    out << absl::StrFormat("%6d %12d %12s %7d\n", s, layout.shard_elements(s),
                           HumanBytes(4.0 * static_cast<double>(layout.shard_elements(s))), layout.bucket_count(s));
  }
  out << absl::StrFormat("largest shard: %.4f of even\n", Balance(layout, job.elements()));
  PrintImpossible(job, out);
}

void PrintJson(const Job& job, const Layout& layout, std::ostream& out) {
  out << absl::StrFormat("{\"job\":%s,\"elements\":%d,\"layout_digest\":\"%016x\",\"balance\":%.6f,\"tensors\":[",
                         Quoted(job.spec().name()), job.elements(), layout.digest(), Balance(layout, job.elements()));
  bool first = true;
  for (const Tensor& tensor : job.tensors()) {
    out << (first ? "" : ",")
        << absl::StrFormat("{\"name\":%s,\"elements\":%d,\"role\":%s,\"codec\":%s,\"why\":%s}", Quoted(tensor.name),
                           tensor.elements, Quoted(RoleName(tensor.role)), Quoted(ToString(job.codecs()[tensor.codec])),
                           Quoted(Reason(job, tensor)));
    first = false;
  }
  out << "],\"buckets\":[";
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    std::vector<uint64_t> elements;
    std::vector<std::string> numbers;
    for (uint32_t s = 0; s < layout.shard_count(); ++s) {
      const BucketLayout* const slice = layout.find(b, s);
      elements.push_back(slice == nullptr ? 0 : slice->elements);
      numbers.push_back(slice == nullptr ? "null" : absl::StrCat(slice->bucket));
    }
    out << (b == 0 ? "" : ",")
        << absl::StrFormat("{\"bucket\":%d,\"codec\":%s,\"elements_per_shard\":[%s],\"number_on_shard\":[%s]}", b,
                           Quoted(ToString(job.codecs()[layout.slices()[layout.first_slice(b)].codec])),
                           absl::StrJoin(elements, ","), absl::StrJoin(numbers, ","));
  }
  out << "],\"shard_bytes\":[";
  for (uint32_t s = 0; s < layout.shard_count(); ++s) out << (s == 0 ? "" : ",") << layout.shard_elements(s) * 4;
  out << "]}\n";
}

}  // namespace

absl::Status ReportLayout(const v1::JobSpec& spec, uint32_t shards, bool json, std::ostream& out) {
  GW_ASSIGN_OR_RETURN(const Job job, Job::Make(spec));
  GW_ASSIGN_OR_RETURN(const Layout layout, Layout::Make(job, shards));
  if (json) {
    PrintJson(job, layout, out);
  } else {
    PrintTables(job, layout, out);
  }
  return absl::OkStatus();
}

absl::Status ReportFeatures(bool json, std::ostream& out) {
  if (!json) {
    out << CompatibilityPage();
    return absl::OkStatus();
  }
  out << "{\"conflicts\":[";
  bool first = true;
  for (const Conflict& conflict : Conflicts()) {
    const auto quoted = [](std::string_view text) { return Quoted(std::string(text)); };
    out << (first ? "" : ",")
        << absl::StrFormat("{\"first\":%s,\"second\":%s,\"not_yet\":%s,\"reason\":%s,\"remedy\":%s}",
                           quoted(NameOf(conflict.first)), quoted(NameOf(conflict.second)),
                           conflict.not_yet ? "true" : "false", quoted(conflict.reason), quoted(conflict.remedy));
    first = false;
  }
  out << "]}\n";
  return absl::OkStatus();
}

}  // namespace gradwire::cli
