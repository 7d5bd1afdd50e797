// Flags and help of `gradwire`; the only place that reads the environment. See options.h.
#include "client/cli/options.h"

#include <CLI/CLI.hpp>

#include "absl/strings/str_split.h"
#include "common/config/environment.h"
#include "common/config/usage.h"

namespace gradwire::cli {
namespace {

constexpr char kFooter[] =
    "\nServers are given in shard order by --servers or by the environment variable GRADWIRE_SERVERS; a shard server "
    "and\n"
    "its standbys as grpc://a:7070|grpc://b:7070.\n"
    "\nExamples:\n"
    "  gradwire layout --spec job.textproto --shards 4\n"
    "  gradwire job create --spec job.textproto --servers grpc://a:7070,grpc://b:7070\n"
    "  gradwire job describe my-job --digest\n"
    "  gradwire job prune --unused-s 3600\n"
    "  gradwire snapshot my-job\n"
    "  gradwire trace my-job --rounds 3 --out trace.json\n"
    "  gradwire status --servers 'grpc://a:7070|grpc://b:7070'\n"
    "  gradwire promote grpc://b:7070\n"
    "  gradwire verify /var/lib/gradwire\n"
    "  gradwire restore --job=my-job --from=old/0,old/1,old/2,old/3 --to=new/0,new/1,new/2\n"
    "  gradwire codec explain tagc:density=0.01\n";

constexpr char kSpecHelp[] =
    "File with a gradwire.v1.JobSpec: YAML (.yaml, .yml, .json) or protobuf text format (.textproto, .txtpb, .pbtxt)";

void AddCommon(CLI::App* command, Options& o, bool servers) {
  if (servers) {
    command->add_option("--servers", o.servers, "Addresses of the shard servers, comma-separated, in shard order")
        ->delimiter(',');
    command->add_option("--timeout-ms", o.timeout_ms, "Deadline of each call in milliseconds, 1 to 600000")
        ->check(CLI::Range(int64_t{1}, int64_t{600000}))
        ->capture_default_str();
  }
  command->add_flag("--json", o.json, "Print JSON instead of a table");
}

void Select(CLI::App* command, Options& o, Command which) {
  command->callback([&o, which] { o.command = which; });
}

void DefineJob(CLI::App& app, Options& o) {
  CLI::App* job = app.add_subcommand("job", "Create, look at, list and delete jobs");
  job->require_subcommand(1);
  CLI::App* create = job->add_subcommand("create", "Create a job on every server");
  create->add_option("--spec", o.spec_path, kSpecHelp)->required();
  AddCommon(create, o, true);
  Select(create, o, Command::kJobCreate);
  CLI::App* describe = job->add_subcommand("describe", "Version, workers, bytes and memory of a job, per shard");
  describe->add_option("job", o.job, "The job's name")->required();
  describe->add_flag("--digest", o.digest, "Also compute the SHA-256 of each shard's parameters");
  AddCommon(describe, o, true);
  Select(describe, o, Command::kJobDescribe);
  CLI::App* list = job->add_subcommand("list", "The jobs of every server: version, workers, age, state");
  AddCommon(list, o, true);
  Select(list, o, Command::kJobList);
  CLI::App* remove = job->add_subcommand("delete", "Delete a job on every server; its workers are told");
  remove->add_option("job", o.job, "The job's name")->required();
  AddCommon(remove, o, true);
  Select(remove, o, Command::kJobDelete);
  CLI::App* prune = job->add_subcommand(
      "prune", "Delete the jobs of durability none that have no workers on any server; name the durable ones");
  prune->add_option("--unused-s", o.unused_s, "Only those that have had none for this many seconds")
      ->capture_default_str();
  AddCommon(prune, o, true);
  Select(prune, o, Command::kJobPrune);
}

void DefineRestore(CLI::App& app, Options& o) {
  CLI::App* restore = app.add_subcommand(
      "restore", "Write data directories for any number of servers from the snapshots and journals of all shards");
  restore->add_option("--job", o.job, "The job's name; not needed where the sources hold one job");
  restore
      ->add_option("--from", o.from,
                   "Comma-separated, any order, all shards: data directories, or copies of a job's directory, of its "
                   "snapshots or of one snapshot")
      ->delimiter(',')
      ->required();
  restore->add_option("--to", o.to, "Comma-separated, in shard order: data directories to write, without this job")
      ->delimiter(',')
      ->required();
  restore->add_option("--version", o.version, "Which version; default: the newest that all shards have");
  restore
      ->add_option("--shard", o.shard,
                   "Write only this shard of --shards, counted from 0, to the one directory of --to: for pods that "
                   "each restore their own")
      ->needs(restore->add_option("--shards", o.shards, "Number of servers; default: the directories of --to")
                  ->check(CLI::Range(1u, 4096u)));
  AddCommon(restore, o, false);
  Select(restore, o, Command::kRestore);
}

void DefineOthers(CLI::App& app, Options& o) {
  CLI::App* shard = app.add_subcommand("shard", "Look at shard servers");
  shard->require_subcommand(1);
  CLI::App* describe = shard->add_subcommand("describe", "Version, backend, memory, jobs and role of every server");
  AddCommon(describe, o, true);
  Select(describe, o, Command::kShardDescribe);
  CLI::App* status = app.add_subcommand("status", "The same as shard describe");
  AddCommon(status, o, true);
  Select(status, o, Command::kShardDescribe);
  CLI::App* promote = app.add_subcommand(
      "promote", "Make a standby (gradwire-server --follow) the primary; the server that it followed is fenced");
  promote->add_option("address", o.address, "Of the standby, for example grpc://b:7070")->required();
  promote->add_flag("--force", o.force,
                    "Also when it may lack versions that workers have seen: those workers end with an error");
  promote->add_option("--timeout-ms", o.timeout_ms, "Deadline in milliseconds, 1 to 600000")
      ->check(CLI::Range(int64_t{1}, int64_t{600000}))
      ->capture_default_str();
  AddCommon(promote, o, false);
  Select(promote, o, Command::kPromote);
  CLI::App* snapshot =
      app.add_subcommand("snapshot", "Take a snapshot of a durable job on every server, and wait for it");
  snapshot->add_option("job", o.job, "The job's name")->required();
  AddCommon(snapshot, o, true);
  Select(snapshot, o, Command::kSnapshot);
  CLI::App* trace = app.add_subcommand("trace",
                                       "Write what the shards do in the next rounds of a job that trains, as a file "
                                       "for https://ui.perfetto.dev; a worker "
                                       "adds what it does itself to a file of its own (trace= of gradwire.join)");
  trace->add_option("job", o.job, "The job's name")->required();
  trace->add_option("--rounds", o.rounds, "How many, 1 to 1000")->check(CLI::Range(1u, 1000u))->capture_default_str();
  trace->add_option("--out", o.out_path, "The file, Chrome's trace event format")->required();
  trace->add_option("--wait-s", o.wait_s, "For the rounds, in seconds, 1 to 86400; then what there is is written")
      ->check(CLI::Range(1u, 86400u))
      ->capture_default_str();
  AddCommon(trace, o, true);
  Select(trace, o, Command::kTrace);
  CLI::App* verify = app.add_subcommand(
      "verify", "Check every file of data directories as a starting server would; changes nothing, asks no server");
  verify->add_option("directories", o.directories, "What servers are given as --data-dir")->required();
  AddCommon(verify, o, false);
  Select(verify, o, Command::kVerify);
  DefineRestore(app, o);
  CLI::App* layout = app.add_subcommand("layout", "How a job would be sharded and compressed; asks no server");
  layout->add_option("--spec", o.spec_path, kSpecHelp)->required();
  layout->add_option("--shards", o.shards, "Number of shards, 1 to 4096")->check(CLI::Range(1u, 4096u));
  AddCommon(layout, o, false);
  Select(layout, o, Command::kLayout);
  CLI::App* features = app.add_subcommand(
      "features", "Which features of jobs do not go together, why, and what to do instead; Markdown or --json");
  AddCommon(features, o, false);
  Select(features, o, Command::kFeatures);
  CLI::App* codec = app.add_subcommand("codec", "Look at codecs");
  codec->require_subcommand(1);
  CLI::App* explain = codec->add_subcommand("explain", "What a codec spec means and about what it costs");
  explain->add_option("spec", o.codec, "For example tagc:density=0.01 or dense:values=bf16")->required();
  explain->add_option("--elements", o.elements, "Size of the tensors that the figures are for")->capture_default_str();
  AddCommon(explain, o, false);
  Select(explain, o, Command::kCodecExplain);
}

}  // namespace

Options ParseOptions(int argc, const char* const* argv) {
  Options options;
  CLI::App app("Operates the shard servers of Gradwire.", "gradwire");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string(GRADWIRE_VERSION));
  app.require_subcommand(1);
  DefineJob(app, options);
  DefineOthers(app, options);
  if (const std::optional<int> status = ParseArguments(app, argc, argv)) {
    options.exit = true;
    options.exit_code = *status;
    return options;
  }
  if (options.servers.empty()) {
    options.servers = absl::StrSplit(EnvironmentVariable("GRADWIRE_SERVERS"), ',', absl::SkipWhitespace());
  }
  return options;
}

absl::Status RequireServers(const Options& options) {
  if (!options.servers.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "no servers named: give --servers grpc://host:7070,... or set GRADWIRE_SERVERS, in shard order");
}

}  // namespace gradwire::cli
