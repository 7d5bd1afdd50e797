// Every pair of features of common/job/compatibility.h in a job of its own: all of its tensors learn, and what a
// durable one learnt is there after a restart and after a restore, or it is refused with the words of the table. A pair
// that the table forgets fails here because it does not train.
#include "common/job/compatibility.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/recovery/restore.h"
#include "common/storage/posix_disk.h"
#include "kernels/backend.h"
#include "tests/integration/client/device_backends.h"
#include "tests/integration/client/device_worker.h"
#include "tests/integration/client/train.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire::testing {
namespace {

constexpr Feature At(size_t i) { return static_cast<Feature>(i); }
std::string Named(Feature f) { return std::string(NameOf(f)); }

// A job with what was asked for, and how it is run.
struct Wanted {
  v1::JobSpec spec;
  std::optional<PullMode> pull;
  bool servers_on_gpu = false;
  bool workers_on_gpu = false;
  bool replaces = false;
  bool restores = false;
};

void SetOptimizer(v1::JobSpec* spec, v1::OptimizerKind kind) { spec->mutable_optimizer()->set_kind(kind); }

// A tensor of its own for each codec, so that two of them stand beside each other.
void AddTensor(v1::JobSpec* spec, const std::string& codec) {
  const std::string name = absl::StrCat("tensor.", spec->tensors_size());
  v1::TensorSpec* tensor = spec->add_tensors();
  tensor->set_name(name);
  tensor->add_shape(40);
  tensor->add_shape(30);
  v1::CodecRule* rule = spec->add_rules();
  rule->set_pattern(name);
  rule->set_codec(codec);
}

void Ask(Feature feature, Wanted* wanted) {
  v1::JobSpec* spec = &wanted->spec;
  switch (feature) {
    case Feature::kSync:
      return spec->mutable_rounds()->set_mode(v1::ROUNDS_SYNC);
    case Feature::kQuorum:
      return spec->mutable_rounds()->set_quorum(1);
    case Feature::kBounded:
      spec->mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
      return spec->mutable_rounds()->set_staleness(1);
    case Feature::kAsync:
      return spec->mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
    case Feature::kNoOptimizer:
      return SetOptimizer(spec, v1::OPTIMIZER_NONE);
    case Feature::kSgd:
      return SetOptimizer(spec, v1::OPTIMIZER_SGD);
    case Feature::kMomentum:
      SetOptimizer(spec, v1::OPTIMIZER_SGD);
      return spec->mutable_optimizer()->mutable_groups(0)->set_momentum(0.9f);
    case Feature::kAdamW:
      return SetOptimizer(spec, v1::OPTIMIZER_ADAMW);
    case Feature::kLamb:
      return SetOptimizer(spec, v1::OPTIMIZER_LAMB);
    case Feature::kLans:
      return SetOptimizer(spec, v1::OPTIMIZER_LANS);
    case Feature::kLion:
      return SetOptimizer(spec, v1::OPTIMIZER_LION);
    case Feature::kAddition:
      return SetOptimizer(spec, v1::OPTIMIZER_STEP);
    case Feature::kClipNorm:
      return spec->set_clip_norm(1);
    case Feature::kGradients:
      return spec->set_push(v1::PUSH_GRADIENT);
    case Feature::kSteps:
      return spec->set_push(v1::PUSH_STEP);
    case Feature::kDeltas:
      return spec->set_push(v1::PUSH_DELTA);
    case Feature::kNonFiniteSkip:
      return spec->set_nonfinite(v1::NONFINITE_SKIP);
    case Feature::kDense:
      return AddTensor(spec, "dense:fp32");
    case Feature::kTagc:
      return AddTensor(spec, "tagc:density=0.1");
    case Feature::kQuantizer:
      return AddTensor(spec, "onebit");
    case Feature::kHomomorphic:
      return AddTensor(spec, "uniform:bits=4");
    case Feature::kSparse:
      return AddTensor(spec, "topk:density=0.1");
    case Feature::kDgc:
      return AddTensor(spec, "dgc:density=0.1");
    case Feature::kZen:
      return AddTensor(spec, "zen");
    case Feature::kPowerSgd:
      return AddTensor(spec, "powersgd:rank=1");
    case Feature::kUpdateCodec:
      return spec->set_update_codec("dense:bf16");
    case Feature::kPullUpdates:
      wanted->pull = PullMode::kUpdate;
      return;
    case Feature::kPullParameters:
      wanted->pull = PullMode::kParams;
      return;
    case Feature::kPullMeans:
      wanted->pull = PullMode::kMean;
      return;
    case Feature::kServersOnGpu:
      wanted->servers_on_gpu = true;
      return;
    case Feature::kWorkersOnGpu:
      wanted->workers_on_gpu = true;
      return;
    case Feature::kReplicasOnGpu:
      wanted->workers_on_gpu = true;
      wanted->pull = PullMode::kUpdate;
      return;
    case Feature::kReplaceParameters:
      wanted->replaces = true;
      return;
    case Feature::kDurable:
      return spec->mutable_durability()->set_level(v1::DURABILITY_FSYNC);
    case Feature::kRestore:
      spec->mutable_durability()->set_level(v1::DURABILITY_FSYNC);
      wanted->restores = true;
      return;
  }
}

Wanted Plain(const std::string& name) {
  Wanted wanted;
  wanted.spec.set_name(name);
  wanted.spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  wanted.spec.mutable_optimizer()->add_groups();
  wanted.spec.set_codec("dense:fp32");
  wanted.spec.set_min_workers(1);
  wanted.spec.set_max_workers(1);
  wanted.spec.set_bucket_bytes(4 << 10);
  wanted.spec.set_run_elements(256);
  return wanted;
}

// How a job pulls where nothing was asked for.
PullMode PullOf(const Wanted& wanted) {
  if (wanted.pull) return *wanted.pull;
  if (wanted.spec.optimizer().kind() == v1::OPTIMIZER_NONE) return PullMode::kMean;
  return wanted.spec.rounds().mode() == v1::ROUNDS_ASYNC ? PullMode::kParams : PullMode::kUpdate;
}

// All that the job has, whoever asked for it.
FeatureSet Features(const Wanted& wanted) {
  const v1::JobSpec& spec = wanted.spec;
  FeatureSet features = FeaturesOf(spec);
  for (const v1::CodecRule& rule : spec.rules()) features.Add(FeatureOf(*ParseCodecSpec(rule.codec())));
  if (spec.optimizer().groups(0).momentum() != 0) features.Add(Feature::kMomentum);
  const PullMode pull = PullOf(wanted);
  features.Add(pull == PullMode::kMean     ? Feature::kPullMeans
               : pull == PullMode::kUpdate ? Feature::kPullUpdates
                                           : Feature::kPullParameters);
  if (wanted.servers_on_gpu) features.Add(Feature::kServersOnGpu);
  if (wanted.workers_on_gpu) features.Add(Feature::kWorkersOnGpu);
  if (wanted.workers_on_gpu && pull == PullMode::kUpdate) features.Add(Feature::kReplicasOnGpu);
  if (wanted.replaces) features.Add(Feature::kReplaceParameters);
  if (wanted.restores) features.Add(Feature::kRestore);
  return features;
}

template <typename Trainee>
absl::Status Run(Trainee& worker, const Wanted& wanted) {
  for (uint64_t step = 0; step < 3; ++step) {
    worker.Fill(step);
    GW_RETURN_IF_ERROR(worker.Step(0.01f));
  }
  GW_RETURN_IF_ERROR(worker.session().Drain());
  if (!wanted.replaces) return absl::OkStatus();
  GW_RETURN_IF_ERROR(worker.session().BeginReplacement());
  return worker.session().EndRound();
}

Cluster MakeCluster(const Wanted& wanted, uint32_t shards, const std::string& data_root) {
  return Cluster(shards, "inproc", wanted.servers_on_gpu ? DeviceBackends().front().make : Cluster::MakeBackendFn{},
                 wanted.servers_on_gpu ? uint64_t{64} << 20 : 0, data_root);
}

// Trains the job; the first error of anybody.
absl::Status TrainOn(Cluster& cluster, const Wanted& wanted) {
  GW_RETURN_IF_ERROR(Job::Make(wanted.spec).status());
  if (wanted.workers_on_gpu) {
    DeviceWorker worker(wanted.spec, 0, MakeDevice(DeviceBackends().front()));
    GW_RETURN_IF_ERROR(worker.JoinWith(worker.Options(cluster.addresses(), PullOf(wanted))));
    return Run(worker, wanted);
  }
  Worker worker(wanted.spec, 0);
  GW_RETURN_IF_ERROR(worker.Join(cluster.addresses(), PullOf(wanted)));
  const auto before = worker.parameters();  // of a job that pulls means: what is overwritten by them
  GW_RETURN_IF_ERROR(Run(worker, wanted));
  for (size_t t = 0; t < before.size(); ++t)
    if (worker.parameters()[t] == before[t]) return absl::InternalError(absl::StrCat("tensor ", t, " learnt nothing"));
  return absl::OkStatus();
}

// The parameters that a newcomer is given.
absl::StatusOr<std::string> DigestFor(const Wanted& wanted, Cluster& cluster) {
  Worker worker(wanted.spec, 0);
  for (std::vector<float>& parameter : worker.parameters()) std::fill(parameter.begin(), parameter.end(), 0.0f);
  GW_RETURN_IF_ERROR(worker.Join(
      cluster.addresses(), wanted.spec.rounds().mode() == v1::ROUNDS_ASYNC ? PullMode::kParams : PullMode::kUpdate));
  return worker.session().Digest();
}

// Trains the job. What a durable one learnt is there again where a server begins from its directory, and where two do
// from what was restored onto them.
absl::Status Train(const Wanted& wanted) {
  if (!wanted.spec.has_durability()) {
    Cluster cluster = MakeCluster(wanted, 1, "");
    return TrainOn(cluster, wanted);
  }
  const testing_support::TemporaryFolder root("compatibility");
  const std::string old = root.path() + "/old", moved = root.path() + "/moved";
  std::filesystem::create_directories(old);
  std::filesystem::create_directories(moved);
  const bool parameters = wanted.spec.optimizer().kind() != v1::OPTIMIZER_NONE;
  const std::string& name = wanted.spec.name();
  uint64_t version = 0;
  std::string trained;
  {
    Cluster cluster = MakeCluster(wanted, 1, old);
    GW_RETURN_IF_ERROR(TrainOn(cluster, wanted));
    version = cluster.Describe(0, name).version();
    if (parameters) trained = cluster.ParametersSha256(0, name);
  }
  std::string digest;
  {
    Cluster cluster = MakeCluster(wanted, 1, old);
    if (cluster.Describe(0, name).version() != version) return absl::InternalError("another version after a restart");
    if (parameters && cluster.ParametersSha256(0, name) != trained)
      return absl::InternalError("other parameters after a restart");
    if (parameters && wanted.restores) {
      GW_ASSIGN_OR_RETURN(digest, DigestFor(wanted, cluster));
    }
  }
  if (!wanted.restores) return absl::OkStatus();
  PosixDisk disk;
  GW_ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Backend> backend, kernels::MakeBackend("cpu"));
  RestoreOptions options;
  options.from = {absl::StrCat(old, "/0")};
  options.shards = 2;
  options.write = {0, 1};
  options.to = {absl::StrCat(moved, "/0"), absl::StrCat(moved, "/1")};
  GW_RETURN_IF_ERROR(RestoreJob(disk, options, backend.get()).status());
  Cluster cluster = MakeCluster(wanted, 2, moved);
  for (uint32_t shard = 0; shard < 2; ++shard)
    if (cluster.Describe(shard, name).version() != version)
      return absl::InternalError("another version after a restore");
  if (!parameters) return absl::OkStatus();
  GW_ASSIGN_OR_RETURN(const std::string restored, DigestFor(wanted, cluster));
  return restored == digest ? absl::OkStatus() : absl::InternalError("other parameters after a restore");
}

class Compatibility : public ::testing::TestWithParam<size_t> {};

TEST_P(Compatibility, RunsOrIsRefusedInTheWordsOfTheTable) {
  const Feature one = At(GetParam());
  int trained = 0, refused = 0;
  for (size_t i = 0; i < GetParam(); ++i) {
    const Feature other = At(i);
    SCOPED_TRACE(absl::StrCat(Named(one), " and ", Named(other)));
    Wanted wanted = Plain(absl::StrCat("pair-", GetParam(), "-", i));
    Ask(other, &wanted);
    Ask(one, &wanted);
    if (wanted.spec.tensors_size() == 0) AddTensor(&wanted.spec, "dense:fp32");
    const FeatureSet features = Features(wanted);
    // Of two choices of the same kind only the later is left.
    if (!features.Has(one) || !features.Has(other)) continue;
    std::vector<std::string> words;
    for (const Conflict& conflict : Conflicts())
      if (features.Has(conflict.first) && features.Has(conflict.second))
        words.push_back(std::string(ErrorOf(conflict).message()));
    const absl::Status status = Train(wanted);
    ++(words.empty() ? trained : refused);
    if (words.empty()) {
      EXPECT_TRUE(status.ok()) << status;
      continue;
    }
    EXPECT_FALSE(status.ok()) << "it runs, and the table says: " << words[0];
    EXPECT_TRUE(std::any_of(
        words.begin(), words.end(),
        [&](const std::string& said) { return std::string(status.message()).find(said) != std::string::npos; }))
        << status << "\ndoes not say: " << words[0];
  }
  RecordProperty("trained", trained);
  RecordProperty("refused", refused);
}

std::string NameOfPairs(const ::testing::TestParamInfo<size_t>& info) {
  std::string name = Named(At(info.param));
  std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
  return name;
}
INSTANTIATE_TEST_SUITE_P(Features, Compatibility, ::testing::Range(size_t{1}, kFeatures), NameOfPairs);

TEST(CompatibilityTable, NamesEachPairOnce) {
  const auto conflicts = Conflicts();
  for (size_t i = 0; i < conflicts.size(); ++i) {
    EXPECT_NE(conflicts[i].first, conflicts[i].second);
    EXPECT_FALSE(conflicts[i].reason.empty() || conflicts[i].remedy.empty());
    for (size_t j = 0; j < i; ++j) {
      const FeatureSet pair{conflicts[j].first, conflicts[j].second};
      EXPECT_FALSE(pair.Has(conflicts[i].first) && pair.Has(conflicts[i].second))
          << Named(conflicts[i].first) << " and " << Named(conflicts[i].second);
    }
  }
}

}  // namespace
}  // namespace gradwire::testing
