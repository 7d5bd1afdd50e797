// See traffic_accounts.h.
#include "server/job/traffic_accounts.h"

namespace gradwire {

void TrafficAccounts::NoteUpdate(const FinishStats& stats) {
  deferred_elements_ += stats.deferred;
  update_elements_ += stats.elements;
}

void TrafficAccounts::Open(MemberId member) {
  absl::MutexLock lock(&mu_);
  workers_[member];
}

void TrafficAccounts::Close(MemberId member) {
  absl::MutexLock lock(&mu_);
  workers_.erase(member);
}

void TrafficAccounts::NoteChunk(MemberId member, uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  const auto worker = workers_.find(member);
  if (worker != workers_.end()) worker->second.bytes += bytes;
}

void TrafficAccounts::NoteFrame(MemberId member) {
  absl::MutexLock lock(&mu_);
  ++workers_[member].frames;
}

void TrafficAccounts::NoteNotIncluded(MemberId member) {
  ++not_included_frames_;
  absl::MutexLock lock(&mu_);
  const auto worker = workers_.find(member);
  if (worker != workers_.end()) ++worker->second.not_included_frames;
}

void TrafficAccounts::NoteSanitized(MemberId member, uint64_t elements) {
  absl::MutexLock lock(&mu_);
  const auto worker = workers_.find(member);
  if (worker == workers_.end() || elements <= worker->second.sanitized_elements) return;
  sanitized_elements_ += elements - worker->second.sanitized_elements;
  worker->second.sanitized_elements = elements;
}

void TrafficAccounts::Describe(v1::JobStatus* status) const {
  status->set_push_bytes(push_bytes_);
  status->set_pull_bytes(pull_bytes_);
  status->set_initialize_bytes(upload_bytes_);
  status->set_parameter_bytes(parameter_bytes_);
  status->set_deferred_elements(deferred_elements_);
  status->set_update_elements(update_elements_);
  status->set_refused_frames(refused_frames_);
  status->set_not_included_frames(not_included_frames_);
  absl::MutexLock lock(&mu_);
  status->set_sanitized_elements(sanitized_elements_);
}

void TrafficAccounts::DescribeWorker(MemberId member, v1::WorkerStatus* status) const {
  absl::MutexLock lock(&mu_);
  const auto worker = workers_.find(member);
  if (worker == workers_.end()) return;
  status->set_frames(worker->second.frames);
  status->set_frame_bytes(worker->second.bytes);
  status->set_not_included_frames(worker->second.not_included_frames);
  status->set_sanitized_elements(worker->second.sanitized_elements);
}

size_t TrafficAccounts::workers() const {
  absl::MutexLock lock(&mu_);
  return workers_.size();
}

}  // namespace gradwire
