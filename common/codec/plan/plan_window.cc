// See plan_window.h.
#include "common/codec/plan/plan_window.h"

#include <algorithm>
#include <utility>

namespace gradwire {

uint32_t PlansKept(const Job& job) { return 1 + job.spec().rounds().staleness(); }

uint64_t PlanVersion(const Job& job, uint64_t round) {
  const uint64_t staleness = job.spec().rounds().staleness();
  return round > staleness ? round - staleness : std::min<uint64_t>(round, 1);
}

PlanWindow::PlanWindow(uint32_t depth, RoundPlan initial) : depth_(depth) { plans_.push_back(std::move(initial)); }

PlanWindow::PlanWindow(uint32_t depth, uint64_t version, std::deque<RoundPlan> plans, uint32_t nonfinite_rounds)
    : depth_(depth), version_(version), nonfinite_rounds_(nonfinite_rounds), plans_(std::move(plans)) {
  if (plans_.size() > depth_) plans_.resize(depth_);
}

void PlanWindow::Push(RoundPlan plan, bool no_step) {
  plans_.push_front(std::move(plan));
  if (plans_.size() > depth_) plans_.pop_back();
  ++version_;
  if (no_step) ++nonfinite_rounds_;
}

const RoundPlan* PlanWindow::Find(uint64_t version) const {
  if (version > version_ || version_ - version >= plans_.size()) return nullptr;
  return &plans_[version_ - version];
}

}  // namespace gradwire
