// See compatibility.h.
#include "common/job/compatibility.h"

#include <algorithm>
#include <array>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace gradwire {
namespace {

struct Named {
  Feature feature;
  std::string_view axis;
  std::string_view name;
};

constexpr std::array<Named, kFeatures> kNames = {{
    {Feature::kSync, "rounds", "rounds.mode sync"},
    {Feature::kQuorum, "rounds", "rounds.quorum"},
    {Feature::kBounded, "rounds", "rounds.mode bounded"},
    {Feature::kAsync, "rounds", "rounds.mode async"},
    {Feature::kNoOptimizer, "optimizer", "optimizer none"},
    {Feature::kSgd, "optimizer", "optimizer sgd"},
    {Feature::kMomentum, "optimizer", "momentum of the optimizer"},
    {Feature::kAdamW, "optimizer", "optimizer adamw"},
    {Feature::kLamb, "optimizer", "optimizer lamb"},
    {Feature::kLans, "optimizer", "optimizer lans"},
    {Feature::kLion, "optimizer", "optimizer lion"},
    {Feature::kAddition, "optimizer", "optimizer step"},
    {Feature::kClipNorm, "optimizer", "clip_norm"},
    {Feature::kGradients, "pushed", "push gradient"},
    {Feature::kSteps, "pushed", "push step"},
    {Feature::kDeltas, "pushed", "push delta"},
    {Feature::kNonFiniteSkip, "pushed", "nonfinite skip"},
    {Feature::kDense, "codec", "codec dense"},
    {Feature::kTagc, "codec", "codec tagc"},
    {Feature::kQuantizer, "codec", "codec fp16 and other quantizers"},
    {Feature::kHomomorphic, "codec", "codec uniform or thc"},
    {Feature::kSparse, "codec", "codec topk, threshold or randomk"},
    {Feature::kDgc, "codec", "codec dgc"},
    {Feature::kZen, "codec", "codec zen or adaptive"},
    {Feature::kPowerSgd, "codec", "codec powersgd"},
    {Feature::kUpdateCodec, "codec", "update_codec"},
    {Feature::kPullUpdates, "pulled", "pull update"},
    {Feature::kPullParameters, "pulled", "pull params"},
    {Feature::kPullMeans, "pulled", "pull mean"},
    {Feature::kServersOnGpu, "place", "a server on a GPU"},
    {Feature::kWorkersOnGpu, "place", "a session on a GPU"},
    {Feature::kReplicasOnGpu, "place", "a replica on a GPU (pull update)"},
    {Feature::kDurable, "durability", "durability interval or fsync"},
    {Feature::kReplaceParameters, "operation", "replacing parameters while it trains"},
    {Feature::kRestore, "operation", "gradwire restore"},
}};

constexpr bool InOrder() {
  for (size_t i = 0; i < kNames.size(); ++i)
    if (kNames[i].feature != static_cast<Feature>(i)) return false;
  return true;
}
static_assert(InOrder());

using F = Feature;

// Reasons and remedies that several pairs share.
constexpr std::string_view kNormsAtOneVersion =
    "its norms are of all tensors at one version, and asynchronous buckets are at versions of their own";
constexpr std::string_view kSyncOrOther = "use rounds.mode sync or bounded, or another optimizer";
constexpr std::string_view kGoneOn = "workers have gone on from a round before all shards know whether it is skipped";
constexpr std::string_view kSyncOrRefuse = "use rounds.mode sync, or nonfinite refuse or sanitize";
constexpr std::string_view kTakesGradients = "it takes gradients or deltas, and a step is preconditioned already";
constexpr std::string_view kGradientOrStep = "use push gradient, or optimizer step";
constexpr std::string_view kOneAfterTheOther = "a step of it takes two rounds, one after the other";
constexpr std::string_view kUseSync = "use rounds.mode sync";
constexpr std::string_view kBesidePowerSgd = "a step takes two rounds, which codecs beside it but dense do not know";
constexpr std::string_view kDenseBeside = "use dense for the other tensors";
constexpr std::string_view kNoStep = "the GPU's steps have no norms yet";
constexpr std::string_view kNotOnServers = "it is not there on a GPU yet";
constexpr std::string_view kServersOnCpu = "start the servers with --backend=cpu";
constexpr std::string_view kNoEncoder = "it has no encoder for the memory of a GPU yet; tagc and dense have one";
constexpr std::string_view kEncodeOnHost = "choose one of these for it, or give the session tensors in host memory";
constexpr std::string_view kPullInstead = "use pull params, or give the session tensors in host memory";
constexpr std::string_view kNewJob = "end this job and begin one of another name with the new parameters";

constexpr Conflict kConflicts[] = {
    // Rounds.
    {F::kQuorum, F::kBounded, false, "bounded rounds wait for every member", "leave one of the two out"},
    {F::kQuorum, F::kAsync, false, "asynchronous rounds wait for nobody", "leave one of the two out"},
    {F::kNoOptimizer, F::kBounded, false,
     "a worker that pulls means would miss those of rounds that are applied together", kUseSync},
    {F::kNoOptimizer, F::kAsync, false, "its workers pull parameters, and without an optimizer the shards have none",
     "use optimizer sgd, adamw or step"},
    {F::kLamb, F::kAsync, false, kNormsAtOneVersion, kSyncOrOther},
    {F::kLans, F::kAsync, false, kNormsAtOneVersion, kSyncOrOther},
    {F::kClipNorm, F::kAsync, false, kNormsAtOneVersion, "use rounds.mode sync or bounded, or leave clip_norm out"},
    {F::kNonFiniteSkip, F::kBounded, false, kGoneOn, kSyncOrRefuse},
    {F::kNonFiniteSkip, F::kAsync, false, kGoneOn, kSyncOrRefuse},
    {F::kPowerSgd, F::kBounded, false, kOneAfterTheOther, kUseSync},
    {F::kPowerSgd, F::kAsync, false, kOneAfterTheOther, kUseSync},
    {F::kUpdateCodec, F::kAsync, false, "no update travels, workers pull parameters", "leave update_codec out"},
    {F::kPullUpdates, F::kAsync, false, "a worker does not see the updates of the others in order",
     "use pull params or params_bf16"},
    // What is pushed, and what the shards do with it.
    {F::kSteps, F::kLamb, false, kTakesGradients, kGradientOrStep},
    {F::kSteps, F::kLans, false, kTakesGradients, kGradientOrStep},
    {F::kSteps, F::kLion, false, kTakesGradients, kGradientOrStep},
    {F::kClipNorm, F::kNoOptimizer, false, "a worker that pulls the mean clips it itself",
     "leave clip_norm out, or let the shards have an optimizer"},
    {F::kClipNorm, F::kSteps, false, "a step is preconditioned before it is pushed",
     "clip its gradient in the training loop, or use push gradient"},
    {F::kNonFiniteSkip, F::kNoOptimizer, false, "a worker that pulls the mean takes the step itself",
     "skip it there, or use nonfinite refuse or sanitize"},
    {F::kNonFiniteSkip, F::kPowerSgd, false, "a step of powersgd takes two rounds, and single ones are skipped",
     "use nonfinite refuse or sanitize, or another codec"},
    // Codecs.
    {F::kDgc, F::kSteps, false, "it corrects the momentum of gradients", "use push gradient, or codec topk"},
    {F::kDgc, F::kDeltas, false, "it corrects the momentum of gradients", "use push gradient, or codec topk"},
    {F::kDgc, F::kMomentum, false, "it has the momentum on the workers",
     "set the optimizer's to 0, and momentum=M in the codec"},
    {F::kPowerSgd, F::kUpdateCodec, false, "its factors travel both ways, so there is nothing to compress",
     "leave update_codec out"},
    {F::kPowerSgd, F::kTagc, false, kBesidePowerSgd, kDenseBeside},
    {F::kPowerSgd, F::kQuantizer, false, kBesidePowerSgd, kDenseBeside},
    {F::kPowerSgd, F::kHomomorphic, false, kBesidePowerSgd, kDenseBeside},
    {F::kPowerSgd, F::kSparse, false, kBesidePowerSgd, kDenseBeside},
    {F::kPowerSgd, F::kDgc, false, kBesidePowerSgd, kDenseBeside},
    {F::kPowerSgd, F::kZen, false, kBesidePowerSgd, kDenseBeside},
    // What workers pull.
    {F::kPullMeans, F::kSgd, false, "the shards step the parameters", "use pull update, or optimizer none"},
    {F::kPullMeans, F::kAdamW, false, "the shards step the parameters", "use pull update, or optimizer none"},
    {F::kPullMeans, F::kLamb, false, "the shards step the parameters", "use pull update, or optimizer none"},
    {F::kPullMeans, F::kLans, false, "the shards step the parameters", "use pull update, or optimizer none"},
    {F::kPullMeans, F::kLion, false, "the shards step the parameters", "use pull update, or optimizer none"},
    {F::kPullMeans, F::kAddition, false, "the shards step the parameters", "use pull update, or optimizer none"},
    {F::kPullUpdates, F::kNoOptimizer, false, "the job keeps no parameters", "use pull mean"},
    {F::kPullParameters, F::kNoOptimizer, false, "the job keeps no parameters", "use pull mean"},
    // Where it lies.
    {F::kServersOnGpu, F::kBounded, true, kNotOnServers, kServersOnCpu},
    {F::kServersOnGpu, F::kPowerSgd, true, kNotOnServers, kServersOnCpu},
    {F::kServersOnGpu, F::kLamb, true, kNotOnServers, kServersOnCpu},
    {F::kServersOnGpu, F::kLans, true, kNotOnServers, kServersOnCpu},
    {F::kServersOnGpu, F::kLion, true, kNotOnServers, kServersOnCpu},
    {F::kServersOnGpu, F::kClipNorm, true, kNotOnServers, kServersOnCpu},
    {F::kServersOnGpu, F::kNonFiniteSkip, true, kNotOnServers, kServersOnCpu},
    {F::kServersOnGpu, F::kReplaceParameters, true, kNotOnServers, kServersOnCpu},
    {F::kWorkersOnGpu, F::kQuantizer, true, kNoEncoder, kEncodeOnHost},
    {F::kWorkersOnGpu, F::kHomomorphic, true, kNoEncoder, kEncodeOnHost},
    {F::kWorkersOnGpu, F::kSparse, true, kNoEncoder, kEncodeOnHost},
    {F::kWorkersOnGpu, F::kDgc, true, kNoEncoder, kEncodeOnHost},
    {F::kWorkersOnGpu, F::kZen, true, kNoEncoder, kEncodeOnHost},
    {F::kWorkersOnGpu, F::kPowerSgd, true, kNoEncoder, kEncodeOnHost},
    {F::kWorkersOnGpu, F::kReplaceParameters, true, "parameters in its memory cannot be replaced yet",
     "give the session tensors in host memory"},
    {F::kReplicasOnGpu, F::kLamb, true, kNoStep, kPullInstead},
    {F::kReplicasOnGpu, F::kLans, true, kNoStep, kPullInstead},
    {F::kReplicasOnGpu, F::kClipNorm, true, kNoStep, kPullInstead},
    {F::kReplicasOnGpu, F::kLion, true, "the GPU has no step of it yet", kPullInstead},
    // What is done with it.
    {F::kReplaceParameters, F::kNoOptimizer, false, "the job keeps no parameters, each worker has its own",
     "write them on each worker"},
    {F::kReplaceParameters, F::kQuorum, true, "rounds go on without workers that are late", kNewJob},
    {F::kReplaceParameters, F::kBounded, true, "workers are at different versions", kNewJob},
    {F::kReplaceParameters, F::kAsync, true, "workers are at different versions", kNewJob},
    {F::kReplaceParameters, F::kPowerSgd, true, "a step of powersgd takes two rounds", kNewJob},
    {F::kRestore, F::kAsync, true, "its shards and buckets have no version in common",
     "start a server on its own data directory, or on a copy of that"},
};

}  // namespace

std::string_view AxisOf(Feature feature) { return kNames[static_cast<size_t>(feature)].axis; }
std::string_view NameOf(Feature feature) { return kNames[static_cast<size_t>(feature)].name; }
std::span<const Conflict> Conflicts() { return kConflicts; }

FeatureSet FeaturesOf(const v1::JobSpec& spec) {
  FeatureSet features;
  const v1::RoundsSpec& rounds = spec.rounds();
  if (rounds.mode() == v1::ROUNDS_ASYNC) {
    features.Add(F::kAsync);
  } else {
    features.Add(rounds.mode() == v1::ROUNDS_BOUNDED ? F::kBounded : F::kSync);
  }
  if (rounds.quorum() != 0) features.Add(F::kQuorum);
  switch (spec.optimizer().kind()) {
    case v1::OPTIMIZER_NONE:
      features.Add(F::kNoOptimizer);
      break;
    case v1::OPTIMIZER_SGD:
      features.Add(F::kSgd);
      break;
    case v1::OPTIMIZER_ADAMW:
      features.Add(F::kAdamW);
      break;
    case v1::OPTIMIZER_STEP:
      features.Add(F::kAddition);
      break;
    case v1::OPTIMIZER_LAMB:
      features.Add(F::kLamb);
      break;
    case v1::OPTIMIZER_LANS:
      features.Add(F::kLans);
      break;
    case v1::OPTIMIZER_LION:
      features.Add(F::kLion);
      break;
    default:
      break;
  }
  if (spec.clip_norm() != 0) features.Add(F::kClipNorm);
  switch (spec.push()) {
    case v1::PUSH_STEP:
      features.Add(F::kSteps);
      break;
    case v1::PUSH_DELTA:
      features.Add(F::kDeltas);
      break;
    default:
      features.Add(F::kGradients);
      break;
  }
  if (spec.nonfinite() == v1::NONFINITE_SKIP) features.Add(F::kNonFiniteSkip);
  const auto& rules = spec.rules();
  if (!spec.update_codec().empty() ||
      std::any_of(rules.begin(), rules.end(), [](const auto& rule) { return !rule.update_codec().empty(); })) {
    features.Add(F::kUpdateCodec);
  }
  if (spec.has_durability()) features.Add(F::kDurable);
  return features;
}

Feature FeatureOf(const CodecSpec& codec) {
  struct Visitor {
    Feature operator()(const DenseSpec&) const { return F::kDense; }
    Feature operator()(const TagcSpec&) const { return F::kTagc; }
    Feature operator()(const QuantizedSpec&) const { return F::kQuantizer; }
    Feature operator()(const HomomorphicSpec&) const { return F::kHomomorphic; }
    Feature operator()(const PowerSgdSpec&) const { return F::kPowerSgd; }
    Feature operator()(const SparseSpec& sparse) const {
      using Choice = SparseSpec::Choice;
      if (sparse.choice == Choice::kDgc) return F::kDgc;
      return sparse.choice == Choice::kNonZero || sparse.choice == Choice::kAdaptive ? F::kZen : F::kSparse;
    }
  };
  return std::visit(Visitor{}, codec);
}

absl::Status ErrorOf(const Conflict& conflict) {
  const std::string text =
      absl::StrFormat("%s does not go with %s: %s; %s", std::string(NameOf(conflict.first)),
                      std::string(NameOf(conflict.second)), std::string(conflict.reason), std::string(conflict.remedy));
  return conflict.not_yet ? absl::UnimplementedError(text) : absl::InvalidArgumentError(text);
}

absl::Status CheckTogether(const FeatureSet& features) {
  for (const Conflict& conflict : kConflicts)
    if (features.Has(conflict.first) && features.Has(conflict.second)) return ErrorOf(conflict);
  return absl::OkStatus();
}

std::string CompatibilityPage() {
  std::string page =
      "# What goes with what\n\n"
      "Made by `gradwire features` from the table in `compatibility.cc`, which refusals are made from, too. What is "
      "not named\n"
      "here goes together: `tests/integration/client/compatibility_test.cc` runs every pair.\n\n"
      "| | does not go with | because | instead |\n| --- | --- | --- | --- |\n";
  for (const Conflict& conflict : kConflicts) {
    absl::StrAppend(&page, "| ", std::string(NameOf(conflict.first)), " | ", std::string(NameOf(conflict.second)),
                    " | ", std::string(conflict.reason), " | ", std::string(conflict.remedy), " |\n");
  }
  std::string_view axis;
  absl::StrAppend(&page, "\nFeatures that jobs have, by axis:");
  for (const Named& named : kNames) {
    const bool first = named.axis != axis;
    absl::StrAppend(&page, first ? "\n- " + std::string(named.axis) + ": " : ", ", std::string(named.name));
    axis = named.axis;
  }
  absl::StrAppend(&page, ".\n");
  return page;
}

}  // namespace gradwire
