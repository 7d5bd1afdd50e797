// What the command line of `gradwire` said: one struct, read from flags and environment in one place.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace gradwire::cli {

enum class Command {
  kNone,
  kJobCreate,
  kJobDescribe,
  kJobList,
  kJobDelete,
  kJobPrune,
  kSnapshot,
  kTrace,
  kPromote,
  kVerify,
  kRestore,
  kShardDescribe,
  kLayout,
  kFeatures,
  kCodecExplain
};

struct Options {
  Command command = Command::kNone;
  std::vector<std::string> servers;  // --servers or GRADWIRE_SERVERS, in shard order
  std::string spec_path;
  std::string job;
  std::string address;  // promote: of the standby
  std::string codec;
  std::vector<std::string> directories;  // verify
  std::vector<std::string> from;         // restore
  std::vector<std::string> to;
  std::optional<uint64_t> version;
  std::optional<uint32_t> shard;  // restore: only this one is written
  uint32_t shards = 1;
  uint64_t elements = 1'000'000;  // codec explain: of which size
  uint32_t unused_s = 60;         // job prune: without workers for this long
  uint32_t rounds = 1;            // trace
  uint32_t wait_s = 60;           // trace: for the rounds
  std::string out_path;           // trace
  int64_t timeout_ms = 10'000;
  bool json = false;
  bool digest = false;
  bool force = false;
  bool exit = false;  // help was printed, or the flags are wrong
  int exit_code = 0;
};

// Prints help and usage errors itself.
Options ParseOptions(int argc, const char* const* argv);

// InvalidArgument saying how to name servers, unless some are named.
absl::Status RequireServers(const Options& options);

}  // namespace gradwire::cli
