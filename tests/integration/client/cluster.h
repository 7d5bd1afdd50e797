// Shard servers and workers in one process, for tests of the client library.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/base/clock.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "gradwire/session.h"
#include "gtest/gtest.h"
#include "server/daemon.h"
#include "spdlog/spdlog.h"

namespace gradwire::testing {

// Daemons, one per shard.
class Cluster {
 public:
  using MakeBackendFn = std::function<std::unique_ptr<kernels::Backend>()>;

  // `scheme`: "inproc", "grpc" or "tcp". `backend`: of each shard server; empty: the default one. `data_root`: shard i
  // keeps its durable jobs in folder i there; empty: there can be none.
  Cluster(uint32_t shards, const std::string& scheme, const MakeBackendFn& backend = {},
          uint64_t device_memory_limit_bytes = 0, const std::string& data_root = "") {
    static std::atomic<int> counter{0};
    spdlog::set_level(spdlog::level::err);
    for (uint32_t s = 0; s < shards; ++s) {
      ServerConfig config;
      config.listen = {scheme == "inproc" ? absl::StrCat("inproc://client-test-", counter.fetch_add(1))
                                          : absl::StrCat(scheme, "://127.0.0.1:0")};
      config.device_memory_limit_bytes = device_memory_limit_bytes;
      if (!data_root.empty()) config.data_dir = absl::StrCat(data_root, "/", s);
      EXPECT_TRUE(config.Validate().ok());
      auto daemon = backend ? Daemon::Start(config, &clock_, backend()) : Daemon::Start(config, &clock_);
      EXPECT_TRUE(daemon.ok()) << daemon.status();
      if (!daemon.ok()) continue;
      addresses_.push_back((*daemon)->addresses()[0]);
      daemons_.push_back(*std::move(daemon));
    }
  }

  const std::vector<std::string>& addresses() const { return addresses_; }
  void Kill(uint32_t shard) { daemons_[shard].reset(); }
  // After Kill: an empty server at the same address.
  void Restart(uint32_t shard) {
    ServerConfig config;
    config.listen = {addresses_[shard]};
    EXPECT_TRUE(config.Validate().ok());
    auto daemon = Daemon::Start(config, &clock_);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemons_[shard] = *std::move(daemon);
  }
  bool HasJob(uint32_t shard, const std::string& job) { return daemons_[shard]->registry().Find(job).ok(); }
  // Members of the job, and those that wait to be.
  int Workers(uint32_t shard, const std::string& job) { return Describe(shard, job).workers_size(); }
  absl::Status Delete(uint32_t shard, const std::string& job) { return daemons_[shard]->registry().Delete(job); }
  // The job before anybody joins it.
  std::shared_ptr<JobShard> Create(const v1::JobSpec& spec, uint32_t shard, uint32_t shards) {
    auto job = daemons_[shard]->registry().GetOrCreate(spec, shard, shards, 0);
    EXPECT_TRUE(job.ok()) << job.status();
    return *job;
  }
  // Empty where the job does not exist (yet).
  v1::JobStatus Describe(uint32_t shard, const std::string& job) {
    auto found = daemons_[shard]->registry().Find(job);
    return found.ok() ? (*found)->Describe(true, false) : v1::JobStatus();
  }
  std::string ParametersSha256(uint32_t shard, const std::string& job) {
    auto found = daemons_[shard]->registry().Find(job);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? (*found)->Describe(false, true).parameters_sha256() : "";
  }

 private:
  SteadyClock clock_;
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<Daemon>> daemons_;
};

// A model with every kind of tensor: larger than a run, odd, tiny, scalar. Just large enough for a session to use
// threads; see Small.
inline v1::JobSpec MakeSpec(const std::string& name, const std::string& codec, v1::OptimizerKind optimizer,
                            uint32_t workers) {
  v1::JobSpec spec;
  spec.set_name(name);
  const std::vector<std::pair<std::string, std::vector<uint64_t>>> tensors = {
      {"embed.weight", {97, 31}},    {"h.0.attn.weight", {64, 65}}, {"h.0.ln.weight", {65}},
      {"h.0.mlp.weight", {129, 33}}, {"h.0.mlp.bias", {129}},       {"scale", {}},
      {"head.weight", {31, 97}},     {"tail.weight", {53, 37}}};
  for (const auto& [tensor_name, shape] : tensors) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(tensor_name);
    for (uint64_t d : shape) tensor->add_shape(d);
  }
  spec.mutable_optimizer()->set_kind(optimizer);
  spec.mutable_optimizer()->add_groups()->set_weight_decay(optimizer == v1::OPTIMIZER_NONE ? 0.0f : 0.01f);
  if (optimizer == v1::OPTIMIZER_STEP) spec.set_push(v1::PUSH_STEP);
  spec.set_codec(codec);
  spec.set_min_workers(workers);
  spec.set_max_workers(workers);
  spec.set_bucket_bytes(16 << 10);
  spec.set_slice_bytes(12 << 10);  // more than a shard's share of a bucket: slices are few
  spec.set_run_elements(256);
  spec.set_lease_ms(2000);
  return spec;
}

// The same without its last tensor: a session exchanges it on the threads of its callers.
inline v1::JobSpec Small(v1::JobSpec spec) {
  spec.mutable_tensors()->RemoveLast();
  return spec;
}

// Joins a job with the session, which takes the place of an earlier one.
inline absl::Status JoinInto(std::unique_ptr<Session>* session, SessionOptions options) {
  auto joined = Session::Join(std::move(options));
  if (!joined.ok()) return joined.status();
  *session = *std::move(joined);
  return absl::OkStatus();
}

// What a job with any form of TAGC's frames is compared with: no bit may tell.
inline v1::JobSpec OfLists(v1::JobSpec spec) {
  spec.set_codec(absl::StrReplaceAll(spec.codec(), {{"form=sketch", "form=list"}}));
  return spec;
}

// A worker: its tensors, its gradients, its session.
class Worker {
 public:
  Worker(const v1::JobSpec& spec, int index) : spec_(spec), index_(index), random_(1000 + index) {
    auto job = Job::Make(spec);
    EXPECT_TRUE(job.ok()) << job.status();
    std::mt19937 init(7);  // every worker starts with the same values
    std::normal_distribution<float> normal(0, 0.1f);
    for (const Tensor& tensor : job->tensors()) {
      parameters_.emplace_back(tensor.elements);
      gradients_.emplace_back(tensor.elements);
      for (float& x : parameters_.back()) x = normal(init);
    }
  }

  SessionOptions Options(const std::vector<std::string>& servers, PullMode pull = PullMode::kUpdate) {
    SessionOptions options;
    options.servers = servers;
    options.job = spec_;
    options.worker = absl::StrCat("worker-", index_);
    options.pull = pull;
    for (auto& p : parameters_) options.memory.push_back(p);
    options.timeouts.round_ms = 60'000;
    options.timeouts.start_ms = 60'000;
    options.encode_threads = 1 + static_cast<uint32_t>(index_) % 3;  // the same bits with any number
    return options;
  }

  absl::Status Join(const std::vector<std::string>& servers, PullMode pull = PullMode::kUpdate) {
    return JoinWith(Options(servers, pull));
  }
  absl::Status JoinWith(SessionOptions options) { return JoinInto(&session_, std::move(options)); }

  // Gradients that depend on worker, step and the parameters, so that an error anywhere spreads.
  void Fill(uint64_t step) { FillAs(index_, step); }
  // Those of every other step are all workers' alike, so that sketches of the next, which are as large as what these
  // touch together, have no room for all, and frames hold a sketch and lists.
  void FillMixed(uint64_t step) { FillAs(step % 2 == 0 ? 0 : index_, step); }

  // The same without the parameters.
  void FillApart(uint64_t step) {
    std::mt19937 random(static_cast<uint32_t>(step * 37 + static_cast<uint64_t>(index_)));
    std::normal_distribution<float> normal(0, 0.05f);
    for (auto& gradient : gradients_)
      for (float& x : gradient) x = normal(random);
  }

  // One round; tensors get ready in a random order.
  absl::Status Step(float lr) {
    const std::vector<float> rates = {lr};
    absl::Status status = session_->BeginRound(rates);
    std::vector<uint32_t> order(gradients_.size());
    for (uint32_t t = 0; t < order.size(); ++t) order[t] = t;
    std::shuffle(order.begin(), order.end(), random_);
    for (uint32_t t : order)
      if (status.ok()) status = session_->TensorReady(t, gradients_[t].data());
    return status.ok() ? session_->EndRound() : status;
  }

  Session& session() { return *session_; }
  void Drop() { session_.reset(); }
  std::vector<std::vector<float>>& parameters() { return parameters_; }
  std::vector<std::vector<float>>& gradients() { return gradients_; }

 private:
  void FillAs(int index, uint64_t step) {
    std::mt19937 random(static_cast<uint32_t>(step * 31 + static_cast<uint64_t>(index)));
    std::normal_distribution<float> normal(0, 0.05f);
    for (size_t t = 0; t < gradients_.size(); ++t)
      for (size_t i = 0; i < gradients_[t].size(); ++i) gradients_[t][i] = 0.3f * parameters_[t][i] + normal(random);
  }

  v1::JobSpec spec_;
  int index_;
  std::mt19937 random_;
  std::vector<std::vector<float>> parameters_;
  std::vector<std::vector<float>> gradients_;
  std::unique_ptr<Session> session_;
};

// A learning rate that falls every ten steps.
inline float FallingRate(uint64_t step) {
  const uint64_t tens = step / 10;
  return 0.01f / static_cast<float>(1 + tens);
}

// Runs `body(worker)` for every index on its own thread.
inline void InParallel(int workers, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int w = 0; w < workers; ++w) threads.emplace_back([&body, w] { body(w); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace gradwire::testing
