// One training worker as a process of its own: a real session whose gradients are a function of worker, round and
// parameters, so that whatever is lost, applied twice or taken from another version shows in the digest at the end.
// Writes a line of JSON per round to --log, and one with its digests when it is done.
#include <stdio.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/failpoint.h"
#include "common/base/hash.h"
#include "common/config/environment.h"
#include "common/config/usage.h"
#include "common/job/job.h"
#include "gradwire/session.h"

namespace gradwire {
namespace {

constexpr float kLearningRate = 0.01f;

struct Options {
  std::vector<std::string> servers;
  std::string job = "chaos", log, durability = "fsync", checkpoint;
  uint32_t index = 0, workers = 4, lease_ms = 10'000, pause_ms = 0;
  uint32_t quorum = 0;
  uint64_t rounds = 0, checkpoint_every = 1;
  std::vector<uint64_t> hold_at;
  std::string hold;
  bool large = false;
  std::string codec = "tagc:density=0.05";
  bool skips = false;
  std::string optimizer = "adamw";  // or "lans": with its gradients clipped by the norm of all tensors
};

void AddTensor(v1::JobSpec* spec, const std::string& name, const std::vector<uint64_t>& shape) {
  v1::TensorSpec* tensor = spec->add_tensors();
  tensor->set_name(name);
  for (uint64_t d : shape) tensor->add_shape(d);
}

// Sparse and dense buckets, several of each on every shard, stepped by AdamW.
v1::JobSpec SpecOf(const Options& options) {
  v1::JobSpec spec;
  spec.set_name(options.job);
  AddTensor(&spec, "embed.weight", {97, 64});
  AddTensor(&spec, "h.0.attn.weight", {64, 65});
  AddTensor(&spec, "h.0.ln.weight", {65});
  AddTensor(&spec, "h.0.mlp.weight", {129, 33});
  AddTensor(&spec, "h.0.mlp.bias", {129});
  AddTensor(&spec, "head.weight", {31, 97});
  if (options.large) AddTensor(&spec, "head.table", {800, 800});  // its frames have several chunks
  const bool lans = options.optimizer == "lans";
  spec.mutable_optimizer()->set_kind(lans ? v1::OPTIMIZER_LANS : v1::OPTIMIZER_ADAMW);
  if (lans) spec.set_clip_norm(1);
  if (options.skips) spec.set_nonfinite(v1::NONFINITE_SKIP);
  spec.mutable_optimizer()->add_groups()->set_weight_decay(0.01f);
  v1::CodecRule* dense = spec.add_rules();
  dense->set_pattern("*head*");
  dense->set_codec("dense:values=fp32");
  v1::CodecRule* small = spec.add_rules();
  small->set_max_elements(1024);
  small->set_codec("dense:values=fp32");
  spec.set_codec(options.codec);
  spec.set_min_workers(options.workers);
  spec.set_max_workers(options.workers);
  spec.set_bucket_bytes(options.large ? 4 << 20 : 16 << 10);
  spec.set_slice_bytes(spec.bucket_bytes() / 4 * 3);
  spec.set_run_elements(256);
  spec.set_lease_ms(options.lease_ms);
  spec.mutable_rounds()->set_quorum(options.quorum);
  v1::DurabilitySpec& durability = *spec.mutable_durability();
  durability.set_interval_ms(20);
  durability.set_level(options.durability == "fsync"      ? v1::DURABILITY_FSYNC
                       : options.durability == "interval" ? v1::DURABILITY_INTERVAL
                                                          : v1::DURABILITY_NONE);
  return spec;
}

// From -amplitude to amplitude.
float Noise(uint64_t key, float amplitude) {
  return amplitude * (static_cast<float>(Mix64(key) >> 40) / static_cast<float>(1 << 23) - 1.0f);
}

class Training {
 public:
  explicit Training(const Options& options) : options_(options), spec_(SpecOf(options)) {}
  ~Training() {
    if (log_ != nullptr) fclose(log_);
  }

  absl::Status Run() {
    const absl::StatusOr<Job> job = Job::Make(spec_);
    if (!job.ok()) return job.status();
    log_ = fopen(options_.log.c_str(), "a");
    if (log_ == nullptr) return absl::InvalidArgumentError("cannot write --log");
    for (const Tensor& tensor : job->tensors()) {
      parameters_.emplace_back(tensor.elements);
      gradients_.emplace_back(tensor.elements);
      for (uint64_t i = 0; i < tensor.elements; ++i)  // the same on every worker
        parameters_.back()[i] = Noise(HashCombine(parameters_.size(), i), 0.2f);
    }
    if (absl::Status joined = Join(); !joined.ok()) return joined;
    absl::FPrintF(log_, "{\"start_version\": %d, \"resumed\": %s, \"ns\": %d}\n", session_->start_version(),
                  session_->resumed() ? "true" : "false", Now());
    fflush(log_);
    while (session_->version() <= options_.rounds) {
      if (absl::Status stepped = Step(); !stepped.ok()) return stepped;
    }
    std::vector<std::string> digests = session_->ShardDigests();
    absl::FPrintF(
        log_,
        "{\"digest\": \"%s\", \"shard_digests\": [\"%s\"], \"version\": %d, \"ns\": %d, \"not_included\": %d, "
        "\"skipped_rounds\": %d}\n",
        session_->Digest(), absl::StrJoin(digests, "\", \""), session_->version(), Now(),
        session_->stats().not_included_frames, session_->stats().skipped_rounds);
    return session_->Leave();
  }

 private:
  static int64_t Now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  absl::Status Join() {
    SessionOptions options;
    options.servers = options_.servers;
    options.job = spec_;
    options.worker = absl::StrFormat("worker-%d", options_.index);
    for (auto& parameter : parameters_) options.memory.emplace_back(parameter);
    if (std::filesystem::exists(options_.checkpoint)) options.resume.from = options_.checkpoint;
    options.timeouts.round_ms = 120'000;
    options.timeouts.start_ms = 30'000;
    auto session = Session::Join(std::move(options));
    if (!session.ok()) return session.status();
    session_ = *std::move(session);
    return absl::OkStatus();
  }

  // Until the test lets the worker begin the round that follows this version.
  void WaitWhereHeld(uint64_t version) const {
    if (std::find(options_.hold_at.begin(), options_.hold_at.end(), version) == options_.hold_at.end()) return;
    const std::string released = absl::StrFormat("%s-%d-%d", options_.hold, options_.index, version);
    while (!std::filesystem::exists(released)) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }

  absl::Status Step() {
    const uint64_t round = session_->version();
    WaitWhereHeld(round);
    std::vector<const float*> pointers;
    for (size_t t = 0; t < gradients_.size(); ++t) {
      const uint64_t key = HashCombine(HashCombine(round, options_.index), t);
      for (size_t i = 0; i < gradients_[t].size(); ++i)
        gradients_[t][i] = 0.3f * parameters_[t][i] + Noise(HashCombine(key, i), 0.1f);
      pointers.push_back(gradients_[t].data());
    }
    // In a tensor of one run, which lies on one shard.
    if (options_.skips && round % 2 == 0 && round / 2 % options_.workers == options_.index)
      gradients_[2][0] = std::numeric_limits<float>::infinity();
    const std::vector<float> rates = {kLearningRate};
    const absl::Status status = session_->Exchange(pointers, rates);
    if (!status.ok()) return status;
    absl::FPrintF(log_, "{\"version\": %d, \"ns\": %d}\n", session_->version(), Now());
    fflush(log_);
    if (!options_.checkpoint.empty() && session_->version() % options_.checkpoint_every == 0)
      if (absl::Status saved = session_->Save(options_.checkpoint); !saved.ok()) return saved;
    std::this_thread::sleep_for(std::chrono::milliseconds(options_.pause_ms));
    return absl::OkStatus();
  }

  const Options options_;
  const v1::JobSpec spec_;
  FILE* log_ = nullptr;
  std::vector<std::vector<float>> parameters_;
  std::vector<std::vector<float>> gradients_;
  std::unique_ptr<Session> session_;
};

int Main(int argc, char** argv) {
  CLI::App app("A worker of tests/chaos.");
  Options options;
  bool failpoints = false;
  app.add_flag("--failpoints", failpoints, "print the names of all failpoints, and nothing else");
  app.add_option("--servers", options.servers)->delimiter(',');
  app.add_option("--job", options.job);
  app.add_option("--log", options.log);
  app.add_option("--durability", options.durability);
  app.add_option("--checkpoint", options.checkpoint, "written between rounds, and gone on from where it exists");
  app.add_option("--checkpoint-every", options.checkpoint_every, "rounds");
  app.add_option("--index", options.index);
  app.add_option("--workers", options.workers);
  app.add_option("--lease-ms", options.lease_ms);
  app.add_option("--pause-ms", options.pause_ms);
  app.add_option("--quorum", options.quorum);
  app.add_option("--rounds", options.rounds, "train to version rounds + 1 (round 0 calibrates)");
  app.add_option("--hold-at", options.hold_at,
                 "versions at which it waits for the file HOLD-INDEX-VERSION before it goes on")
      ->delimiter(',');
  app.add_option("--hold", options.hold);
  app.add_flag("--large", options.large);
  app.add_option("--codec", options.codec, "of all but small tensors and the head");
  app.add_flag("--skips", options.skips, "skip every other round: a gradient of some worker is not finite");
  app.add_option("--optimizer", options.optimizer)->check(CLI::IsMember({"adamw", "lans"}));
  if (const std::optional<int> status = ParseArguments(app, argc, argv)) return *status;
  if (failpoints) {
    for (std::string_view name : failpoint::kNames) std::printf("%s\n", std::string(name).c_str());
    return 0;
  }
  absl::Status status = failpoint::Arm(EnvironmentVariable(failpoint::kVariable));
  if (status.ok()) status = Training(options).Run();
  if (!status.ok()) std::fprintf(stderr, "worker %u: %s\n", options.index, status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) { return gradwire::Main(argc, argv); }
