// Validation of job specs: bounds, defaults, roles, and the codec of each tensor.
#include "common/job/job.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/hash.h"
#include "common/base/names.h"
#include "common/base/status_macros.h"
#include "common/job/compatibility.h"
#include "common/job/glob.h"
#include "common/job/matrix_shape.h"
#include "common/job/table_runs.h"
#include "common/job/update_codec.h"
#include "common/wire/frame.h"

namespace gradwire {
namespace {

constexpr size_t kMaxTensors = 1'000'000;
constexpr uint32_t kMaxCodecs = 256;  // different ones of one job
constexpr uint64_t kMaxElements = uint64_t{1} << 40;
constexpr int kMaxGroups = 64;
constexpr int kMaxRules = 1024;
constexpr size_t kMaxTensorNameBytes = 255;
constexpr size_t kMaxCodecBytes = 1024;
constexpr uint32_t kMaxWorkers = 1u << 14;
constexpr uint32_t kMaxStaleness = 16;
constexpr uint64_t kMaxBucketBytes = uint64_t{1} << 30;
// Exponents, a byte for each run of a bucket, are one segment of one chunk.
constexpr uint64_t kMaxExponents = wire::kMaxChunkBytes - wire::kHeaderBytes - wire::kSegmentHeaderBytes - 8;
// Versions that a frame may be behind with asynchronous rounds; the default grows with max_workers.
constexpr uint32_t kAsyncStalenessPerWorker = 8;
constexpr uint32_t kLeastAsyncStaleness = 32;
constexpr uint32_t kMaxAsyncStaleness = 256;

// Text of a spec that is quoted in errors, logs and status.
absl::Status CheckText(const char* what, std::string_view text, size_t most) {
  if (text.size() <= most && IsPlainText(text)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s '%s' has %d bytes; it must be at most %d of UTF-8 without control characters", what,
                      Printable(text), text.size(), most));
}

absl::Status CheckTexts(const v1::JobSpec& spec) {
  if (spec.rules_size() > kMaxRules) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the job has %d codec rules; at most %d are allowed", spec.rules_size(), kMaxRules));
  }
  GW_RETURN_IF_ERROR(CheckText("codec", spec.codec(), kMaxCodecBytes));
  GW_RETURN_IF_ERROR(CheckText("update_codec", spec.update_codec(), kMaxCodecBytes));
  for (const v1::CodecRule& rule : spec.rules()) {
    GW_RETURN_IF_ERROR(CheckText("the pattern of a codec rule", rule.pattern(), kMaxTensorNameBytes));
    GW_RETURN_IF_ERROR(CheckText("codec", rule.codec(), kMaxCodecBytes));
    GW_RETURN_IF_ERROR(CheckText("update_codec", rule.update_codec(), kMaxCodecBytes));
  }
  return absl::OkStatus();
}

absl::Status CheckHyper(const char* field, int group, float value, double low, double high) {
  if (std::isfinite(value) && value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("optimizer group %d: %s = %g must lie in [%g, %g]", group, field, value, low, high));
}

bool IsLayerwise(v1::OptimizerKind kind) { return kind == v1::OPTIMIZER_LAMB || kind == v1::OPTIMIZER_LANS; }

absl::Status FillOptimizer(v1::JobSpec* spec) {
  auto* optimizer = spec->mutable_optimizer();
  if (optimizer->kind() == v1::OPTIMIZER_UNSPECIFIED) {
    return absl::InvalidArgumentError("optimizer.kind is not set; use NONE, SGD, ADAMW, LAMB, LANS, LION or STEP");
  }
  if (!v1::OptimizerKind_IsValid(optimizer->kind())) return absl::InvalidArgumentError("optimizer.kind is unknown");
  if (optimizer->groups_size() == 0) optimizer->add_groups();
  if (optimizer->groups_size() > kMaxGroups) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d optimizer groups; at most %d are allowed", optimizer->groups_size(), kMaxGroups));
  }
  for (int i = 0; i < optimizer->groups_size(); ++i) {
    auto* g = optimizer->mutable_groups(i);
    const bool layerwise = IsLayerwise(optimizer->kind());
    const bool lion = optimizer->kind() == v1::OPTIMIZER_LION;
    if (optimizer->kind() == v1::OPTIMIZER_ADAMW || layerwise || lion) {
      if (g->beta1() == 0) g->set_beta1(0.9f);
      if (g->beta2() == 0) g->set_beta2(lion ? 0.99f : 0.999f);
      if (g->epsilon() == 0 && !lion) g->set_epsilon(layerwise ? 1e-6f : 1e-8f);
    }
    GW_RETURN_IF_ERROR(CheckHyper("weight_decay", i, g->weight_decay(), 0, 1e3));
    GW_RETURN_IF_ERROR(CheckHyper("momentum", i, g->momentum(), 0, 0.99999));
    GW_RETURN_IF_ERROR(CheckHyper("beta1", i, g->beta1(), 0, 0.99999));
    GW_RETURN_IF_ERROR(CheckHyper("beta2", i, g->beta2(), 0, 0.999999));
    GW_RETURN_IF_ERROR(CheckHyper("epsilon", i, g->epsilon(), layerwise ? 1e-12 : 0, 1));
    if (g->nesterov() && g->momentum() == 0) {
      return absl::InvalidArgumentError(absl::StrFormat("optimizer group %d: Nesterov needs a momentum above 0", i));
    }
  }
  return absl::OkStatus();
}

absl::Status FillDurability(v1::JobSpec* spec) {
  v1::DurabilitySpec* durability = spec->mutable_durability();
  if (!v1::DurabilityLevel_IsValid(durability->level()))
    return absl::InvalidArgumentError("durability.level is unknown");
  if (!v1::DiskFailurePolicy_IsValid(durability->on_failure())) {
    return absl::InvalidArgumentError("durability.on_failure is unknown");
  }
  if (durability->level() == v1::DURABILITY_UNSPECIFIED || durability->level() == v1::DURABILITY_NONE) {
    spec->clear_durability();
    return absl::OkStatus();
  }
  if (durability->on_failure() == v1::DISK_FAILURE_UNSPECIFIED) durability->set_on_failure(v1::DISK_FAILURE_WAIT);
  if (durability->level() != v1::DURABILITY_INTERVAL) durability->clear_interval_ms();
  if (durability->level() == v1::DURABILITY_INTERVAL && durability->interval_ms() == 0)
    durability->set_interval_ms(1000);
  if (durability->interval_ms() > 600'000) {
    return absl::InvalidArgumentError(
        absl::StrFormat("durability.interval_ms = %d must lie in [1, 600000]", durability->interval_ms()));
  }
  return absl::OkStatus();
}

absl::Status FillAsync(v1::JobSpec* spec) {
  v1::RoundsSpec* rounds = spec->mutable_rounds();
  if (rounds->deviations() != 0) {
    return absl::InvalidArgumentError("rounds.deviations is for rounds with a quorum only");
  }
  if (rounds->staleness() == 0) {
    rounds->set_staleness(
        std::clamp(kAsyncStalenessPerWorker * spec->max_workers(), kLeastAsyncStaleness, kMaxAsyncStaleness));
  }
  if (rounds->staleness() > kMaxAsyncStaleness) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rounds.staleness = %d must lie in [1, %d] with rounds.mode async", rounds->staleness(), kMaxAsyncStaleness));
  }
  return absl::OkStatus();
}

absl::Status FillRounds(v1::JobSpec* spec) {
  v1::RoundsSpec* rounds = spec->mutable_rounds();
  if (!v1::RoundMode_IsValid(rounds->mode())) return absl::InvalidArgumentError("rounds.mode is unknown");
  if (rounds->mode() == v1::ROUNDS_UNSPECIFIED) rounds->set_mode(v1::ROUNDS_SYNC);
  if (rounds->mode() == v1::ROUNDS_ASYNC) return FillAsync(spec);
  const bool bounded = rounds->mode() == v1::ROUNDS_BOUNDED;
  if (bounded && (rounds->staleness() < 1 || rounds->staleness() > kMaxStaleness)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rounds.staleness = %d must lie in [1, %d]", rounds->staleness(), kMaxStaleness));
  }
  if (!bounded && rounds->staleness() != 0) {
    return absl::InvalidArgumentError("rounds.staleness is for rounds.mode bounded only");
  }
  if (rounds->quorum() > spec->max_workers()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rounds.quorum = %d is above max_workers = %d", rounds->quorum(), spec->max_workers()));
  }
  if (rounds->quorum() != 0 && rounds->deviations() == 0) rounds->set_deviations(6);
  if (rounds->quorum() == 0 && rounds->deviations() != 0) {
    return absl::InvalidArgumentError("rounds.deviations is for rounds with a quorum only");
  }
  GW_RETURN_IF_ERROR(CheckHyper("rounds.deviations", 0, rounds->deviations(), 0, 1000));
  if (!bounded && rounds->quorum() == 0) spec->clear_rounds();
  return absl::OkStatus();
}

absl::Status FillScalars(v1::JobSpec* spec) {
  if (!IsName(spec->name())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job name '%s' must be 1 to %d of [A-Za-z0-9._-]", Printable(spec->name()), kMaxNameBytes));
  }
  if (spec->push() == v1::PUSH_UNSPECIFIED) spec->set_push(v1::PUSH_GRADIENT);
  if (!v1::PushKind_IsValid(spec->push())) return absl::InvalidArgumentError("push is unknown");
  auto* step = spec->mutable_step();
  if (step->beta2() == 0) step->set_beta2(0.999f);
  if (step->epsilon() == 0) step->set_epsilon(1e-8f);
  if (step->residual_decay() == 0) step->set_residual_decay(1);
  GW_RETURN_IF_ERROR(CheckHyper("step.residual_decay", 0, step->residual_decay(), 0, 1));
  GW_RETURN_IF_ERROR(CheckHyper("step.beta2", 0, step->beta2(), 0, 0.999999));
  GW_RETURN_IF_ERROR(CheckHyper("step.epsilon", 0, step->epsilon(), 0, 1));
  if (spec->codec().empty()) spec->set_codec("dense:fp32");
  if (spec->nonfinite() == v1::NONFINITE_UNSPECIFIED) spec->set_nonfinite(v1::NONFINITE_REFUSE);
  if (!v1::NonFinitePolicy_IsValid(spec->nonfinite())) return absl::InvalidArgumentError("nonfinite is unknown");
  GW_RETURN_IF_ERROR(CheckHyper("clip_norm", 0, spec->clip_norm(), 0, 1e30));
  if (spec->min_workers() == 0) spec->set_min_workers(1);
  if (spec->max_workers() == 0) spec->set_max_workers(spec->min_workers());
  if (spec->max_workers() < spec->min_workers() || spec->max_workers() > kMaxWorkers) {
    return absl::InvalidArgumentError(absl::StrFormat("max_workers = %d must lie in [min_workers = %d, %d]",
                                                      spec->max_workers(), spec->min_workers(), kMaxWorkers));
  }
  if (spec->lease_ms() == 0) spec->set_lease_ms(10'000);
  if (spec->lease_ms() < 100 || spec->lease_ms() > 86'400'000) {
    return absl::InvalidArgumentError(absl::StrFormat("lease_ms = %d must lie in [100, 86400000]", spec->lease_ms()));
  }
  if (spec->run_elements() == 0) spec->set_run_elements(4096);
  if (!std::has_single_bit(spec->run_elements()) || spec->run_elements() < 64 || spec->run_elements() > 65536) {
    return absl::InvalidArgumentError(
        absl::StrFormat("run_elements = %d must be a power of two from 64 to 65536", spec->run_elements()));
  }
  if (spec->slice_bytes() > kMaxBucketBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("slice_bytes = %d must lie in [0, %d]", spec->slice_bytes(), kMaxBucketBytes));
  }
  for (const auto& [name, bytes] :
       {std::pair{"bucket_bytes", spec->bucket_bytes()}, {"table_bucket_bytes", spec->table_bucket_bytes()}}) {
    if (bytes == 0 || (bytes >= spec->run_elements() * 4 && bytes <= kMaxBucketBytes)) continue;  // 0: FillBuckets
    return absl::InvalidArgumentError(absl::StrFormat("%s = %d must lie in [%d (one run), %d]", name, bytes,
                                                      spec->run_elements() * 4, kMaxBucketBytes));
  }
  return absl::OkStatus();
}

// What a round takes on a slow link beyond its bytes is the way back of one bucket: nothing of that comes before all of
// it was pushed. So where all elements travel, buckets are a small part of the model. Buckets of sparse codecs are a
// hundredth of their size on the wire, and each of many shards has a large slice of few of them: not the whole, which
// would have all workers send to one shard at a time. Those of large tables, of which a batch touches few rows, have
// next to nothing but frames' headers; what is hot in them is spread over the shards. A job that says bucket_bytes, and
// nothing else, has buckets of one size, and its runs dealt one by one, as before there was anything else.
// `codec`: the job's. `rest`: elements that are no tables'.
void FillBuckets(v1::JobSpec* spec, const CodecSpec& codec, uint64_t rest, uint64_t tables) {
  if (spec->bucket_bytes() != 0) return;
  constexpr uint64_t kMostOfTables = 64u << 20, kMost = 4u << 20, kLeast = 512u << 10, kOfShard = 1u << 20;
  constexpr uint64_t kParts = 32, kPartsOfTables = 16;
  const auto part = [run_bytes = spec->run_elements() * sizeof(float)](uint64_t elements, uint64_t parts) {
    return (elements * sizeof(float) / parts + run_bytes - 1) / run_bytes * run_bytes;
  };
  if (tables != 0 && spec->table_bucket_bytes() == 0)
    spec->set_table_bucket_bytes(std::clamp(part(tables, kPartsOfTables), kMost, kMostOfTables));
  spec->set_bucket_bytes(AllTravel(codec) ? std::clamp(part(rest, kParts), kLeast, kMost) : kMost);
  if (spec->slice_bytes() == 0 && !AllTravel(codec) && rest >= tables) spec->set_slice_bytes(kOfShard);
}

absl::StatusOr<Tensor> MakeTensor(const v1::JobSpec& spec, int index) {
  const v1::TensorSpec& in = spec.tensors(index);
  Tensor out;
  out.name = in.name();
  if (out.name.empty() || out.name.size() > kMaxTensorNameBytes || !IsPlainText(out.name)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "tensor %d: its name '%s' has %d bytes; 1 to %d of UTF-8 without control characters are allowed", index,
        Printable(out.name), out.name.size(), kMaxTensorNameBytes));
  }
  if (in.dtype() != v1::DTYPE_UNSPECIFIED && in.dtype() != v1::DTYPE_FLOAT32) {
    return absl::InvalidArgumentError(
        absl::StrFormat("tensor '%s': dtype %d is not supported; parameters are float32", out.name, in.dtype()));
  }
  out.elements = 1;
  for (uint64_t d : in.shape()) {
    if (d != 0 && out.elements > kMaxElements / d) {
      return absl::InvalidArgumentError(absl::StrFormat("tensor '%s': more than 2^40 elements", out.name));
    }
    out.elements *= d;
    out.shape.push_back(d);
  }
  if (in.group() >= static_cast<uint32_t>(spec.optimizer().groups_size())) {
    return absl::InvalidArgumentError(absl::StrFormat("tensor '%s': group %d, but the optimizer has %d groups",
                                                      out.name, in.group(), spec.optimizer().groups_size()));
  }
  out.group = in.group();
  out.role = in.role() == v1::ROLE_UNSPECIFIED ? GuessRole(out.name, out.shape) : in.role();
  return out;
}

// Which rule a tensor follows: the first one that matches. What all tensors of a job may cost together is bounded, as a
// spec of a few hundred kilobytes can ask for hours: the work is counted, so every party comes to the same verdict.
class RuleFinder {
 public:
  explicit RuleFinder(const v1::JobSpec& spec) : spec_(spec) {}

  // rules_size(): none matches. InvalidArgument: too much work.
  absl::StatusOr<int> Find(const Tensor& tensor) {
    for (int r = 0; r < spec_.rules_size(); ++r) {
      const v1::CodecRule& rule = spec_.rules(r);
      const uint64_t roles = static_cast<uint64_t>(rule.roles_size());
      std::optional<bool> matches = true;
      if (steps_left_ <= roles) return TooMuch();
      steps_left_ -= 1 + roles;
      if (!rule.pattern().empty()) matches = GlobMatchWithin(rule.pattern(), tensor.name, &steps_left_);
      if (!matches) return TooMuch();
      if (*matches && Takes(rule, tensor)) return r;
    }
    return spec_.rules_size();
  }

 private:
  static constexpr uint64_t kMaxSteps = uint64_t{1} << 28;  // about half a second

  static bool Takes(const v1::CodecRule& rule, const Tensor& tensor) {
    if (rule.max_elements() != 0 && tensor.elements > rule.max_elements()) return false;
    if (rule.roles().empty()) return true;
    return std::any_of(rule.roles().begin(), rule.roles().end(), [&](int role) { return role == tensor.role; });
  }
  absl::Status TooMuch() const {
    return absl::InvalidArgumentError(absl::StrFormat(
        "job '%s': matching %d rules with the names of %d tensors takes more than %d comparisons: use fewer rules, or "
        "patterns with fewer stars",
        spec_.name(), spec_.rules_size(), spec_.tensors_size(), kMaxSteps));
  }

  const v1::JobSpec& spec_;
  uint64_t steps_left_ = kMaxSteps;
};

// What a tensor's codec asks of the job and of the group that the tensor is in.
absl::Status CheckTensorCodec(const v1::JobSpec& spec, const Tensor& tensor, const CodecSpec& codec) {
  FeatureSet features{FeatureOf(codec)};
  if (spec.push() == v1::PUSH_STEP) features.Add(Feature::kSteps);
  if (spec.push() == v1::PUSH_DELTA) features.Add(Feature::kDeltas);
  if (spec.optimizer().groups(static_cast<int>(tensor.group)).momentum() != 0) features.Add(Feature::kMomentum);
  const absl::Status together = CheckTogether(features);
  if (together.ok()) return together;
  return absl::Status(together.code(),
                      absl::StrFormat("tensor '%s': %s", tensor.name, std::string(together.message())));
}

// What PowerSGD makes nothing smaller of travels as it is.
absl::Status FillPowerSgd(const Tensor& tensor, CodecSpec* codec) {
  const auto* spec = std::get_if<PowerSgdSpec>(codec);
  if (spec == nullptr) return absl::OkStatus();
  if (!powersgd::MatrixShapeOf(tensor.shape, spec->rank)) {
    *codec = DenseSpec{};
    return absl::OkStatus();
  }
  if (tensor.elements <= kMaxBucketBytes / 4) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "tensor '%s': codec powersgd keeps a tensor of %d elements on one shard as a whole, and takes at most "
      "%d; give it another codec by a rule",
      tensor.name, tensor.elements, kMaxBucketBytes / 4));
}

bool HasExponents(const CodecSpec& codec) {
  const auto* const dense = std::get_if<DenseSpec>(&codec);
  return (dense != nullptr && dense->fixed()) || std::holds_alternative<TagcSpec>(codec) ||
         std::holds_alternative<HomomorphicSpec>(codec);
}

// However runs are dealt to shards: one may have all those of a bucket.
absl::Status CheckExponents(const Job& job) {
  const uint64_t run_elements = job.spec().run_elements();
  std::vector<uint64_t> all(job.codecs().size());
  std::vector<uint64_t> most;  // in a bucket: every tensor may end with a shorter one
  for (uint32_t c = 0; c < job.codecs().size(); ++c) most.push_back(job.bucket_elements(c) / run_elements);
  for (const Tensor& tensor : job.tensors()) {
    all[tensor.codec] += (tensor.elements + run_elements - 1) / run_elements;
    ++most[tensor.codec];
  }
  for (size_t c = 0; c < all.size(); ++c) {
    const uint64_t runs = std::min(all[c], most[c]);
    if (!HasExponents(job.codecs()[c]) || runs <= kMaxExponents) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "job '%s': a bucket of bucket_bytes = %d may have %d runs of run_elements = %d; codec '%s' sends an exponent "
        "for each, and frames take %d of them: set smaller bucket_bytes or larger run_elements",
        job.spec().name(), job.spec().bucket_bytes(), runs, run_elements, ToString(job.codecs()[c]), kMaxExponents));
  }
  return absl::OkStatus();
}

// How tensors travel: to the shards, and back.
using Codecs = std::pair<CodecSpec, std::optional<CodecSpec>>;

// Also makes the specs canonical. `from`: a JobSpec or one of its rules.
template <typename Spec>
absl::StatusOr<Codecs> ParseCodecs(Spec* from) {
  Codecs codecs;
  GW_ASSIGN_OR_RETURN(codecs.first, ParseCodecSpec(from->codec()));
  GW_RETURN_IF_ERROR(CheckPushCodec(codecs.first));
  from->set_codec(ToString(codecs.first));
  if (from->update_codec().empty()) return codecs;
  GW_ASSIGN_OR_RETURN(codecs.second, ParseCodecSpec(from->update_codec()));
  GW_RETURN_IF_ERROR(CheckUpdateCodec(*codecs.second));
  from->set_update_codec(ToString(*codecs.second));
  return codecs;
}

}  // namespace

uint32_t Job::run_elements(uint32_t codec) const {
  const auto* sparse = std::get_if<SparseSpec>(&codecs_[codec]);
  const bool shorter = sparse != nullptr && sparse->run_elements != 0;
  return shorter ? std::min(sparse->run_elements, spec_.run_elements()) : spec_.run_elements();
}

uint64_t Job::bucket_elements(uint32_t codec) const {
  const bool own = spec_.table_bucket_bytes() != 0 && IsZen(codecs_[codec]);
  const uint64_t bytes = own ? spec_.table_bucket_bytes() : spec_.bucket_bytes(), run = spec_.run_elements();
  return std::max(run, bytes / sizeof(float) / run * run);
}

absl::Status Job::CheckGoesWith(const FeatureSet& asked) const {
  const absl::Status together = CheckTogether(features_.With(asked));
  if (together.ok()) return together;
  return absl::Status(together.code(), absl::StrFormat("job '%s': %s", spec_.name(), std::string(together.message())));
}

absl::StatusOr<Job> Job::Make(const v1::JobSpec& spec) {
  Job job;
  GW_RETURN_IF_ERROR(CheckTexts(spec));
  job.spec_ = WithTableRuns(spec);
  GW_RETURN_IF_ERROR(FillOptimizer(&job.spec_));
  GW_RETURN_IF_ERROR(FillScalars(&job.spec_));
  GW_RETURN_IF_ERROR(FillDurability(&job.spec_));
  GW_RETURN_IF_ERROR(FillRounds(&job.spec_));
  job.features_ = FeaturesOf(job.spec_);
  GW_RETURN_IF_ERROR(CheckTogether(job.features_));
  if (spec.tensors_size() == 0 || static_cast<size_t>(spec.tensors_size()) > kMaxTensors) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job '%s' has %d tensors; 1 to %d are allowed", spec.name(), spec.tensors_size(), kMaxTensors));
  }
  const auto codec_index = [&job](const Codecs& codecs) -> absl::StatusOr<uint32_t> {
    uint32_t index = 0;
    while (index < job.codecs_.size() &&
           (job.codecs_[index] != codecs.first || job.update_codecs_[index] != codecs.second)) {
      ++index;
    }
    if (index < job.codecs_.size()) return index;
    if (index == kMaxCodecs) {
      return absl::InvalidArgumentError(
          absl::StrFormat("job '%s' has more than %d different codecs for its tensors: "
                          "give more of them the same one",
                          job.spec_.name(), kMaxCodecs));
    }
    job.codecs_.push_back(codecs.first);
    job.update_codecs_.push_back(codecs.second);
    return index;
  };
  GW_ASSIGN_OR_RETURN(const Codecs fallback, ParseCodecs(&job.spec_));
  std::vector<Codecs> rule_codecs;
  for (v1::CodecRule& rule : *job.spec_.mutable_rules()) {
    GW_ASSIGN_OR_RETURN(Codecs codecs, ParseCodecs(&rule));
    rule_codecs.push_back(std::move(codecs));
  }
  RuleFinder rules(job.spec_);
  std::set<std::string_view> names;
  std::set<std::pair<uint32_t, uint32_t>> checked;  // codec, group
  for (int i = 0; i < job.spec_.tensors_size(); ++i) {
    GW_ASSIGN_OR_RETURN(Tensor tensor, MakeTensor(job.spec_, i));
    if (!names.insert(job.spec_.tensors(i).name()).second) {
      return absl::InvalidArgumentError(absl::StrFormat("two tensors are named '%s'", tensor.name));
    }
    if (job.durable() && tensor.name == "__metadata__") {
      return absl::InvalidArgumentError(
          "a tensor of a durable job cannot be named '__metadata__': safetensors files, which snapshots are, keep it "
          "for "
          "themselves");
    }
    GW_ASSIGN_OR_RETURN(const int rule, rules.Find(tensor));
    Codecs codecs = rule == job.spec_.rules_size() ? fallback : rule_codecs[static_cast<size_t>(rule)];
    GW_RETURN_IF_ERROR(FillPowerSgd(tensor, &codecs.first));
    GW_ASSIGN_OR_RETURN(tensor.codec, codec_index(codecs));
    if (checked.insert({tensor.codec, tensor.group}).second)
      GW_RETURN_IF_ERROR(CheckTensorCodec(job.spec_, tensor, job.codecs_[tensor.codec]));
    v1::TensorSpec* canonical = job.spec_.mutable_tensors(i);
    canonical->set_role(tensor.role);
    canonical->set_dtype(v1::DTYPE_FLOAT32);
    job.elements_ += tensor.elements;
    if (job.elements_ > kMaxElements) return absl::InvalidArgumentError("the job has more than 2^40 elements");
    job.tensors_.push_back(std::move(tensor));
  }
  uint64_t tables = 0;
  for (const Tensor& tensor : job.tensors_) tables += IsZen(job.codecs_[tensor.codec]) ? tensor.elements : 0;
  FillBuckets(&job.spec_, fallback.first, job.elements_ - tables, tables);
  GW_RETURN_IF_ERROR(CheckExponents(job));
  for (const CodecSpec& codec : job.codecs_) job.features_.Add(FeatureOf(codec));
  GW_RETURN_IF_ERROR(CheckTogether(job.features_));
  job.two_phase_ = job.features_.Has(Feature::kPowerSgd);
  const auto& optimizer = job.spec_.optimizer();
  const bool momentum = std::any_of(optimizer.groups().begin(), optimizer.groups().end(),
                                    [](const auto& g) { return g.momentum() != 0; });
  const v1::OptimizerKind kind = optimizer.kind();
  const bool one = kind == v1::OPTIMIZER_LION || (kind == v1::OPTIMIZER_SGD && momentum);
  job.moments_ = kind == v1::OPTIMIZER_ADAMW || IsLayerwise(kind) ? 2 : one ? 1 : 0;
  // No maps in JobSpec, so serialization is deterministic for one protobuf version; unknown fields are dropped.
  job.spec_.DiscardUnknownFields();
  job.digest_ = HashString(job.spec_.SerializeAsString());
  return job;
}

}  // namespace gradwire
