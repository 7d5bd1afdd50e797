// See replica.h.
#include "client/cpp/internal/replica.h"

#include <algorithm>
#include <utility>

#include "common/base/crc32c.h"
#include "common/base/sha256.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/parameters.h"
#include "common/codec/frame/run_pieces.h"

namespace gradwire::client {

Replica::Replica(const Job* job, const Layout* layout, std::shared_ptr<TensorMemory> memory,
                 std::vector<std::span<float>> tensors, bool with_moments)
    : job_(job),
      layout_(layout),
      memory_(std::move(memory)),
      tensors_(std::move(tensors)),
      first_moment_(tensors_.size()),
      second_moment_(tensors_.size()) {
  for (size_t t = 0; with_moments && t < tensors_.size(); ++t) {
    if (job->moments() >= 1) first_moment_[t] = memory_->Allocate(tensors_[t].size());
    if (job->moments() >= 2) second_moment_[t] = memory_->Allocate(tensors_[t].size());
  }
  for (const BucketLayout& slice : layout->slices()) steps_.push_back(memory_->NewSteps(job, &slice, RunsOf(slice)));
}

std::vector<RunState> Replica::RunsOf(const BucketLayout& slice) {
  std::vector<RunState> runs(slice.runs.size());
  const auto at = [](std::span<float> tensor, const Run& run) {
    return tensor.empty() ? nullptr : tensor.data() + run.offset;
  };
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = slice.runs[i];
    runs[i] = {at(tensors_[run.tensor], run), at(first_moment_[run.tensor], run), at(second_moment_[run.tensor], run)};
  }
  return runs;
}

bool Replica::Wants(const BucketLayout& slice) const {
  return slice.runs.empty() ||
         std::ranges::any_of(slice.runs, [this](const Run& run) { return !tensors_[run.tensor].empty(); });
}

absl::Status Replica::Apply(const BucketLayout& slice, const Update& update) { return StepsOf(slice).Apply(update); }

absl::Status Replica::WriteMean(const BucketLayout& slice, const Update& update) {
  return StepsOf(slice).WriteMean(update);
}

absl::StatusOr<PlanWindow> Replica::Load(const BucketLayout& slice, std::span<const wire::Chunk> chunks,
                                         uint64_t version) {
  const auto has = [&](const std::vector<std::span<float>>& arrays) {
    return std::ranges::any_of(slice.runs, [&](const Run& run) { return !arrays[run.tensor].empty(); });
  };
  ParametersWanted wanted;
  wanted.parameter = job_->keeps_parameters();  // else plans are all that is pulled
  wanted.first_moment = has(first_moment_);
  wanted.second_moment = has(second_moment_);
  GW_ASSIGN_OR_RETURN(ParameterFrame frame, ReadParameters(chunks, *job_, slice, version, wanted));
  ForEachTensorPiece(slice, [&](const Run& run, uint64_t elements, uint64_t position) {
    const auto store = [&](bool is_wanted, wire::Array array, std::span<float> tensor) {
      if (!is_wanted || tensor.empty()) return;
      memory_->Fill(tensor.subspan(run.offset, elements),
                    [&](float* to) { frame.Read(array, position, elements, to); });
    };
    store(wanted.parameter, wire::Array::kParameter, tensors_[run.tensor]);
    store(wanted.first_moment, wire::Array::kFirstMoment, first_moment_[run.tensor]);
    store(wanted.second_moment, wire::Array::kSecondMoment, second_moment_[run.tensor]);
  });
  return frame.TakePlans();
}

std::vector<float> Replica::Gather(const BucketLayout& slice) const {
  std::vector<float> values(slice.elements);
  ForEachTensorPiece(slice, [&](const Run& run, uint64_t elements, uint64_t position) {
    if (!tensors_[run.tensor].empty())
      memory_->ToHost(tensors_[run.tensor].subspan(run.offset, elements), values.data() + position);
  });
  return values;
}

std::string Replica::Digest() const {
  Sha256 sha;
  for (std::span<float> tensor : tensors_) sha.Update(memory_->View(tensor).values);
  return sha.Hex();
}

uint32_t Replica::Checksum() const {
  uint32_t crc = 0;
  for (std::span<float> tensor : tensors_) {
    const auto view = memory_->View(tensor);
    const std::span<const float> values = view.values;
    crc = Crc32c({reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()}, crc);
  }
  return crc;
}

std::string Replica::ShardDigest(uint32_t shard) const {
  Sha256 sha;
  for (uint32_t bucket = 0; bucket < layout_->bucket_count(shard); ++bucket) {
    const std::vector<float> values = Gather(layout_->at(bucket, shard));
    sha.Update(std::span<const float>(values));
  }
  return sha.Hex();
}

std::vector<std::string> Replica::ShardDigests() const {
  std::vector<std::string> digests;
  for (uint32_t shard = 0; shard < layout_->shard_count(); ++shard) digests.push_back(ShardDigest(shard));
  return digests;
}

}  // namespace gradwire::client
