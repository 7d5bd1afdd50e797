// After many rounds every replica and every shard hold the same bits, whatever the arrival order, the transport and the
// number of encoding threads, and whatever the number of shards unless elements were deferred: which ones a sketch
// cannot decode depends on the slices it is made of.
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <random>
#include <set>
#include <thread>

#include "tests/integration/client/train.h"

namespace gradwire::testing {
namespace {

// AddressSanitizer sees all of the code in fewer rounds, and takes long over each.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kDigestRounds = 30;
#else
constexpr int kDigestRounds = 50;
#endif

class DigestTest : public ::testing::TestWithParam<Case> {};

TEST_P(DigestTest, AgreesAcrossShardsTransportsAndArrivalOrders) {
  std::set<std::string> all;
  uint64_t deferred = 0;
  for (uint32_t shards : {1u, 2u, 4u}) {
    std::set<std::string> digests;
    Case c = GetParam();
    for (const std::string scheme : {"inproc", "grpc", "tcp"}) {
      Cluster cluster(shards, scheme);
      digests.merge(Train(c, absl::StrCat("digest-", shards), cluster, 2, kDigestRounds, &deferred));
      ++c.encode_threads;
    }
    EXPECT_EQ(digests.size(), 1u) << shards << " shards: replicas differ, or transports or threads do";
    all.merge(digests);
  }
  if (GetParam().defers) {
    EXPECT_GT(deferred, 0u);
  } else {
    EXPECT_EQ(deferred, 0u);
    EXPECT_EQ(all.size(), 1u) << "the number of shards changed the result";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, DigestTest,
    ::testing::Values(
        Case{"AdamWFp32", "dense:values=fp32", v1::OPTIMIZER_ADAMW},
        Case{"AdamWFixed32", "dense:values=fixed32", v1::OPTIMIZER_ADAMW},
        Case{"AdamWTagc", "tagc:density=0.05,form=sketch,slack=4", v1::OPTIMIZER_ADAMW},
        Case{"StepTagc", "tagc:density=0.05", v1::OPTIMIZER_STEP},
        Case{"StepTagcSigns", "tagc:density=0.05,bits=2", v1::OPTIMIZER_STEP},
        Case{"StepTagcOverloaded", "tagc:density=0.05,form=sketch,slack=0.7", v1::OPTIMIZER_STEP, true},
        Case{"SgdTopK", "topk:density=0.05,values=fp16", v1::OPTIMIZER_SGD},
        Case{"StepTopK", "topk:density=0.05", v1::OPTIMIZER_STEP}, Case{"SgdDgc", "dgc:density=0.1", v1::OPTIMIZER_SGD},
        Case{"AdamWUniform", "uniform:bits=4", v1::OPTIMIZER_ADAMW},
        Case{"AdamWThc", "thc:bits=4", v1::OPTIMIZER_ADAMW},
        Case{"AdamWRandomK", "randomk:density=0.1,values=bf16", v1::OPTIMIZER_ADAMW},
        Case{"StepZen", "zen:index=coo,values=bf16,run=64", v1::OPTIMIZER_STEP},
        Case{"AdamWOneBit", "onebit", v1::OPTIMIZER_ADAMW}, Case{"SgdSigNum", "signum", v1::OPTIMIZER_SGD},
        Case{"AdamWQsgd", "qsgd:bits=4", v1::OPTIMIZER_ADAMW},
        Case{"LionTopK", "topk:density=0.05", v1::OPTIMIZER_LION},
        Case{"LambFp32", "dense:values=fp32", v1::OPTIMIZER_LAMB},
        Case{"LambTagc", "tagc:density=0.05,slack=4", v1::OPTIMIZER_LAMB},
        Case{"LansFp32", "dense:values=fp32", v1::OPTIMIZER_LANS},
        Case{"SmallLansTopK", "topk:density=0.05,values=fp16", v1::OPTIMIZER_LANS, false, true},
        Case{"SmallAdamWFp32", "dense:values=fp32", v1::OPTIMIZER_ADAMW, false, true},
        Case{"SmallStepTagcOverloaded", "tagc:density=0.05,form=sketch,slack=0.7", v1::OPTIMIZER_STEP, true, true}),
    NameOfCase);

// How frames are written down changes no bit, on any number of shards; nor does a frame of a sketch and lists.
TEST(FormsOfTagc, TrainAlike) {
#if defined(__SANITIZE_ADDRESS__)
  constexpr int kMost = 8;
#else
  constexpr int kMost = 64;
#endif
  for (const auto& [workers, bits] :
       {std::pair(1, "auto"), {2, "auto"}, {8, "auto"}, {kMost, "auto"}, {1, "2"}, {kMost, "2"}}) {
    SCOPED_TRACE(::testing::Message() << workers << " workers, bits=" << bits);
    std::set<std::string> digests;
    uint64_t deferred = 0;
    for (const uint32_t shards : {1u, 2u, 4u}) {
      for (const char* form : {"auto", "sketch,slack=4"}) {
        Case c{"forms", absl::StrCat("tagc:density=0.02,bits=", bits, ",form=", form), v1::OPTIMIZER_STEP};
        c.mixed = workers > 2;
        Cluster cluster(shards, "tcp");
        digests.merge(Train(c, "forms", cluster, workers, workers > 8 ? 4 : 20, &deferred));
      }
    }
    EXPECT_EQ(digests.size(), 1u);
    EXPECT_EQ(deferred, 0u);
  }
}

// All there is, summed on the same grid: eight workers at once, and the replicas have the bits of dense float32.
TEST(LosslessCodecs, TrainAsDenseFloatsDo) {
  const auto train = [](const std::string& codec, Cluster& cluster) {
    return Train({"lossless", codec, v1::OPTIMIZER_ADAMW}, "lossless", cluster, 8, 10);
  };
  Cluster dense(2, "grpc"), zen(3, "grpc"), adaptive(2, "inproc");
  const std::set<std::string> expected = train("dense:fp32", dense);
  EXPECT_EQ(expected.size(), 1u);
  EXPECT_EQ(train("zen", zen), expected);
  EXPECT_EQ(train("adaptive", adaptive), expected);
  EXPECT_EQ(dense.Describe(0, "lossless").traffic_size(), 0);
  const v1::JobStatus status = adaptive.Describe(0, "lossless");
  ASSERT_GT(status.traffic_size(), 0);
  for (const v1::BucketTraffic& traffic : status.traffic()) {
    EXPECT_EQ(traffic.codec(), "adaptive:run=64");
    EXPECT_EQ(traffic.round(), 10u);
    EXPECT_EQ(traffic.contributors(), 8u);
    EXPECT_EQ(traffic.dense_pushes(), 8u);
    EXPECT_TRUE(traffic.dense_update());
    EXPECT_GT(traffic.density(), 0.97);
    EXPECT_LT(traffic.dense_bytes(), traffic.bitmap_bytes());
    EXPECT_LT(traffic.gaps_bytes(), traffic.sketch_bytes());
  }
}

#if defined(__SSE2__)
// As after torch.set_flush_denormal(True).
TEST(FlushedSubnormals, OfAWorkersThreadChangeNoBit) {
  constexpr uint32_t kFlush = 0x8040;
  for (const bool small : {true, false}) {
    v1::JobSpec spec = MakeSpec("flushed", "dense:fp32", v1::OPTIMIZER_SGD, 1);
    if (small) spec = Small(std::move(spec));
    Cluster cluster(1, "inproc");
    std::thread([&] {
      Worker worker(spec, 0);
      for (auto& tensor : worker.parameters()) std::fill(tensor.begin(), tensor.end(), 1e-39f);
      const uint32_t before = _mm_getcsr();
      _mm_setcsr(before | kFlush);
      const absl::Status joined = worker.Join(cluster.addresses());
      absl::Status stepped;
      for (int step = 0; step < 3; ++step) stepped.Update(worker.Step(1.0f));
      const bool flushes = (_mm_getcsr() & kFlush) == kFlush;
      _mm_setcsr(before);
      ASSERT_TRUE(joined.ok() && stepped.ok()) << joined << stepped;
      EXPECT_TRUE(flushes) << "the caller's own arithmetic is its own affair";
      EXPECT_NE(worker.parameters()[0][0], 0);
      EXPECT_EQ(worker.session().ShardDigests()[0], cluster.ParametersSha256(0, "flushed")) << small;
    }).join();
  }
}
#endif

TEST(TwoJobs, DoNotDisturbEachOther) {
  const Case dense{"dense", "dense:values=fixed32", v1::OPTIMIZER_ADAMW};
  const Case sparse{"sparse", "tagc:density=0.05", v1::OPTIMIZER_STEP};
  Cluster alone(2, "inproc");
  const std::set<std::string> dense_alone = Train(dense, "one", alone, 2, 30);
  const std::set<std::string> sparse_alone = Train(sparse, "two", alone, 2, 30);
  Cluster shared(2, "inproc");
  std::set<std::string> dense_shared;
  std::set<std::string> sparse_shared;
  InParallel(2, [&](int job) {
    if (job == 0)
      dense_shared = Train(dense, "one", shared, 2, 30);
    else
      sparse_shared = Train(sparse, "two", shared, 2, 30);
  });
  EXPECT_EQ(dense_alone, dense_shared);
  EXPECT_EQ(sparse_alone, sparse_shared);
}

}  // namespace
}  // namespace gradwire::testing
