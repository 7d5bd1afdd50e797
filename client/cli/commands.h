// The commands of `gradwire`.
#pragma once

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/options.h"
#include "gradwire/v1/job.pb.h"

namespace gradwire::cli {

// Runs the chosen command and prints its result to `out`. An error says what to do.
absl::Status RunCommand(const Options& options, std::ostream& out);

// Reads a JobSpec in protobuf text format. Errors carry line and column.
absl::StatusOr<v1::JobSpec> ReadSpec(const std::string& path);

// layout_report.cc: buckets, codecs with the rule that chose them, bytes per shard, balance.
absl::Status ReportLayout(const v1::JobSpec& spec, uint32_t shards, bool json, std::ostream& out);
// layout_report.cc: which features of jobs do not go together.
absl::Status ReportFeatures(bool json, std::ostream& out);
// explain.cc: what a codec spec means, key by key.
absl::Status ExplainCodec(const std::string& text, uint64_t elements, bool json, std::ostream& out);

// trace.cc: a file of what the shards do in the next rounds of a job.
absl::Status Trace(const Options& options, std::ostream& out);

// offline.cc: what is done with data directories. DataLoss where one is damaged.
absl::Status Verify(const Options& options, std::ostream& out);
absl::Status Restore(const Options& options, std::ostream& out);

// "1.5 MiB".
std::string HumanBytes(double bytes);
// A JSON string literal.
std::string Quoted(const std::string& text);

}  // namespace gradwire::cli
