// Sessions whose tensors lie on a device, beside others in one job: the bits of sessions in host memory.
#include <gmock/gmock.h>

#include <cstdio>
#include <limits>
#include <set>

#include "tests/integration/client/device_worker.h"
#include "tests/integration/client/train.h"

namespace gradwire::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// AddressSanitizer sees all of the code in fewer rounds, and takes long over each.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kSessionRounds = 25;
#else
constexpr int kSessionRounds = 100;
#endif

struct Outcome {
  std::set<std::string> digests;
  std::set<std::vector<std::string>> shards;
  uint64_t deferred = 0;
};

// Worker 0 has its tensors in host memory, worker 1 on `device`, or in host memory as well where there is none.
Outcome TrainBeside(const v1::JobSpec& spec, const std::shared_ptr<Device>& device, PullMode pull = PullMode::kUpdate) {
  Cluster cluster(2, "inproc");
  Outcome outcome;
  absl::Mutex mu;
  const auto train = [&](auto& worker) {
    for (int round = 0; round < kSessionRounds; ++round) {
      worker.Fill(static_cast<uint64_t>(round));
      const absl::Status status = worker.Step(FallingRate(static_cast<uint64_t>(round)));
      ASSERT_TRUE(status.ok()) << status;
    }
    const absl::Status drained = worker.session().Drain();
    ASSERT_TRUE(drained.ok()) << drained;
    absl::MutexLock lock(&mu);
    outcome.digests.insert(worker.session().Digest());
    outcome.shards.insert(worker.session().ShardDigests());
    outcome.deferred += worker.session().stats().deferred_elements;
  };
  InParallel(2, [&](int w) {
    if (w == 0 || device == nullptr) {
      Worker worker(spec, w);
      const absl::Status joined = worker.Join(cluster.addresses(), pull);
      ASSERT_TRUE(joined.ok()) << joined;
      return train(worker);
    }
    DeviceWorker worker(spec, w, device);
    const absl::Status joined = worker.JoinWith(worker.Options(cluster.addresses(), pull));
    ASSERT_TRUE(joined.ok()) << joined;
    train(worker);
  });
  return outcome;
}

void ExpectBitsOfTheHost(const v1::JobSpec& spec, bool defers = false, PullMode pull = PullMode::kUpdate) {
  const Outcome expected = TrainBeside(spec, nullptr, pull);
  ASSERT_EQ(expected.digests.size(), 1u);
  for (const NamedBackend& backend : DeviceBackends()) {
    SCOPED_TRACE(backend.name);
    const Outcome found = TrainBeside(spec, MakeDevice(backend), pull);
    EXPECT_EQ(found.digests, expected.digests);
    EXPECT_EQ(found.shards, expected.shards);
    EXPECT_EQ(found.deferred, expected.deferred);
    EXPECT_EQ(found.deferred > 0, defers);
  }
}

class DeviceSession : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceSession, HasTheBitsOfTheHost) {
  const v1::JobSpec large = MakeSpec("beside", GetParam().codec, GetParam().optimizer, 2);
  ExpectBitsOfTheHost(GetParam().small ? Small(large) : large, GetParam().defers);
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, DeviceSession,
    ::testing::Values(Case{"AdamWFp32", "dense:values=fp32", v1::OPTIMIZER_ADAMW},
                      Case{"SgdBf16", "dense:values=bf16", v1::OPTIMIZER_SGD},
                      Case{"AdamWFixed32", "dense:values=fixed32", v1::OPTIMIZER_ADAMW},
                      Case{"SgdFixed16", "dense:values=fixed16", v1::OPTIMIZER_SGD},
                      Case{"StepFp32", "dense:values=fp32", v1::OPTIMIZER_STEP},
                      Case{"AdamWTagc", "tagc:density=0.05,slack=4", v1::OPTIMIZER_ADAMW},
                      Case{"DecayedStepTagc", "tagc:density=0.05,form=sketch,slack=8", v1::OPTIMIZER_STEP},
                      Case{"StepTagcOverloaded", "tagc:density=0.05,form=sketch,slack=0.7", v1::OPTIMIZER_STEP, true},
                      Case{"SmallStepTagc", "tagc:density=0.05,slack=8", v1::OPTIMIZER_STEP, false, true}),
    NameOfCase);

// Touches only what was sent.
TEST(DeviceSessions, SparseStepsWithoutDecay) {
  v1::JobSpec spec = MakeSpec("sparse", "tagc:density=0.05,slack=8", v1::OPTIMIZER_STEP, 2);
  spec.mutable_optimizer()->mutable_groups(0)->set_weight_decay(0);
  ExpectBitsOfTheHost(spec);
}

TEST(DeviceSessions, UpdatesThatTheShardsCompressed) {
  v1::JobSpec spec = MakeSpec("two-way", "tagc:density=0.05,slack=8", v1::OPTIMIZER_STEP, 2);
  spec.set_update_codec("topk:density=0.02,values=fp16");
  ExpectBitsOfTheHost(spec);
}

TEST(DeviceSessions, OtherPullModes) {
  ExpectBitsOfTheHost(MakeSpec("params", "tagc:density=0.05,slack=8", v1::OPTIMIZER_STEP, 2), false, PullMode::kParams);
  // Norms are the shards' business here.
  ExpectBitsOfTheHost(MakeSpec("lamb", "dense:values=fp32", v1::OPTIMIZER_LAMB, 2), false, PullMode::kParamsBf16);
  for (const char* codec : {"dense:values=fp32", "dense:values=fixed32", "tagc:density=0.05,slack=8"})
    ExpectBitsOfTheHost(MakeSpec("mean", codec, v1::OPTIMIZER_NONE, 2), false, PullMode::kMean);
}

TEST(DeviceSessions, BoundedStaleness) {
  v1::JobSpec spec = MakeSpec("bounded", "tagc:density=0.05,slack=4", v1::OPTIMIZER_ADAMW, 2);
  spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
  spec.mutable_rounds()->set_staleness(2);
  for (const NamedBackend& backend : DeviceBackends()) {
    SCOPED_TRACE(backend.name);
    // Gradients depend on the versions that had come, so runs differ; replicas do not.
    EXPECT_EQ(TrainBeside(spec, MakeDevice(backend)).digests.size(), 1u);
  }
}

TEST(DeviceSessions, AsynchronousRounds) {
  for (const NamedBackend& backend : DeviceBackends()) {
    SCOPED_TRACE(backend.name);
    std::set<std::string> digests;
    for (const bool on_device : {false, true}) {
      v1::JobSpec spec = MakeSpec("async", "tagc:density=0.05,form=sketch,slack=0.8", v1::OPTIMIZER_STEP, 1);
      spec.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
      Cluster cluster(2, "inproc");
      const auto train = [&](auto& worker) {
        for (int round = 0; round < kSessionRounds; ++round) {
          worker.Fill(static_cast<uint64_t>(round));
          const absl::Status status = worker.Step(FallingRate(static_cast<uint64_t>(round)));
          ASSERT_TRUE(status.ok()) << status;
        }
        digests.insert(worker.session().Digest());
      };
      if (on_device) {
        DeviceWorker worker(spec, 0, MakeDevice(backend));
        const absl::Status joined = worker.JoinWith(worker.Options(cluster.addresses(), PullMode::kParams));
        ASSERT_TRUE(joined.ok()) << joined;
        train(worker);
      } else {
        Worker worker(spec, 0);
        ASSERT_TRUE(worker.Join(cluster.addresses(), PullMode::kParams).ok());
        train(worker);
      }
    }
    EXPECT_EQ(digests.size(), 1u);
  }
}

// A checkpoint does not say where the tensors lay: it is resumed where they lie now.
TEST(DeviceSessions, ResumeFromCheckpointsOfEither) {
  const std::string path = ::testing::TempDir() + "/device-session-checkpoint";
  const v1::JobSpec spec = MakeSpec("resumed", "tagc:density=0.05,form=sketch,slack=0.8", v1::OPTIMIZER_STEP, 1);
  std::set<std::string> digests;
  for (const bool first_on_device : {false, true}) {
    for (const bool then_on_device : {false, true}) {
      Cluster cluster(2, "inproc");
      DeviceWorker device(spec, 0, MakeDevice(DeviceBackends().front()));
      Worker host(spec, 0);
      const auto run = [&](bool on_device, int from, int to, const std::string& resume_from) {
        SessionOptions options = on_device ? device.Options(cluster.addresses()) : host.Options(cluster.addresses());
        options.resume.from = resume_from;
        const auto train = [&](auto& worker) {
          const absl::Status joined = worker.JoinWith(std::move(options));
          ASSERT_TRUE(joined.ok()) << joined;
          for (int round = from; round < to; ++round) {
            worker.Fill(static_cast<uint64_t>(round));
            const absl::Status status = worker.Step(FallingRate(static_cast<uint64_t>(round)));
            ASSERT_TRUE(status.ok()) << status;
          }
          const absl::Status saved = worker.session().Save(path);
          ASSERT_TRUE(saved.ok()) << saved;
          digests.insert(absl::StrCat(to, " ", worker.session().Digest()));
          worker.Drop();
        };
        on_device ? train(device) : train(host);
      };
      run(first_on_device, 0, 15, "");
      run(then_on_device, 15, 30, path);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_EQ(digests.size(), 2u) << "one each after 15 and after 30 rounds";
  std::remove(path.c_str());
}

TEST(DeviceSessions, NonFiniteGradientsAreRefusedOrSanitizedOrSkipTheRound) {
  for (const v1::NonFinitePolicy policy : {v1::NONFINITE_REFUSE, v1::NONFINITE_SANITIZE, v1::NONFINITE_SKIP}) {
    const bool refuses = policy == v1::NONFINITE_REFUSE;
    for (const std::string codec : {"dense:values=fp32", "dense:values=fixed32", "tagc:density=0.05,slack=8"}) {
      SCOPED_TRACE(codec);
      std::set<std::string> digests;
      std::set<std::string> messages;
      for (const bool on_device : {false, true}) {
        v1::JobSpec spec = MakeSpec("bad", codec, v1::OPTIMIZER_STEP, 1);
        spec.set_nonfinite(policy);
        Cluster cluster(1, "inproc");
        const auto train = [&](auto& worker, Worker& gradients) {
          for (int round = 0; round < 6; ++round) {
            worker.Fill(static_cast<uint64_t>(round));
            if (round % 2 == 1) {
              gradients.gradients()[3][77] = std::numeric_limits<float>::quiet_NaN();
              gradients.gradients()[3][78] = -1e6f;
              gradients.gradients()[3][79] = std::numeric_limits<float>::infinity();
            }
            const absl::Status status = worker.Step(0.01f);
            EXPECT_EQ(status.code(),
                      refuses && round % 2 == 1 ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kOk);
            messages.insert(status.ToString());
          }
          EXPECT_EQ(worker.session().stats().sanitized_elements, policy == v1::NONFINITE_SANITIZE ? 9u : 0u);
          EXPECT_EQ(worker.session().stats().nonfinite_rounds, policy == v1::NONFINITE_SKIP ? 3u : 0u);
          digests.insert(worker.session().Digest());
        };
        if (on_device) {
          DeviceWorker worker(spec, 0, MakeDevice(DeviceBackends().back()));
          ASSERT_TRUE(worker.JoinWith(worker.Options(cluster.addresses())).ok());
          train(worker, worker.host());
        } else {
          Worker worker(spec, 0);
          ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
          train(worker, worker);
        }
      }
      EXPECT_EQ(digests.size(), 1u);
      EXPECT_EQ(messages.size(), refuses ? 4u : 1u) << ::testing::PrintToString(messages);
    }
  }
}

TEST(DeviceSessions, WhatADeviceHasNotIsSaidAtTheJoin) {
  Cluster cluster(1, "inproc");
  const std::shared_ptr<Device> device = MakeDevice(DeviceBackends().front());
  const auto joined = [&](const v1::JobSpec& spec) {
    DeviceWorker worker(spec, 0, device);
    return worker.JoinWith(worker.Options(cluster.addresses()));
  };
  const absl::Status codec = joined(MakeSpec("topk", "topk:density=0.05", v1::OPTIMIZER_STEP, 1));
  EXPECT_EQ(codec.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(codec.message()), AllOf(HasSubstr("job '"), HasSubstr("codec topk"),
                                                  HasSubstr("tagc and dense"), HasSubstr("host memory")));
  const absl::Status norms = joined(MakeSpec("lamb", "dense:values=fp32", v1::OPTIMIZER_LAMB, 1));
  EXPECT_EQ(norms.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(norms.message()), AllOf(HasSubstr("lamb"), HasSubstr("use pull params")));
  EXPECT_FALSE(cluster.HasJob(0, "lamb"));
  v1::JobSpec large = MakeSpec("large", "dense:values=fp32", v1::OPTIMIZER_ADAMW, 1);
  DeviceWorker bad(large, 0, device);
  SessionOptions options = bad.Options(cluster.addresses());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  device->runtime().ToDevice(options.memory[1].data() + 9, &nan, sizeof(nan), options.place.stream);
  const absl::Status not_finite = bad.JoinWith(std::move(options));
  EXPECT_EQ(not_finite.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(not_finite.message()), HasSubstr("parameter 9 of tensor 'h.0.attn.weight' is nan"));
}

}  // namespace
}  // namespace gradwire::testing
