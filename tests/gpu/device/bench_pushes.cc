// See bench_pushes.h.
#include "tests/gpu/device/bench_pushes.h"

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/codec/codec.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "kernels/cuda/device_share.h"
#include "server/job/job_arrays.h"
#include "tests/lib/must.h"

namespace gradwire::bench {
namespace {

using kernels::cuda::AsyncBackend;
using kernels::cuda::DeviceRuntime;
using kernels::cuda::DeviceShare;
using testing_support::Must;

v1::JobSpec SpecOf(const PushOptions& options) {
  v1::JobSpec spec;
  spec.set_name("bench");
  spec.set_codec("dense:values=fp32");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
  spec.mutable_optimizer()->add_groups();
  spec.set_bucket_bytes(options.bucket_elements * 4);
  v1::TensorSpec& tensor = *spec.add_tensors();
  tensor.set_name("w");
  tensor.add_shape(options.buckets * options.bucket_elements);
  return spec;
}

constexpr float kLearningRate = 1e-3f;

FrameIdentity Identity(uint32_t bucket) { return {0, bucket, 1, 1, {&kLearningRate, 1}}; }

// The buckets of a shard, wherever their arrays lie. Buckets are independent of each other.
class Shard {
 public:
  Shard(std::unique_ptr<JobArrays> arrays, const std::vector<std::unique_ptr<Codec>>& codecs)
      : arrays_(std::move(arrays)) {
    for (uint32_t b = 0; b < codecs.size(); ++b) {
      stores_.push_back(Must(arrays_->NewStore(b)));
      accumulators_.push_back(Must(arrays_->NewAccumulator(b, *codecs[b])));
    }
  }

  // One frame, chunk by chunk.
  void Push(uint32_t bucket, const EncodedFrame& pushed) {
    thread_local std::vector<uint8_t> scratch;
    Accumulator& accumulator = *accumulators_[bucket];
    accumulator.Open(1, {});
    const std::unique_ptr<FrameMerge> frame = accumulator.NewFrameMerge();
    for (const Bytes& bytes : pushed.chunks) {
      const wire::Chunk chunk = Must(wire::ParseReceived({&bytes, 1}, &scratch));
      for (const wire::Segment& s : chunk.segments) {
        if (s.type != wire::SegmentType::kLearningRates) Must(frame->Add(s));
      }
    }
    Must(frame->Settle());
  }
  void Round(uint32_t bucket, const EncodedFrame& pushed) {
    Push(bucket, pushed);
    Must(stores_[bucket]->Apply(Must(accumulators_[bucket]->Finish(Identity(bucket), 1)), {}));
  }

 private:
  const std::unique_ptr<JobArrays> arrays_;
  std::vector<std::unique_ptr<ParameterStore>> stores_;
  std::vector<std::unique_ptr<Accumulator>> accumulators_;
};

class PushBench {
 public:
  PushBench(AsyncBackend& backend, const PushOptions& options)
      : options_(options),
        runtime_(backend.runtime()),
        job_(Must(Job::Make(SpecOf(options)))),
        layout_(Must(Layout::Make(job_, 1))),
        host_backend_(Must(kernels::MakeBackend("cpu"))),
        share_(Must(DeviceShare::Make(&backend, {}))) {
    uint64_t device_bytes = 0;
    for (uint32_t b = 0; b < layout_.bucket_count(); ++b) {
      codecs_.push_back(Must(MakeCodec({&job_, &layout_.at(b, 0), host_backend_.get()})));
      device_bytes += DeviceBytes(job_, layout_.at(b, 0), codecs_.back().get());
    }
    on_device_.emplace(
        Must(MakeDeviceArrays(&job_, &layout_, 0, codecs_, host_backend_.get(), share_.get(), device_bytes)), codecs_);
    on_host_.emplace(MakeHostArrays(&job_, &layout_, 0, host_backend_.get()), codecs_);
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> gradient(options.bucket_elements);
    for (float& g : gradient) g = normal(random);
    for (uint32_t b = 0; b < layout_.bucket_count(); ++b) {
      std::vector<RunInput> runs;
      const BucketLayout& layout = layout_.at(b, 0);
      for (size_t r = 0; r < layout.runs.size(); ++r)
        runs.push_back({gradient.data() + layout.run_begin[r], nullptr, {}});
      frames_.push_back(Must(codecs_[b]->NewEncoder()->Encode(Identity(b), {}, runs)));
      bytes_ += frames_.back().bytes;
    }
    pinned_ = runtime_.AllocatePinned(kPieceBytes);
    target_ = runtime_.Allocate(options.threads * kPieceBytes, nullptr);
    if (pinned_ == nullptr || target_ == nullptr) Must(absl::ResourceExhaustedError("no memory for the copy"));
    for (uint32_t t = 0; t < options.threads; ++t) streams_.push_back(runtime_.NewStream());
  }
  ~PushBench() {
    for (kernels::Stream* stream : streams_) runtime_.DeleteStream(stream);
    runtime_.Free(target_, nullptr);
    runtime_.FreePinned(pinned_);
  }
  PushBench(const PushBench&) = delete;
  PushBench& operator=(const PushBench&) = delete;

  // Seconds.
  double Copies() {
    return Timed([this](uint32_t thread, uint32_t bucket) {
      uint8_t* const to = static_cast<uint8_t*>(target_) + thread * kPieceBytes;
      for (uint64_t sent = 0; sent < frames_[bucket].bytes; sent += kPieceBytes) {
        runtime_.ToDevice(to, pinned_, std::min(kPieceBytes, frames_[bucket].bytes - sent), streams_[thread]);
      }
      runtime_.Synchronize(streams_[thread]);
    });
  }
  double Parses() {
    return Timed([this](uint32_t, uint32_t bucket) {
      thread_local std::vector<uint8_t> scratch;
      for (const Bytes& bytes : frames_[bucket].chunks) Must(wire::ParseReceived({&bytes, 1}, &scratch));
    });
  }
  double Pushes(bool device) {
    return Timed([&](uint32_t, uint32_t bucket) { On(device).Push(bucket, frames_[bucket]); });
  }
  double Rounds(bool device) {
    return Timed([&](uint32_t, uint32_t bucket) { On(device).Round(bucket, frames_[bucket]); });
  }
  double bytes() const { return static_cast<double>(bytes_); }

 private:
  static constexpr uint64_t kPieceBytes = 1u << 20;

  Shard& On(bool device) { return device ? *on_device_ : *on_host_; }

  // fn(thread, bucket) for every bucket, by all threads.
  template <class F>
  double Timed(F fn) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < options_.threads; ++t) {
      threads.emplace_back([&, t] {
        for (uint32_t b = t; b < layout_.bucket_count(); b += options_.threads) fn(t, b);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  const PushOptions options_;
  DeviceRuntime& runtime_;
  const Job job_;
  const Layout layout_;
  const std::unique_ptr<kernels::Backend> host_backend_;
  const std::unique_ptr<DeviceShare> share_;
  std::vector<std::unique_ptr<Codec>> codecs_;
  std::optional<Shard> on_device_;
  std::optional<Shard> on_host_;
  std::vector<EncodedFrame> frames_;
  uint64_t bytes_ = 0;
  void* pinned_ = nullptr;
  void* target_ = nullptr;
  std::vector<kernels::Stream*> streams_;
};

}  // namespace

void MeasurePushes(AsyncBackend& backend, const PushOptions& options, Report& report) {
  PushBench bench(backend, options);
  struct Case {
    const char* name;
    std::function<double()> run;
    std::optional<double> target;  // of the ratio to the copies
  };
  const std::vector<Case> cases = {
      {"copy, pinned memory to the device", [&] { return bench.Copies(); }, {}},
      {"chunks parsed and checked", [&] { return bench.Parses(); }, {}},
      {"server: dense fp32 chunks to sums", [&] { return bench.Pushes(true); }, 0.85},
      {"server: whole rounds, AdamW", [&] { return bench.Rounds(true); }, {}},
      {"the same sums on the CPU", [&] { return bench.Pushes(false); }, {}},
      {"the same rounds on the CPU", [&] { return bench.Rounds(false); }, {}},
  };
  std::vector<std::function<double()>> runs;
  for (const Case& c : cases) runs.push_back(c.run);
  std::vector<std::vector<double>> rates = Interleave(options.rounds, runs);
  for (std::vector<double>& of : rates) {
    for (double& rate : of) rate = bench.bytes() / rate * 1e-9;
  }
  for (size_t c = 0; c < cases.size(); ++c) {
    const std::string name = absl::StrFormat("%s, %d threads", cases[c].name, options.threads);
    if (c == 0) {
      report.Add({name, Median(rates[c]), "GB/s", {}, "", {}, false});
    } else {
      report.Add(
          {name, Median(rates[c]), "GB/s", MedianRatio(rates[c], rates[0]), "that copy", cases[c].target, false});
    }
  }
}

}  // namespace gradwire::bench
