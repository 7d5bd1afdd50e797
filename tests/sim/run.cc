// See run.h.
#include "tests/sim/run.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/job/norms.h"
#include "tests/sim/faults.h"

namespace gradwire::sim {
namespace {

constexpr TimeNs kStartTime = 60 * kSecond;      // within which everybody trains
constexpr TimeNs kProgressTime = 120 * kSecond;  // within which rounds follow the last fault
constexpr uint64_t kRoundsAfter = 3;
constexpr uint64_t kMaxFaults = 6;

}  // namespace

Run::Run(uint64_t seed, Broken broken, bool trace)
    : broken_(broken),
      world_(seed, trace),
      setup_(MakeSetup(world_)),
      oracle_(std::make_unique<Oracle>(&world_, setup_.get())) {
  for (uint32_t shard = 0; shard < setup_->shards; ++shard)
    servers_.push_back(
        std::make_unique<ServerNode>(&world_, setup_.get(), oracle_.get(), shard, broken, &servers_, nullptr));
  for (uint32_t shard = 0; setup_->standbys && shard < setup_->shards; ++shard)
    standbys_.push_back(std::make_unique<ServerNode>(&world_, setup_.get(), oracle_.get(), shard, broken, &servers_,
                                                     servers_[shard].get()));
  for (uint32_t w = 0; w < setup_->workers; ++w)
    workers_.push_back(std::make_unique<WorkerNode>(&world_, setup_.get(), oracle_.get(), &servers_, w));
}

bool Run::Step() {
  if (!world_.Step()) {
    world_.Violate("nothing happens any more");
    return false;
  }
  for (const auto& server : servers_) server->Settle();
  for (const auto& standby : standbys_) standby->Settle();
  for (const auto& worker : workers_)
    if (worker->session() != nullptr) worker->session()->Check();
  return !world_.violated();
}

bool Run::AllTrain(uint64_t version) const {
  return std::all_of(workers_.begin(), workers_.end(), [&](const auto& worker) {
    return worker->session() != nullptr && worker->session()->training() && worker->session()->version() >= version;
  });
}

uint64_t Run::NewestVersion() const {
  uint64_t newest = 0;
  for (const auto& worker : workers_)
    if (worker->session() != nullptr) newest = std::max(newest, worker->session()->version());
  return newest;
}

bool Run::LosePrimary() {
  ServerNode* const standby = AnyStandby();
  if (standby == nullptr || standby->primary() == nullptr || standby->process() == nullptr) return false;
  ServerNode* const primary = servers_[standby->shard()].get();
  if (primary != standby->primary() || primary->process() == nullptr) return false;
  if (broken_ == Broken::kPromotion) {  // rounds go on without it, which it does not notice, and then it takes over
    standby->CutOff(kKeepalive, 0);
    world_.After(world_.Between(300 * kMs, 900 * kMs), [this, standby, primary] { Replace(primary, standby); });
    return true;
  }
  if (!primary->process()->HasStandbyInSync()) return false;
  Replace(primary, standby);
  return true;
}

void Run::Replace(ServerNode* primary, ServerNode* standby) {
  if (primary != servers_[standby->shard()].get()) return;  // it has been
  primary->Lose();
  world_.After(world_.Between(kMs, 2 * kSecond), [this, primary, standby] {
    const absl::Status promoted = standby->Promote();
    if (!promoted.ok()) {
      world_.Count(Event::kPromotionRefused);
      return primary->ComeBack();
    }
    world_.Count(Event::kPromoted);
    std::swap(servers_[standby->shard()], standbys_[standby->shard()]);
  });
}

void Run::PlanFaults() {
  uint32_t weights = 0;
  for (const Fault& fault : Faults()) weights += fault.weight;
  const uint64_t count = 1 + world_.Below(kMaxFaults);
  const TimeNs span = world_.Between(100 * kMs, kSecond);
  faults_end_ = world_.Now() + span;
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t choice = world_.Below(weights);
    const Fault* fault = Faults().data();
    while (choice >= fault->weight) choice -= (fault++)->weight;
    world_.After(world_.Between(0, span), [this, fault] {
      if (!fault->apply(*this)) return;
      world_.Count(fault->event);
      if (!AllTrain(1)) world_.Count(Event::kFaultAtStart);
      world_.Trace([&] { return absl::StrCat("fault: ", NameOf(fault->event)); });
    });
  }
  for (const auto& server : servers_) {
    for (uint32_t shard = 0; shard < setup_->shards; ++shard) {
      if (world_.Chance(0.3)) server->path(shard).loss = 0.05;
      if (world_.Chance(0.3)) server->path(shard).repeats = 0.2;
      if (world_.Chance(0.3)) server->path(shard).slowest = 30 * kMs;
    }
  }
  for (const auto& worker : workers_) {
    if (world_.Chance(0.2)) worker->flip = 0.02;
    if (world_.Chance(0.4)) worker->repeat = 0.1;
    if (world_.Chance(SkipsNonFinite(*setup_->job) ? 0.6 : 0.2)) worker->bad_gradient = 0.1;
    if (world_.Chance(0.3)) worker->chunk_fault = 0.05;
    for (uint32_t shard = 0; shard < setup_->shards; ++shard) {
      Path& path = worker->path(shard);
      if (world_.Chance(0.3)) path.loss = 0.05;
      if (world_.Chance(0.3)) path.repeats = 0.2;
      if (world_.Chance(0.3)) path.slowest = 30 * kMs;
    }
  }
}

void Run::StopFaults() {
  for (const auto& worker : workers_) {
    worker->flip = worker->repeat = worker->bad_gradient = worker->chunk_fault = 0;
    for (uint32_t shard = 0; shard < setup_->shards; ++shard) {
      Path& path = worker->path(shard);
      path.loss = path.repeats = 0;
    }
  }
  for (const auto& server : servers_) {
    server->HealDisk();
    server->EndReplaced();
  }
}

void Run::Go() {
  world_.Trace([&] { return setup_->ToString(); });
  for (const auto& server : servers_) server->Start();
  for (const auto& standby : standbys_) standby->Start();
  for (const auto& worker : workers_) world_.After(world_.Between(0, 50 * kMs), [&worker] { worker->Start(); });
  // Faults may also begin with the job itself.
  if (!world_.Chance(0.25)) {
    while (!AllTrain(setup_->rounds_before_faults())) {
      if (!Step()) return;
      if (world_.Now() > kStartTime) return world_.Violate("the workers do not start");
    }
  }
  PlanFaults();
  while (world_.Now() < faults_end_)
    if (!Step()) return;
  StopFaults();
  world_.Trace([] { return std::string("faults stop"); });
  const uint64_t target = NewestVersion() + kRoundsAfter;
  const TimeNs limit = world_.Now() + kProgressTime;
  while (!AllTrain(target)) {
    if (!Step()) return;
    if (world_.Now() > limit)
      return world_.Violate(absl::StrCat("no progress: version ", target, " was not reached within ",
                                         kProgressTime / kSecond, " s after the last fault"));
  }
}

}  // namespace gradwire::sim
