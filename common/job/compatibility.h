// What of a job goes with what: one table of the pairs of features that do not go together, each with its reason and
// what to do instead. Refusals by job specs, sessions and servers, `gradwire layout` and COMPATIBILITY.md are made from
// it; a test walks all pairs (tests/integration/client/compatibility_test.cc).
//
// To add a feature: a value here, its name in the table of compatibility.cc, how a job has it (FeaturesOf), and its
// pairs.
#pragma once

#include <bitset>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "common/job/codec_spec.h"
#include "gradwire/v1/job.pb.h"

namespace gradwire {

// In the order of their axes. What a job does not ask for (no quorum, sanitized gradients) is no feature.
enum class Feature : uint8_t {
  // Rounds.
  kSync,
  kQuorum,
  kBounded,
  kAsync,
  // The optimizer on the shards.
  kNoOptimizer,
  kSgd,
  kMomentum,
  kAdamW,
  kLamb,
  kLans,
  kLion,
  kAddition,
  kClipNorm,
  // What is pushed.
  kGradients,
  kSteps,
  kDeltas,
  kNonFiniteSkip,
  // The codecs of its tensors.
  kDense,
  kTagc,
  kQuantizer,
  kHomomorphic,
  kSparse,
  kDgc,
  kZen,
  kPowerSgd,
  kUpdateCodec,
  // What workers pull.
  kPullUpdates,
  kPullParameters,
  kPullMeans,
  // Where it lies.
  kServersOnGpu,
  kWorkersOnGpu,
  kReplicasOnGpu,
  // What a server keeps on disk.
  kDurable,
  // What is done with it.
  kReplaceParameters,
  kRestore,
};
inline constexpr size_t kFeatures = static_cast<size_t>(Feature::kRestore) + 1;

class FeatureSet {
 public:
  FeatureSet() = default;
  FeatureSet(std::initializer_list<Feature> features) {
    for (Feature f : features) Add(f);
  }
  void Add(Feature f) { bits_.set(static_cast<size_t>(f)); }
  bool Has(Feature f) const { return bits_.test(static_cast<size_t>(f)); }
  FeatureSet With(const FeatureSet& others) const {
    FeatureSet all = *this;
    all.bits_ |= others.bits_;
    return all;
  }

 private:
  std::bitset<kFeatures> bits_;
};

// One word for the group that a feature belongs to, and how users write the feature.
std::string_view AxisOf(Feature feature);
std::string_view NameOf(Feature feature);

// Two features that one job cannot have.
struct Conflict {
  Feature first;
  Feature second;
  bool not_yet = false;  // nothing but our work stands against it
  std::string_view reason;
  std::string_view remedy;
};
std::span<const Conflict> Conflicts();

// Of a spec whose defaults are filled in. Its tensors' codecs are not among them, nor is the momentum of a group of its
// optimizer, which is a feature of the tensors in that group.
FeatureSet FeaturesOf(const v1::JobSpec& spec);
Feature FeatureOf(const CodecSpec& codec);

// "A does not go with B: reason; remedy". InvalidArgument, or Unimplemented where a pair is not there yet: the first
// pair of the table that is among `features`. OK: they go together.
absl::Status CheckTogether(const FeatureSet& features);
absl::Status ErrorOf(const Conflict& conflict);
// The same of what is asked of a job: "job 'lm': ...".
class Job;
absl::Status CheckGoesWith(const Job& job, Feature asked);

// The table as a page in Markdown (common/job/COMPATIBILITY.md).
std::string CompatibilityPage();

}  // namespace gradwire
