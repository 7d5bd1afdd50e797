// See bench_pushes.h.
#include "tests/gpu/device/bench_pushes.h"

#include <chrono>
#include <memory>
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

class PushBench {
 public:
  PushBench(AsyncBackend& backend, const PushOptions& options)
      : options_(options),
        runtime_(backend.runtime()),
        job_(Must(Job::Make(SpecOf(options)))),
        layout_(Must(Layout::Make(job_, 1))),
        host_(Must(kernels::MakeBackend("cpu"))),
        share_(Must(DeviceShare::Make(&backend, {}))) {
    uint64_t device_bytes = 0;
    for (uint32_t b = 0; b < layout_.bucket_count(); ++b) {
      codecs_.push_back(Must(MakeCodec({&job_, &layout_.at(b, 0), host_.get()})));
      device_bytes += DeviceBytes(job_, layout_.at(b, 0), codecs_.back().get());
    }
    arrays_ = Must(MakeDeviceArrays(&job_, &layout_, 0, codecs_, share_.get(), device_bytes));
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> gradient(options.bucket_elements);
    for (float& g : gradient) g = normal(random);
    for (uint32_t b = 0; b < layout_.bucket_count(); ++b) {
      stores_.push_back(Must(arrays_->NewStore(b)));
      accumulators_.push_back(Must(arrays_->NewAccumulator(b, *codecs_[b])));
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
  double Pushes() {
    return Timed([this](uint32_t, uint32_t bucket) { Push(bucket); });
  }
  double Rounds() {
    return Timed([this](uint32_t, uint32_t bucket) {
      Push(bucket);
      Must(stores_[bucket]->Apply(Must(accumulators_[bucket]->Finish(Identity(bucket), 1)), {}));
    });
  }
  double bytes() const { return static_cast<double>(bytes_); }

 private:
  static constexpr uint64_t kPieceBytes = 1u << 20;

  FrameIdentity Identity(uint32_t bucket) const { return {0, bucket, 1, 1, {&kLearningRate, 1}}; }

  // One frame, chunk by chunk.
  void Push(uint32_t bucket) {
    thread_local std::vector<uint8_t> scratch;
    Accumulator& accumulator = *accumulators_[bucket];
    accumulator.Open(1, {});
    const std::unique_ptr<FrameMerge> frame = accumulator.NewFrameMerge();
    for (const Bytes& bytes : frames_[bucket].chunks) {
      const wire::Chunk chunk = Must(wire::ParseReceived({&bytes, 1}, &scratch));
      for (const wire::Segment& s : chunk.segments) {
        if (s.type != wire::SegmentType::kLearningRates) Must(frame->Add(s));
      }
    }
    Must(frame->Settle());
  }

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

  static constexpr float kLearningRate = 1e-3f;

  const PushOptions options_;
  DeviceRuntime& runtime_;
  const Job job_;
  const Layout layout_;
  const std::unique_ptr<kernels::Backend> host_;
  const std::unique_ptr<DeviceShare> share_;
  std::vector<std::unique_ptr<Codec>> codecs_;
  std::unique_ptr<JobArrays> arrays_;
  std::vector<std::unique_ptr<ParameterStore>> stores_;
  std::vector<std::unique_ptr<Accumulator>> accumulators_;
  std::vector<EncodedFrame> frames_;
  uint64_t bytes_ = 0;
  void* pinned_ = nullptr;
  void* target_ = nullptr;
  std::vector<kernels::Stream*> streams_;
};

}  // namespace

void MeasurePushes(AsyncBackend& backend, const PushOptions& options, Report& report) {
  PushBench bench(backend, options);
  const auto seconds = Interleave(
      options.rounds, {[&] { return bench.Copies(); }, [&] { return bench.Pushes(); }, [&] { return bench.Rounds(); }});
  std::vector<double> rates[3];
  for (size_t c = 0; c < 3; ++c) {
    for (double s : seconds[c]) rates[c].push_back(bench.bytes() / s * 1e-9);
  }
  const std::string threads = absl::StrFormat(", %d threads", options.threads);
  report.Add({"copy, pinned memory to the device" + threads, Median(rates[0]), "GB/s", {}, "", {}, false});
  report.Add({"server: dense fp32 chunks to sums" + threads, Median(rates[1]), "GB/s", MedianRatio(rates[1], rates[0]),
              "that copy", 0.85, false});
  report.Add({"server: whole rounds, AdamW" + threads,
              Median(rates[2]),
              "GB/s",
              MedianRatio(rates[2], rates[0]),
              "that copy",
              {},
              false});
}

}  // namespace gradwire::bench
