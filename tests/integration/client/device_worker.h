// A worker whose tensors lie on a device: what it computes is launched on a stream of its own, and never waited for.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/async_backend.h"
#include "tests/integration/client/cluster.h"
#include "tests/integration/client/device_backends.h"

namespace gradwire::testing {

inline std::shared_ptr<Device> MakeDevice(const NamedBackend& backend) {
  std::shared_ptr<kernels::Backend> made = backend.make();
  return {made, made->async()};
}

class DeviceWorker {
 public:
  DeviceWorker(const v1::JobSpec& spec, int index, std::shared_ptr<Device> device)
      : host_(spec, index), device_(std::move(device)), stream_(device_->runtime().NewStream()) {
    for (const std::vector<float>& values : host_.parameters()) {
      for (std::vector<float*>* arrays : {&parameters_, &gradients_, &seen_})
        arrays->push_back(static_cast<float*>(runtime().Allocate(Bytes(values), stream_)));
      runtime().ToDevice(parameters_.back(), values.data(), Bytes(values), stream_);
    }
  }
  ~DeviceWorker() {
    session_.reset();
    for (const std::vector<float*>* arrays : {&parameters_, &gradients_, &seen_})
      for (float* array : *arrays) runtime().Free(array, stream_);
    runtime().Synchronize(stream_);
    runtime().DeleteStream(stream_);
  }
  DeviceWorker(const DeviceWorker&) = delete;
  DeviceWorker& operator=(const DeviceWorker&) = delete;

  SessionOptions Options(const std::vector<std::string>& servers, PullMode pull = PullMode::kUpdate) {
    SessionOptions options = host_.Options(servers, pull);
    for (size_t t = 0; t < parameters_.size(); ++t) options.memory[t] = {parameters_[t], options.memory[t].size()};
    options.place.device = device_;
    options.place.stream = stream_;
    return options;
  }
  absl::Status JoinWith(SessionOptions options) { return JoinInto(&session_, std::move(options)); }

  // The gradients of a host worker with this index and these parameters.
  void Fill(uint64_t step) {
    for (size_t t = 0; t < parameters_.size(); ++t) Read(parameters_[t], &host_.parameters()[t]);
    host_.Fill(step);
  }

  // One round, after which the gradients are overwritten at once. What the training loop launched before EndRound still
  // reads the parameters as they were.
  absl::Status Step(float lr) {
    const std::vector<float> rates = {lr};
    absl::Status status = session_->BeginRound(rates);
    for (size_t t = parameters_.size(); t-- > 0 && status.ok();) {
      const std::vector<float>& gradient = host_.gradients()[t];
      runtime().ToDevice(gradients_[t], gradient.data(), Bytes(gradient), stream_);
      status = session_->TensorReady(static_cast<uint32_t>(t), gradients_[t], stream_);
    }
    for (size_t t = 0; t < parameters_.size(); ++t)
      runtime().Copy(seen_[t], parameters_[t], Bytes(host_.parameters()[t]), stream_);
    if (status.ok()) status = session_->EndRound(-1, stream_);
    for (size_t t = 0; t < parameters_.size(); ++t) {
      runtime().Fill(gradients_[t], 0xFF, Bytes(host_.parameters()[t]), stream_);
      std::vector<float> seen(host_.parameters()[t].size());
      Read(seen_[t], &seen);
      EXPECT_EQ(seen, host_.parameters()[t]) << "parameters changed before the step ended";
    }
    return status;
  }

  Worker& host() { return host_; }
  Session& session() { return *session_; }
  void Drop() { session_.reset(); }

 private:
  static size_t Bytes(const std::vector<float>& values) { return values.size() * sizeof(float); }
  kernels::cuda::DeviceRuntime& runtime() { return device_->runtime(); }
  void Read(const float* from, std::vector<float>* to) { runtime().ToHost(to->data(), from, Bytes(*to), stream_); }

  Worker host_;  // makes the gradients
  std::shared_ptr<Device> device_;
  Stream* stream_;
  // In device memory, per tensor.
  std::vector<float*> parameters_;
  std::vector<float*> gradients_;
  std::vector<float*> seen_;
  std::unique_ptr<Session> session_;
};

}  // namespace gradwire::testing
