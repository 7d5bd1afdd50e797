// Shard servers whose jobs lie on a device: their parameters have the bits of servers that compute on the CPU.
#include <gmock/gmock.h>

#include "tests/integration/client/device_backends.h"
#include "tests/integration/client/train.h"

namespace gradwire::testing {
namespace {

class DeviceDigest : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceDigest, IsThatOfTheCpu) {
  for (uint32_t shards : {1u, 2u}) {
    std::set<std::string> digests;
    Cluster cpu(shards, "inproc");
    digests.merge(Train(GetParam(), "job", cpu, 2, DeviceRounds()));
    std::string scheme = "grpc";
    for (const NamedBackend& backend : DeviceBackends()) {
      SCOPED_TRACE(backend.name);
      Cluster device(shards, scheme, backend.make);
      digests.merge(Train(GetParam(), "job", device, 2, DeviceRounds()));
      scheme = "inproc";
    }
    EXPECT_EQ(digests.size(), 1u) << shards << " shards: the device has other bits than the CPU";
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, DeviceDigest,
                         ::testing::Values(Case{"AdamWFp32", "dense:values=fp32", v1::OPTIMIZER_ADAMW},
                                           Case{"AdamWBf16", "dense:values=bf16", v1::OPTIMIZER_ADAMW},
                                           Case{"AdamWFixed32", "dense:values=fixed32", v1::OPTIMIZER_ADAMW},
                                           Case{"SgdFixed16", "dense:values=fixed16", v1::OPTIMIZER_SGD},
                                           Case{"SgdFp32", "dense:values=fp32", v1::OPTIMIZER_SGD},
                                           Case{"StepFixed32", "dense:values=fixed32", v1::OPTIMIZER_STEP},
                                           Case{"AdamWTagc", "tagc:density=0.05,slack=4", v1::OPTIMIZER_ADAMW},
                                           Case{"SgdTagc", "tagc:density=0.05,form=sketch,slack=4", v1::OPTIMIZER_SGD},
                                           Case{"AdamWTernGrad", "terngrad", v1::OPTIMIZER_ADAMW},
                                           Case{"AdamWThc", "thc:bits=4", v1::OPTIMIZER_ADAMW},
                                           Case{"StepTopK", "topk:density=0.05", v1::OPTIMIZER_STEP},
                                           Case{"DecayedStepTagc", "tagc:density=0.05,slack=8", v1::OPTIMIZER_STEP},
                                           Case{"StepTagcOverloaded", "tagc:density=0.05,form=sketch,slack=0.7",
                                                v1::OPTIMIZER_STEP, true}),
                         NameOfCase);

// Without weight decay a device touches only what was sent.
TEST(DeviceJob, SparseStepsAreThoseOfTheCpu) {
  std::set<std::string> digests;
  for (const bool on_device : {false, true}) {
    Cluster cluster(1, "inproc", on_device ? DeviceBackends().front().make : Cluster::MakeBackendFn{});
    v1::JobSpec spec = MakeSpec("sparse", "tagc:density=0.05", v1::OPTIMIZER_STEP, 1);
    spec.mutable_optimizer()->mutable_groups(0)->set_weight_decay(0);
    Worker worker(spec, 0);
    ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
    for (uint64_t step = 0; step < 20; ++step) {
      worker.Fill(step);
      ASSERT_TRUE(worker.Step(0.01f).ok());
    }
    EXPECT_EQ(worker.session().ShardDigests()[0], cluster.ParametersSha256(0, "sparse"));
    digests.insert(worker.session().Digest());
  }
  EXPECT_EQ(digests.size(), 1u);
}

TEST(DeviceJob, ParametersStateAndMeansCanBePulled) {
  for (const std::string codec : {"dense:values=fp32", "tagc:density=0.05"}) {
    Cluster cluster(2, "inproc", DeviceBackends().front().make);
    v1::JobSpec spec = MakeSpec("params", codec, v1::OPTIMIZER_ADAMW, 2);
    spec.set_max_workers(3);
    std::vector<std::string> digests(3);
    std::atomic<bool> stepped{false};
    InParallel(3, [&](int w) {
      while (w == 2 && !stepped) std::this_thread::yield();  // joins later, and starts from parameters and moments
      const PullMode modes[] = {PullMode::kUpdate, PullMode::kParams, PullMode::kUpdate};
      Worker worker(spec, w);
      const absl::Status joined = worker.Join(cluster.addresses(), modes[w]);
      ASSERT_TRUE(joined.ok()) << joined;
      while (worker.session().version() < 20) {
        worker.Fill(worker.session().version());
        const absl::Status status = worker.Step(0.01f);
        ASSERT_TRUE(status.ok()) << status;
        stepped = true;
      }
      digests[static_cast<size_t>(w)] = worker.session().Digest();
    });
    EXPECT_EQ(digests[0], digests[1]) << codec;
    EXPECT_EQ(digests[0], digests[2]) << codec;
  }
}

TEST(DeviceJob, JobsShareABudgetAndWhatDoesNotFitIsRefusedWithTheFigures) {
  const Case c{"dense", "dense:values=fp32", v1::OPTIMIZER_ADAMW};
  Cluster cpu(1, "inproc");
  const std::set<std::string> expected = Train(c, "one", cpu, 2, 20);
  // What one job takes, found by asking for too much.
  const auto job = *Job::Make(MakeSpec("one", c.codec, c.optimizer, 2));
  const uint64_t arrays = job.elements() * (3 * 4 + 4 + 8);  // parameters, moments, means, sums
  Cluster cluster(1, "inproc", DeviceBackends().back().make, 2 * (arrays + arrays / 4));
  std::set<std::string> one, two;
  InParallel(2, [&](int j) { (j == 0 ? one : two) = Train(c, j == 0 ? "one" : "two", cluster, 2, 20); });
  EXPECT_EQ(one, expected);
  EXPECT_EQ(two, expected);
  Worker third(MakeSpec("three", c.codec, c.optimizer, 1), 0);
  const absl::Status refused = third.Join(cluster.addresses());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), ::testing::AllOf(::testing::HasSubstr("bytes of device memory"),
                                                               ::testing::HasSubstr("are left for all jobs"),
                                                               ::testing::HasSubstr("--device-memory-limit-bytes")));
  ASSERT_TRUE(cluster.Delete(0, "one").ok());
  EXPECT_TRUE(third.Join(cluster.addresses()).ok()) << "the memory of a deleted job was not given back";
}

}  // namespace
}  // namespace gradwire::testing
