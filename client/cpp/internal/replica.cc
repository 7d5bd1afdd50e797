// See replica.h.
#include "client/cpp/internal/replica.h"

#include <cstring>
#include <utility>

#include "common/base/sha256.h"
#include "common/base/status_macros.h"
#include "common/codec/parameters.h"
#include "common/optimizer/optimizer.h"

namespace gradwire::client {

Replica::Replica(const Job* job, const Layout* layout, kernels::Backend* backend, std::vector<std::span<float>> memory,
                 bool with_moments)
    : job_(job),
      layout_(layout),
      backend_(backend),
      memory_(std::move(memory)),
      first_moment_(memory_.size()),
      second_moment_(memory_.size()) {
  if (!with_moments) return;
  for (size_t t = 0; t < memory_.size(); ++t) {
    if (job->moments() >= 1) first_moment_[t].assign(memory_[t].size(), 0.0f);
    if (job->moments() >= 2) second_moment_[t].assign(memory_[t].size(), 0.0f);
  }
}

std::vector<RunState> Replica::RunsOf(const BucketLayout& slice) {
  std::vector<RunState> runs(slice.runs.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = slice.runs[i];
    runs[i].parameter = memory_[run.tensor].data() + run.offset;
    if (!first_moment_[run.tensor].empty()) runs[i].first_moment = first_moment_[run.tensor].data() + run.offset;
    if (!second_moment_[run.tensor].empty()) runs[i].second_moment = second_moment_[run.tensor].data() + run.offset;
  }
  return runs;
}

absl::Status Replica::Apply(const BucketLayout& slice, const Update& update) {
  const std::vector<RunState> runs = RunsOf(slice);
  return ApplyUpdate(*job_, slice, update, runs, *backend_);
}

void Replica::WriteMean(const BucketLayout& slice, const Update& update) {
  for (uint32_t i = 0; i < slice.runs.size(); ++i) {
    const Run& run = slice.runs[i];
    float* out = memory_[run.tensor].data() + run.offset;
    if (update.contributors == 0 || update.body == Update::Body::kEmpty)
      std::memset(out, 0, run.length * sizeof(float));
    else
      update.MeanOfRun(slice, i, out);
  }
}

absl::StatusOr<PlanWindow> Replica::Load(const BucketLayout& slice, std::span<const Bytes> chunks, uint64_t version) {
  std::vector<float> parameter(slice.elements);
  std::vector<float> first;
  std::vector<float> second;
  ParameterTargets targets;
  targets.parameter = parameter.data();
  const std::vector<RunState> runs = RunsOf(slice);
  if (!runs.empty() && runs[0].first_moment != nullptr) {
    first.assign(slice.elements, 0.0f);
    targets.first_moment = first.data();
  }
  if (!runs.empty() && runs[0].second_moment != nullptr) {
    second.assign(slice.elements, 0.0f);
    targets.second_moment = second.data();
  }
  GW_ASSIGN_OR_RETURN(PlanWindow plans, DecodeParameters(chunks, *job_, slice, version, targets));
  for (size_t i = 0; i < runs.size(); ++i) {
    const uint64_t begin = slice.run_begin[i];
    const size_t bytes = slice.runs[i].length * sizeof(float);
    std::memcpy(runs[i].parameter, parameter.data() + begin, bytes);
    if (!first.empty()) std::memcpy(runs[i].first_moment, first.data() + begin, bytes);
    if (!second.empty()) std::memcpy(runs[i].second_moment, second.data() + begin, bytes);
  }
  return plans;
}

std::vector<float> Replica::Gather(const BucketLayout& slice) const {
  std::vector<float> values(slice.elements);
  for (size_t i = 0; i < slice.runs.size(); ++i) {
    const Run& run = slice.runs[i];
    std::memcpy(values.data() + slice.run_begin[i], memory_[run.tensor].data() + run.offset,
                run.length * sizeof(float));
  }
  return values;
}

std::string Replica::Digest() const {
  Sha256 sha;
  for (std::span<float> tensor : memory_) sha.Update(std::span<const float>(tensor));
  return sha.Hex();
}

std::string Replica::ShardDigest(uint32_t shard) const {
  Sha256 sha;
  for (uint32_t bucket = 0; bucket < layout_->bucket_count(); ++bucket) {
    for (const Run& run : layout_->at(bucket, shard).runs)
      sha.Update(std::span<const float>(memory_[run.tensor].subspan(run.offset, run.length)));
  }
  return sha.Hex();
}

}  // namespace gradwire::client
