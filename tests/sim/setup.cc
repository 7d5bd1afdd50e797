// See setup.h.
#include "tests/sim/setup.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/job/norms.h"
#include "tests/lib/must.h"

namespace gradwire::sim {
namespace {

using testing_support::Must;

// Vectors, and, for `two_phase`, a matrix and more of either.
void AddTensors(World& world, bool two_phase, v1::JobSpec* spec) {
  const uint64_t tensors = 1 + world.Below(3);
  for (uint64_t t = 0; t < tensors; ++t) {
    v1::TensorSpec& tensor = *spec->add_tensors();
    tensor.set_name(absl::StrCat("t", t));
    const bool matrix = two_phase && (t == 0 || world.Chance(0.5));
    tensor.add_shape(matrix ? 5 + world.Below(10) : 1 + world.Below(200));
    if (matrix) tensor.add_shape(5 + world.Below(10));
  }
}

}  // namespace

std::vector<const Codec*> Setup::CodecPointers() const {
  std::vector<const Codec*> pointers;
  for (const auto& codec : codecs) pointers.push_back(codec.get());
  return pointers;
}

std::vector<std::vector<float>> Setup::InitialParameters() const {
  std::vector<std::vector<float>> tensors;
  for (const Tensor& tensor : job->tensors()) {
    std::vector<float>& values = tensors.emplace_back(tensor.elements);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 17) / 16.0f - 0.5f;
  }
  return tensors;
}

bool Setup::waits_for_disk() const { return job->spec().durability().on_failure() != v1::DISK_FAILURE_CONTINUE; }

bool Setup::may_lose_versions() const {
  return job->spec().durability().level() != v1::DURABILITY_FSYNC || !waits_for_disk();
}

std::string Setup::ToString() const {
  const v1::JobSpec& spec = job->spec();
  return absl::StrCat(
      workers, " workers, ", shards, " shards, ", spec.codec(), ", ", v1::OptimizerKind_Name(spec.optimizer().kind()),
      ", ", v1::DurabilityLevel_Name(spec.durability().level()), waits_for_disk() ? ", waits" : ", goes on",
      spec.rounds().quorum() > 0 ? absl::StrCat(", quorum ", spec.rounds().quorum()) : "",
      spec.clip_norm() > 0 ? ", clips" : "", SkipsNonFinite(*job) ? ", skips" : "", async() ? ", asynchronous" : "",
      standbys ? ", standbys" : "", spec.slice_bytes() > 0 ? ", slices" : "",
      staleness() > 0 ? absl::StrCat(", staleness ", staleness()) : "",
      pull == PullMode::kUpdate ? ", pulls updates" : ", pulls parameters");
}

std::unique_ptr<Setup> MakeSetup(World& world) {
  auto setup = std::make_unique<Setup>();
  setup->workers = 1 + static_cast<uint32_t>(world.Below(3));
  setup->shards = 1 + static_cast<uint32_t>(world.Below(2));
  setup->segment_bytes = 2048 << world.Below(4);
  if (world.Chance(0.6)) setup->chunk_bytes = 160 + 8 * world.Below(30);
  setup->pull = world.Chance(0.8) ? PullMode::kUpdate : PullMode::kParams;
  v1::JobSpec spec;
  spec.set_name("sim");
  static constexpr const char* kCodecs[] = {"dense:values=fixed16",    "dense:values=fixed32",
                                            "dense:values=fp32",       "tagc:density=0.1",
                                            "tagc:density=0.1,bits=2", "tagc:density=0.3,form=sketch,slack=0.7",
                                            "topk:density=0.2",        "powersgd:rank=2"};
  spec.set_codec(kCodecs[world.Below(std::size(kCodecs))]);
  const bool steps = spec.codec().starts_with("tagc");
  const bool two_phase = spec.codec().starts_with("powersgd");
  AddTensors(world, two_phase, &spec);
  static constexpr v1::OptimizerKind kOptimizers[] = {v1::OPTIMIZER_SGD, v1::OPTIMIZER_ADAMW, v1::OPTIMIZER_LAMB,
                                                      v1::OPTIMIZER_LANS};
  const uint64_t optimizer = world.Below(two_phase ? 2 : std::size(kOptimizers));
  spec.mutable_optimizer()->set_kind(steps ? v1::OPTIMIZER_STEP : kOptimizers[optimizer]);
  if (!steps && !two_phase && world.Chance(0.3)) spec.set_clip_norm(0.5f);
  spec.mutable_optimizer()->add_groups();
  spec.set_push(steps ? v1::PUSH_STEP : v1::PUSH_GRADIENT);
  spec.set_nonfinite(v1::NONFINITE_REFUSE);
  spec.set_min_workers(setup->workers);
  spec.set_max_workers(8);
  spec.set_lease_ms(2000);
  spec.set_bucket_bytes(512);
  spec.set_run_elements(64);
  if (world.Chance(0.5)) spec.set_slice_bytes(512);
  spec.set_seed(world.Below(1000));
  if (!two_phase && world.Chance(0.15)) {
    spec.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
    spec.clear_clip_norm();
    spec.set_push(v1::PUSH_GRADIENT);  // so that what was fed can be compared with what was applied
    spec.mutable_optimizer()->set_kind(kOptimizers[optimizer % 2]);
    setup->pull = PullMode::kParams;
  } else if (setup->workers > 1 && world.Chance(0.4)) {
    spec.mutable_rounds()->set_quorum(1 + static_cast<uint32_t>(world.Below(setup->workers - 1)));
  } else if (!two_phase && world.Chance(0.3)) {
    spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
    spec.mutable_rounds()->set_staleness(static_cast<uint32_t>(world.Chance(0.2) ? 16 : 1 + world.Below(4)));
  }
  const bool sync = spec.rounds().mode() != v1::ROUNDS_BOUNDED && spec.rounds().mode() != v1::ROUNDS_ASYNC;
  if (!two_phase && sync && world.Chance(0.3)) spec.set_nonfinite(v1::NONFINITE_SKIP);
  v1::DurabilitySpec& durability = *spec.mutable_durability();
  durability.set_level(world.Chance(0.7) ? v1::DURABILITY_FSYNC : v1::DURABILITY_INTERVAL);
  durability.set_interval_ms(100);
  durability.set_on_failure(world.Chance(0.7) ? v1::DISK_FAILURE_WAIT : v1::DISK_FAILURE_CONTINUE);
  setup->standbys = world.Chance(0.2);
  setup->job = std::make_unique<Job>(Must(Job::Make(spec)));
  setup->layout = std::make_unique<Layout>(Must(Layout::Make(*setup->job, setup->shards)));
  setup->backend = Must(kernels::MakeBackend("reference"));
  for (const BucketLayout& slice : setup->layout->slices())
    setup->codecs.push_back(Must(MakeCodec({setup->job.get(), &slice, setup->backend.get()})));
  return setup;
}

}  // namespace gradwire::sim
