// Jobs whose shards exchange norms: the same bits on any number of shards, whatever workers pull and however far they
// run ahead; a shard that is silent is waited for, and what is not served is refused with a reason.
#include <set>

#include "gradwire/v1/peer.pb.h"
#include "tests/integration/client/train.h"

namespace gradwire::testing {
namespace {

constexpr int kNormWorkers = 2;
constexpr uint64_t kSteps = 40;

// The digests of all replicas, checked against the shards.
std::set<std::string> TrainSpec(const v1::JobSpec& spec, Cluster& cluster, PullMode pull, uint64_t steps = kSteps) {
  std::vector<std::string> digests(kNormWorkers);
  InParallel(kNormWorkers, [&](int w) {
    Worker worker(spec, w);
    const absl::Status joined = worker.Join(cluster.addresses(), pull);
    ASSERT_TRUE(joined.ok()) << joined;
    for (uint64_t step = 0; step < steps; ++step) {
      worker.FillApart(step);
      const absl::Status stepped = worker.Step(0.01f);
      ASSERT_TRUE(stepped.ok()) << stepped;
    }
    ASSERT_TRUE(worker.session().Drain().ok());
    digests[w] = worker.session().Digest();
    for (uint32_t s = 0; s < cluster.addresses().size(); ++s) {
      EXPECT_EQ(worker.session().ShardDigests()[s], cluster.ParametersSha256(s, spec.name())) << "worker " << w;
    }
  });
  return {digests.begin(), digests.end()};
}

struct NormCase {
  std::string name;
  v1::OptimizerKind optimizer;
  float clip = 0;
  PullMode pull = PullMode::kUpdate;
  uint32_t staleness = 0;
  const char* update_codec = "";  // one that looks at single runs, so that the number of shards does not show
};

class Norms : public ::testing::TestWithParam<NormCase> {};

TEST_P(Norms, GiveTheSameBitsOnAnyNumberOfShards) {
  const NormCase& c = GetParam();
  std::set<std::string> all;
  for (const uint32_t shards : {1u, 2u, 4u}) {
    Cluster cluster(shards, shards == 2 ? "grpc" : shards == 4 ? "tcp" : "inproc");
    v1::JobSpec spec = MakeSpec("norms", "dense:values=fp32", c.optimizer, kNormWorkers);
    if (c.optimizer == v1::OPTIMIZER_STEP) spec.set_push(v1::PUSH_DELTA);
    spec.set_clip_norm(c.clip);
    spec.set_update_codec(c.update_codec);
    if (c.staleness > 0) {
      spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
      spec.mutable_rounds()->set_staleness(c.staleness);
    }
    all.merge(TrainSpec(spec, cluster, c.pull));
  }
  EXPECT_EQ(all.size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Jobs, Norms,
                         ::testing::Values(NormCase{"LambClipped", v1::OPTIMIZER_LAMB, 1.0f},
                                           NormCase{"LansClippedParams", v1::OPTIMIZER_LANS, 1.0f, PullMode::kParams},
                                           NormCase{"LansBounded", v1::OPTIMIZER_LANS, 0, PullMode::kUpdate, 3},
                                           NormCase{"AdamWClippedBounded", v1::OPTIMIZER_ADAMW, 1.0f, PullMode::kUpdate,
                                                    2},
                                           NormCase{"Clan", v1::OPTIMIZER_LANS, 0, PullMode::kUpdate, 0, "onebit"},
                                           NormCase{"SgdClipped", v1::OPTIMIZER_SGD, 0.5f},
                                           NormCase{"DeltasClipped", v1::OPTIMIZER_STEP, 0.5f}),
                         [](const auto& info) { return info.param.name; });

TEST(ClipNorm, ChangesNothingWhereItIsNotReached) {
  v1::JobSpec spec = MakeSpec("free", "dense:values=fp32", v1::OPTIMIZER_ADAMW, kNormWorkers);
  Cluster cluster(2, "inproc");
  const std::set<std::string> free = TrainSpec(spec, cluster, PullMode::kUpdate);
  spec.set_name("high");
  spec.set_clip_norm(1e9f);
  EXPECT_EQ(TrainSpec(spec, cluster, PullMode::kUpdate), free);
  spec.set_name("low");
  spec.set_clip_norm(0.1f);
  EXPECT_NE(TrainSpec(spec, cluster, PullMode::kUpdate), free);
}

TEST(Norms, OfAJobThatIsDeletedWhileItsRoundIsHeldKeepNobodyWaiting) {
  const v1::JobSpec spec = MakeSpec("deleted", "dense:values=fp32", v1::OPTIMIZER_LAMB, 1);
  Cluster cluster(2, "inproc");
  Worker worker(spec, 0);
  ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
  worker.Fill(0);
  ASSERT_TRUE(worker.Step(0.01f).ok());
  cluster.Kill(1);
  worker.Fill(1);
  EXPECT_FALSE(worker.Step(0.01f).ok());
  EXPECT_EQ(cluster.Describe(0, "deleted").version(), 2u) << "nothing is written with a part of the norms";
  EXPECT_TRUE(cluster.Delete(0, "deleted").ok());
}

TEST(Norms, AreRefusedFromAPeerThatIsNone) {
  const v1::JobSpec spec = MakeSpec("peer", "dense:values=fp32", v1::OPTIMIZER_LAMB, 1);
  Cluster cluster(2, "inproc");
  const std::shared_ptr<JobShard> shard = cluster.Create(spec, 0, 2);
  v1::ExchangeRequest request;
  request.set_job("peer");
  request.set_shard(1);
  request.set_round(1);
  EXPECT_EQ(shard->agreement()->exchange().Take(request).status().code(), absl::StatusCode::kFailedPrecondition)
      << "its shard map";
  request.set_layout_digest(shard->layout().digest());
  EXPECT_EQ(shard->agreement()->exchange().Take(request).status().code(), absl::StatusCode::kInvalidArgument)
      << "no squares";
  request.set_phase(1);
  EXPECT_EQ(shard->agreement()->exchange().Take(request).status().code(), absl::StatusCode::kInvalidArgument)
      << "its phase";
  request.set_phase(0);
  request.set_shard(0);
  EXPECT_EQ(shard->agreement()->exchange().Take(request).status().code(), absl::StatusCode::kInvalidArgument)
      << "the shard itself";
  size_t runs = 0;
  for (const uint32_t slice : shard->layout().slices_of(1)) runs += shard->layout().slices()[slice].runs.size();
  request.set_shard(1);
  for (size_t i = 0; i < 2 * runs; ++i) request.mutable_sums()->add_runs(1);
  EXPECT_TRUE(shard->agreement()->exchange().Take(request).ok());
  request.set_round(100);
  EXPECT_EQ(shard->agreement()->exchange().Take(request).status().code(), absl::StatusCode::kFailedPrecondition)
      << "too far ahead";
}

TEST(Norms, NeedTheAddressesOfAllShards) {
  const v1::JobSpec spec = MakeSpec("lost", "dense:values=fp32", v1::OPTIMIZER_LAMB, 1);
  Cluster cluster(2, "inproc");
  const std::shared_ptr<JobShard> shard = cluster.Create(spec, 0, 2);
  EXPECT_EQ(shard->CheckAddresses({"inproc://a"}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(shard->CheckAddresses({"inproc://a", "inproc://b|inproc://c"}).ok());
  v1::JobSpec plain = spec;
  plain.set_name("plain");
  plain.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
  EXPECT_TRUE(cluster.Create(plain, 0, 2)->CheckAddresses({}).ok()) << "a job without norms needs none";
}

// Tells `shard` that the others are where nobody is, as a worker of this name.
absl::Status JoinWithOtherAddresses(Cluster& cluster, const v1::JobSpec& spec, uint32_t shard,
                                    const std::string& name) {
  v1::JoinRequest request;
  request.mutable_identity()->set_job(spec.name());
  request.mutable_identity()->set_worker(name);
  request.mutable_identity()->set_incarnation(99);
  *request.mutable_spec() = spec;
  request.set_shard_index(shard);
  request.set_shard_count(2);
  for (const char* nobody : {"inproc://nobody-0", "inproc://nobody-1"}) request.add_shards(nobody);
  const auto channel = transport::Dial(cluster.addresses()[shard]);
  if (!channel.ok()) return channel.status();
  return (*channel)->Call("gradwire.v1.Worker/Join", request.SerializeAsString(), 10'000).status();
}

TEST(Norms, GoOnWhereAWorkerThatIsRefusedSaysThatTheShardsAreElsewhere) {
  const v1::JobSpec spec = MakeSpec("moved", "dense:values=fp32", v1::OPTIMIZER_LANS, kNormWorkers);
  Cluster cluster(2, "inproc");
  InParallel(kNormWorkers, [&](int w) {
    Worker worker(spec, w);
    ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
    for (uint64_t step = 0; step < 4; ++step) {
      worker.Fill(step);
      const absl::Status stepped = worker.Step(0.01f);
      ASSERT_TRUE(stepped.ok()) << stepped;
      for (uint32_t shard = 0; w == 0 && step == 1 && shard < 2; ++shard) {
        EXPECT_FALSE(JoinWithOtherAddresses(cluster, spec, shard, "stranger").ok()) << "the job is full";
      }
    }
  });
}

TEST(Norms, AreRefusedWhereTheyHaveNoMeaning) {
  v1::JobSpec spec = MakeSpec("job", "dense:values=fp32", v1::OPTIMIZER_LANS, 1);
  ASSERT_TRUE(Job::Make(spec).ok());
  v1::JobSpec async = spec;
  async.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
  EXPECT_EQ(Job::Make(async).status().code(), absl::StatusCode::kInvalidArgument);
  async.mutable_optimizer()->set_kind(v1::OPTIMIZER_LION);
  EXPECT_TRUE(Job::Make(async).ok());
  v1::JobSpec steps = spec;
  steps.set_push(v1::PUSH_STEP);
  EXPECT_EQ(Job::Make(steps).status().code(), absl::StatusCode::kInvalidArgument);
  v1::JobSpec mean = spec;
  mean.mutable_optimizer()->set_kind(v1::OPTIMIZER_NONE);
  mean.set_clip_norm(1);
  EXPECT_EQ(Job::Make(mean).status().code(), absl::StatusCode::kInvalidArgument);
  spec.set_clip_norm(-1);
  EXPECT_EQ(Job::Make(spec).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace gradwire::testing
