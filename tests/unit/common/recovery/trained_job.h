// A job on any number of shards, trained without servers: workers' encoders and residuals, the shards' accumulators,
// data directories with journals and snapshots.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/internal/gradients.h"
#include "common/codec/frame/parameters.h"
#include "common/codec/update/update_compressor.h"
#include "common/job/round_mode.h"
#include "common/journal/journal_writer.h"
#include "common/recovery/replay.h"
#include "common/snapshot/snapshot_files.h"
#include "common/storage/data_directory.h"
#include "common/storage/files.h"
#include "tests/lib/fake_disk.h"

namespace gradwire::testing_support {

inline v1::JobSpec TrainedSpec(const std::string& codec, v1::OptimizerKind optimizer) {
  v1::JobSpec spec;
  spec.set_name("job");
  const std::pair<const char*, std::vector<uint64_t>> tensors[] = {
      {"embed", {97, 131}}, {"bias", {65}}, {"scale", {}}, {"none", {0, 3}}, {"mlp", {64, 300}}, {"head", {131, 97}}};
  for (const auto& [name, shape] : tensors) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(name);
    for (uint64_t d : shape) tensor->add_shape(d);
  }
  spec.mutable_optimizer()->set_kind(optimizer);
  spec.set_codec(codec);
  spec.set_bucket_bytes(65536);
  if (!codec.starts_with("dense")) spec.set_slice_bytes(49152);
  spec.set_run_elements(256);
  spec.set_min_workers(2);
  spec.set_max_workers(2);
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  return spec;
}

// Not thread-safe. Gradients depend on worker and round alone.
class TrainedJob {
 public:
  explicit TrainedJob(const v1::JobSpec& spec) : backend_(std::move(*kernels::MakeBackend("cpu"))) {
    job_ = std::make_unique<Job>(*Job::Make(spec));
    for (const Tensor& tensor : job_->tensors()) gradients_.emplace_back(tensor.elements);
  }

  // New data directories: "ROOT/0" and so on.
  void Begin(FakeDisk* disk, const std::string& root, uint32_t shards) {
    Shape(shards);
    ASSERT_TRUE(disk->CreateDirectory(root).ok());
    std::mt19937 random(5);
    for (uint32_t s = 0; s < shards; ++s) {
      v1::StoredJob stored;
      *stored.mutable_spec() = job_->spec();
      stored.set_shard_index(s);
      stored.set_shard_count(shards);
      Shard& shard = Open(disk, absl::StrCat(root, "/", s), s);
      ASSERT_TRUE(shard.directory->CreateJob(stored).ok());
      shard.replay = std::move(*ShardReplay::Make(job_.get(), layout_, s, backend_.get(), std::nullopt));
      for (uint32_t b = 0; b < layout_->bucket_count(s) && job_->keeps_parameters(); ++b) {
        const BucketLayout& slice = layout_->at(b, s);
        std::vector<float> values;
        for (size_t r = 0; r < slice.runs.size(); ++r) {
          for (uint32_t i = 0; i < slice.runs[r].length; ++i) {
            values.push_back(0.01f * static_cast<float>((slice.runs[r].tensor * 31 + slice.runs[r].offset + i) % 97));
          }
        }
        journal::Record record;
        record.type = journal::RecordType::kInitial;
        record.bucket = b;
        record.chunks = EncodeInitialize(slice, 77, values.data());
        Append(shard, std::move(record));
      }
    }
    NewWorkers();
  }

  // Goes on from the snapshots in restored data directories; the workers keep what they have.
  void GoOn(FakeDisk* disk, const std::vector<std::string>& paths, uint64_t version) {
    Shape(static_cast<uint32_t>(paths.size()));
    round_ = version;
    for (uint32_t s = 0; s < paths.size(); ++s) {
      Shard& shard = Open(disk, paths[s], s);
      absl::StatusOr<ShardState> state = Snapshots(s).Load(version);
      ASSERT_TRUE(state.ok()) << state.status();
      shard.replay = std::move(*ShardReplay::Make(job_.get(), layout_, s, backend_.get(), *std::move(state)));
    }
  }

  // One round of all workers. Every shard's record is synced.
  void Round() {
    for (size_t w = 0; w < workers_.size(); ++w) {
      for (uint32_t t = 0; t < gradients_.size(); ++t) {
        // Round 1 sends what round 0 calibrated for; so does any round behind one without values.
        if (round_ == 0 || CarriesValues(*job_, round_ - 1)) {
          std::mt19937 random(static_cast<uint32_t>(1 + w + 100 * t + 10'000 * round_) + seed_);
          std::normal_distribution<float> normal;
          auto& memory = workers_[w].memory[t];
          memory.resize(gradients_[t]);
          for (float& x : memory) x = normal(random);
          ASSERT_TRUE(workers_[w].store->Ingest(t, memory.data(), round_).ok());
        }
        workers_[w].store->Select(t, round_);
      }
    }
    for (uint32_t s = 0; s < shards_.size(); ++s) {
      for (uint32_t b = 0; b < layout_->bucket_count(s); ++b) CloseBucket(s, b);
    }
    if (CarriesValues(*job_, round_)) {
      for (Worker& worker : workers_) worker.store->EndRound();
    }
    ++round_;
  }
  void set_seed(uint32_t seed) { seed_ = seed; }  // of the gradients to come
  void Rounds(int count) {
    for (int i = 0; i < count; ++i) Round();
  }

  void Snapshot(uint32_t shard) {
    ShardState state = shards_[shard].replay->state();
    state.version = round_;
    SnapshotFiles files = Snapshots(shard);
    ASSERT_EQ(files.Write(state), absl::OkStatus());
  }
  // The journal begins anew with the state of every bucket, as that of a standby does.
  void JournalState(FakeDisk* disk, uint32_t s) {
    Shard& shard = shards_[s];
    ASSERT_TRUE(RemoveTree(*disk, shard.directory->JournalOf("job")).ok());
    ASSERT_TRUE(disk->CreateDirectory(shard.directory->JournalOf("job")).ok());
    shard.writer = NewWriter(disk, s);
    for (uint32_t b = 0; b < layout_->bucket_count(s); ++b) {
      const ShardState::Bucket& bucket = shard.replay->state().buckets[b];
      journal::Record record;
      record.type = journal::RecordType::kState;
      record.bucket = b;
      record.round = round_;
      record.chunks = EncodeParameters(layout_->at(b, s), bucket.plans, ParameterContent::kShard, bucket.Arrays());
      ASSERT_EQ(shard.writer->Append(std::move(record)), absl::OkStatus());
    }
    ASSERT_EQ(shard.writer->Sync(), absl::OkStatus());
  }
  SnapshotFiles Snapshots(uint32_t shard) {
    DataDirectory& directory = *shards_[shard].directory;
    return SnapshotFiles(&directory.disk(), directory.SnapshotsOf("job"), job_.get(), layout_, shard);
  }

  // Tensor by tensor, whatever the shards.
  std::vector<std::vector<float>> Gathered(std::vector<float> ShardState::Bucket::*array) const {
    std::vector<std::vector<float>> tensors;
    for (uint64_t elements : gradients_) tensors.emplace_back(elements);
    for (uint32_t s = 0; s < shards_.size(); ++s) {
      for (uint32_t b = 0; b < layout_->bucket_count(s); ++b) {
        const BucketLayout& slice = layout_->at(b, s);
        const std::vector<float>& values = shards_[s].replay->state().buckets[b].*array;
        for (size_t r = 0; r < slice.runs.size() && !values.empty(); ++r) {
          std::copy_n(values.begin() + static_cast<ptrdiff_t>(slice.run_begin[r]), slice.runs[r].length,
                      tensors[slice.runs[r].tensor].begin() + static_cast<ptrdiff_t>(slice.runs[r].offset));
        }
      }
    }
    return tensors;
  }

  const Job& job() const { return *job_; }
  const Layout& layout() const { return *layout_; }
  const ShardState& state(uint32_t shard) const { return shards_[shard].replay->state(); }
  uint64_t version() const { return round_; }
  uint64_t deferred() const { return deferred_; }
  kernels::Backend* backend() { return backend_.get(); }

 private:
  struct Worker {
    std::unique_ptr<client::GradientStore> store;
    std::vector<std::vector<float>> memory;  // this round's gradients
  };
  struct Shard {
    std::unique_ptr<DataDirectory> directory;
    std::unique_ptr<journal::JournalWriter> writer;
    std::unique_ptr<ShardReplay> replay;
    std::vector<const Codec*> codecs;  // by bucket
  };

  void Shape(uint32_t shards) {
    layouts_.push_back(*Layout::Make(*job_, shards));
    layout_ = &layouts_.back();
    shards_.clear();
    shards_.resize(shards);
    for (uint32_t s = 0; s < shards; ++s) {
      for (uint32_t b = 0; b < layout_->bucket_count(s); ++b) {
        codecs_.push_back(std::move(*MakeCodec({job_.get(), &layout_->at(b, s), backend_.get()})));
        shards_[s].codecs.push_back(codecs_.back().get());
      }
    }
  }

  void NewWorkers() {
    std::vector<const Codec*> by_tensor(job_->tensors().size());
    for (const BucketLayout& slice : layout_->slices()) {
      for (const BucketPart& part : layout_->parts(slice.job_bucket))
        by_tensor[part.tensor] = shards_[slice.shard].codecs[slice.bucket];
    }
    workers_.clear();
    for (uint32_t w = 0; w < job_->spec().max_workers(); ++w) {
      workers_.push_back(
          {std::make_unique<client::GradientStore>(job_.get(), by_tensor, client::MakeHostMemory(backend_.get())), {}});
      workers_.back().memory.resize(gradients_.size());
    }
  }

  Shard& Open(FakeDisk* disk, const std::string& path, uint32_t s) {
    shards_[s].directory = std::move(*DataDirectory::Open(disk, path));
    shards_[s].writer = NewWriter(disk, s);
    return shards_[s];
  }

  std::unique_ptr<journal::JournalWriter> NewWriter(FakeDisk* disk, uint32_t s) const {
    journal::JournalWriter::Options options;
    options.directory = shards_[s].directory->JournalOf("job");
    options.identity = {job_->digest(), layout_->digest(), s};
    options.epoch = shards_[s].directory->epoch();
    options.segment_bytes = 3'000;  // hardly more than a round
    return std::make_unique<journal::JournalWriter>(disk, options, journal::ReadResult());
  }

  void Append(Shard& shard, journal::Record record) {
    ASSERT_EQ(shard.replay->Apply(record), absl::OkStatus());
    ASSERT_EQ(shard.writer->Append(std::move(record)), absl::OkStatus());
    ASSERT_EQ(shard.writer->Sync(), absl::OkStatus());
  }

  void CloseBucket(uint32_t s, uint32_t b) {
    const BucketLayout& slice = layout_->at(b, s);
    const Codec& codec = *shards_[s].codecs[b];
    const RoundPlan plan = *shards_[s].replay->state().buckets[b].plans.OfRound(*job_, round_);
    const std::vector<float> rates(static_cast<size_t>(job_->spec().optimizer().groups_size()), 0.01f);
    FrameIdentity id;
    id.shard = static_cast<uint16_t>(s);
    id.bucket = b;
    id.round = round_;
    id.learning_rates = rates;
    const std::unique_ptr<Accumulator> accumulator = codec.NewAccumulator();
    accumulator->Open(round_, plan);
    std::vector<EncodedFrame> frames;
    for (Worker& worker : workers_) {
      auto frame = codec.NewEncoder()->Encode(id, plan, worker.store->InputsOf(slice));
      ASSERT_TRUE(frame.ok()) << frame.status();
      for (const Bytes& bytes : frame->chunks) {
        const auto chunk = wire::ParseChunk(bytes);
        ASSERT_TRUE(chunk.ok()) << chunk.status();
        for (const wire::Segment& segment : chunk->segments) {
          if (segment.type == wire::SegmentType::kLearningRates) continue;
          ASSERT_EQ(accumulator->Add(segment), absl::OkStatus());
        }
      }
      frames.push_back(*std::move(frame));
    }
    auto update = accumulator->Finish(id, static_cast<uint32_t>(workers_.size()));
    ASSERT_TRUE(update.ok()) << update.status();
    deferred_ += update->stats.deferred;
    const auto compressor = *UpdateCompressor::Make({job_.get(), &slice, backend_.get()});
    const std::vector<float>& residual = shards_[s].replay->state().buckets[b].update_residual;
    std::vector<float> next = residual;
    if (compressor != nullptr) {
      ResidualChange change;
      ASSERT_EQ(compressor->Compress(plan, residual.empty() ? nullptr : residual.data(), &change, &*update),
                absl::OkStatus());
      if (!residual.empty()) change.ApplyTo(next.data());
    }
    const auto decoded = DecodeUpdate(update->chunks, *job_, slice, plan);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    for (size_t w = 0; w < workers_.size() && CarriesValues(*job_, round_); ++w) {
      workers_[w].store->Encoded(slice);
      if (!decoded->deferred.empty()) {
        ASSERT_TRUE(workers_[w].store->Deferred(slice, codec, frames[w], decoded->deferred).ok());
      }
    }
    journal::Record record;
    record.bucket = b;
    record.round = round_;
    record.contributions = {{1, "a", 1, 2, true}, {2, "b", 2, 3, true}};
    record.chunks = update->chunks;
    record.mean_chunks = update->mean;
    Append(shards_[s], std::move(record));
    if (!residual.empty()) {
      ASSERT_TRUE(residual == next) << "replay leaves another residual than the round";
    }
  }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Job> job_;
  std::vector<uint64_t> gradients_;  // elements of each tensor
  std::deque<Layout> layouts_;
  const Layout* layout_ = nullptr;
  std::deque<std::unique_ptr<Codec>> codecs_;  // of all layouts so far
  std::vector<Shard> shards_;
  std::vector<Worker> workers_;
  uint64_t round_ = 0;
  uint32_t seed_ = 0;
  uint64_t deferred_ = 0;
};

}  // namespace gradwire::testing_support
