// `gradwire verify` and `gradwire restore`: data directories, without servers. See commands.h.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands.h"
#include "common/base/status_macros.h"
#include "common/recovery/restore.h"
#include "common/recovery/verify.h"
#include "common/storage/posix_disk.h"

namespace gradwire::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string Size(uint64_t bytes) { return HumanBytes(static_cast<double>(bytes)); }

Json ToJson(const std::vector<journal::Damage>& damage) {
  Json list = Json::array();
  for (const journal::Damage& d : damage) list.push_back({{"file", d.path}, {"offset", d.offset}, {"what", d.what}});
  return list;
}

Json ToJson(const ShardReport& shard) {
  Json snapshots = Json::array();
  for (const SnapshotReport& s : shard.snapshots) {
    snapshots.push_back(
        {{"version", s.version}, {"bytes", s.bytes}, {"ok", s.status.ok()}, {"recoverable_to", s.recoverable_to}});
  }
  Json json = {{"job", shard.job},
               {"shard", shard.shard},
               {"shards", shard.shards},
               {"version", shard.version},
               {"newest", shard.newest},
               {"refused", shard.refused},
               {"parameters_sha256", shard.parameters_sha256},
               {"snapshots", snapshots},
               {"journal",
                {{"segments", shard.segments},
                 {"bytes", shard.bytes},
                 {"records", shard.records},
                 {"torn_bytes", shard.torn_bytes},
                 {"epoch", shard.epoch}}},
               {"damage", ToJson(shard.damage)}};
  if (shard.oldest_round) json["journal"]["oldest_round"] = *shard.oldest_round;
  return json;
}

Json ToJson(const DirectoryReport& report) {
  Json shards = Json::array();
  for (const ShardReport& shard : report.shards) shards.push_back(ToJson(shard));
  return {{"directory", report.path},
          {"epoch", report.epoch},
          {"in_use", report.in_use},
          {"ok", !report.damaged()},
          {"leftovers", report.leftovers},
          {"damage", ToJson(report.damage)},
          {"jobs", shards}};
}

void PrintDamage(const std::vector<journal::Damage>& damage, std::ostream& out) {
  for (const journal::Damage& d : damage) {
    out << absl::StrFormat("    damaged    '%s' offset %d: %s\n", d.path, d.offset, d.what);
  }
}

void Print(const ShardReport& shard, std::ostream& out) {
  out << absl::StrFormat("  job %s, shard %d of %d: version %d%s\n", shard.job, shard.shard, shard.shards,
                         shard.version,
                         shard.parameters_sha256.empty() ? "" : ", parameters SHA-256 " + shard.parameters_sha256);
  for (const SnapshotReport& s : shard.snapshots) {
    out << absl::StrFormat(
        "    snapshot   version %d, %s, %s\n", s.version, Size(s.bytes),
        s.status.ok() ? absl::StrFormat("with the journal to version %d", s.recoverable_to) : "damaged");
  }
  if (shard.segments > 0) {
    out << absl::StrFormat("    journal    %d segments from %d, %s, %d records%s, epoch %d%s\n", shard.segments,
                           shard.first_segment, Size(shard.bytes), shard.records,
                           shard.oldest_round ? absl::StrFormat(" from round %d", *shard.oldest_round) : "",
                           shard.epoch,
                           shard.torn_bytes > 0 ? absl::StrFormat(", then %d bytes of an unfinished write, which the "
                                                                  "next start cuts off",
                                                                  shard.torn_bytes)
                                                : "");
  }
  PrintDamage(shard.damage, out);
  if (shard.newest > shard.version) {
    const bool unfinished = shard.most_apart && shard.newest - shard.version <= *shard.most_apart && !shard.refused;
    out << absl::StrFormat("    %s versions %d to %d\n", unfinished ? "unfinished" : "lost      ", shard.version + 1,
                           shard.newest);
  }
  if (shard.refused) {
    out << absl::StrFormat(
        "    A server would refuse this job. Put back copies of the damaged files; or bring back what can be with\n"
        "    `gradwire restore --job=%s`; or delete the job.\n",
        shard.job);
  }
}

void Print(const DirectoryReport& report, std::ostream& out) {
  out << absl::StrFormat("%s: epoch %d, %d jobs%s\n", report.path, report.epoch, report.shards.size(),
                         report.in_use ? "; a server runs here: what it wrote last may be missing below" : "");
  PrintDamage(report.damage, out);
  for (const std::string& name : report.leftovers) {
    out << absl::StrFormat("  %s: not made or not deleted completely; the next start removes it\n", name);
  }
  for (const ShardReport& shard : report.shards) Print(shard, out);
}

void Print(const RestoreReport& report, const Options& options, std::ostream& out) {
  for (const RestoreReport::Source& source : report.sources) {
    out << absl::StrFormat(
        "shard %d from '%s': %s, %d records of the journal%s%s\n", source.shard, source.path,
        source.snapshot > 0 ? absl::StrFormat("snapshot of version %d", source.snapshot) : "initial parameters",
        source.replayed,
        source.newest > report.version
            ? absl::StrFormat("; its versions %d to %d are not in the restored job", report.version + 1, source.newest)
            : "",
        source.journal ? "" : "; no journal here, what came after the snapshot is not restored");
    if (source.in_use) {
      out << "  a server runs there: what it does from now on is not in the restored job\n";
    }
  }
  for (const std::string& warning : report.warnings) out << "passed over: " << warning << "\n";
  out << absl::StrFormat(
      "job %s restored at version %d onto %d shards: %s\nStart a server on each, in shard order, and start the "
      "training "
      "processes anew.\n",
      report.job, report.version, report.shards, absl::StrJoin(options.to, ", "));
}

}  // namespace

absl::Status Verify(const Options& options, std::ostream& out) {
  GW_ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Backend> backend, kernels::MakeBackend("cpu"));
  PosixDisk disk;
  Json json = Json::array();
  size_t jobs = 0;
  std::vector<std::string> damaged;
  std::vector<DirectoryReport> reports;
  for (const std::string& path : options.directories) {
    GW_ASSIGN_OR_RETURN(reports.emplace_back(), VerifyDirectory(disk, path, backend.get()));
  }
  CompareShards(&reports);
  for (const DirectoryReport& report : reports) {
    jobs += report.shards.size();
    if (report.damaged()) damaged.push_back(report.path);
    if (options.json) {
      json.push_back(ToJson(report));
    } else {
      Print(report, out);
    }
  }
  if (options.json) {
    out << json.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
  } else if (damaged.empty()) {
    out << absl::StrFormat("all is well: %d data directories, %d jobs\n", options.directories.size(), jobs);
  }
  if (damaged.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat("damaged: %s", absl::StrJoin(damaged, ", ")));
}

absl::Status Restore(const Options& options, std::ostream& out) {
  RestoreOptions restore;
  restore.job = options.job;
  restore.from = options.from;
  restore.to = options.to;
  restore.version = options.version;
  if (!options.shard && options.shards > 1) {
    return absl::InvalidArgumentError(
        "--shards belongs to --shard; without it there are as many as directories in --to");
  }
  if (options.shard) {
    restore.shards = options.shards;
    restore.write = {*options.shard};
  } else {
    restore.shards = static_cast<uint32_t>(options.to.size());
    for (uint32_t s = 0; s < restore.shards; ++s) restore.write.push_back(s);
  }
  GW_ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Backend> backend, kernels::MakeBackend("cpu"));
  PosixDisk disk;
  GW_ASSIGN_OR_RETURN(const RestoreReport report, RestoreJob(disk, restore, backend.get()));
  if (!options.json) {
    Print(report, options, out);
    return absl::OkStatus();
  }
  Json sources = Json::array();
  for (const RestoreReport::Source& source : report.sources) {
    sources.push_back({{"shard", source.shard},
                       {"path", source.path},
                       {"snapshot", source.snapshot},
                       {"replayed", source.replayed},
                       {"newest", source.newest},
                       {"journal", source.journal},
                       {"in_use", source.in_use}});
  }
  const Json json = {{"job", report.job},         {"version", report.version},   {"shards", report.shards},
                     {"directories", options.to}, {"warnings", report.warnings}, {"sources", sources}};
  out << json.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
  return absl::OkStatus();
}

}  // namespace gradwire::cli
