// What the update frames of a job hold together, for tests that compare it with what was pushed.
#pragma once

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "common/codec/plan/plan_window.h"
#include "common/codec/update/update.h"
#include "tests/integration/client/cluster.h"
#include "tests/lib/recording_sink.h"

namespace gradwire::testing {

// What the update frames of a job hold together, per tensor: sums over workers, not means.
class Applied {
 public:
  Applied(const v1::JobSpec& spec, uint32_t shards)
      : job_(*Job::Make(spec)), layout_(*Layout::Make(job_, shards)), backend_(*kernels::MakeBackend("auto")) {
    records_.resize(shards);
    for (const Tensor& tensor : job_.tensors()) sums_.emplace_back(tensor.elements);
  }
  // Keeps the records of a shard of the job, from its beginning on; durable at once.
  std::unique_ptr<UpdateSink> SinkOf(uint32_t shard) {
    return std::make_unique<testing_support::RecordingSink>(&records_[shard]);
  }

  const std::vector<std::vector<double>>& Sum() {
    for (uint32_t s = 0; s < records_.size(); ++s) {
      std::vector<PlanWindow> plans;
      for (uint32_t b = 0; b < layout_.bucket_count(s); ++b) {
        plans.emplace_back(PlansKept(job_), (*MakeCodec({&job_, &layout_.at(b, s), backend_.get()}))->InitialPlan());
      }
      for (const journal::Record& record : records_[s]) {
        if (record.type != journal::RecordType::kUpdate) continue;
        Add(record, layout_.at(record.bucket, s), &plans[record.bucket]);
      }
    }
    return sums_;
  }
  int short_updates() const { return short_updates_; }

 private:
  void Add(const journal::Record& record, const BucketLayout& layout, PlanWindow* plans) {
    const auto update = DecodeUpdate(record.chunks, job_, layout, *plans->OfRound(job_, record.round));
    ASSERT_TRUE(update.ok()) << update.status();
    plans->Push(update->next);
    if (update->contributors < job_.spec().max_workers()) ++short_updates_;
    if (update->body == Update::Body::kEmpty) return;
    std::vector<int32_t> integers(layout.elements);
    if (update->body == Update::Body::kSparse) {
      for (size_t i = 0; i < update->positions.size(); ++i) integers[update->positions[i]] = update->integers[i];
    } else {
      ASSERT_EQ(update->body, Update::Body::kDenseInt);
      update->CopyDense(0, layout.elements, integers.data());
    }
    for (size_t r = 0; r < layout.runs.size(); ++r) {
      const Run& run = layout.runs[r];
      for (uint64_t i = 0; i < run.length; ++i) {
        const int32_t integer = integers[layout.run_begin[r] + i];
        if (integer != 0) sums_[run.tensor][run.offset + i] += std::ldexp(integer, update->exponents[r]);
      }
    }
  }

  const Job job_;
  const Layout layout_;
  const std::unique_ptr<kernels::Backend> backend_;
  std::vector<std::vector<journal::Record>> records_;
  std::vector<std::vector<double>> sums_;
  int short_updates_ = 0;
};

}  // namespace gradwire::testing
