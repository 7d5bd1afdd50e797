// Whole jobs of several workers, run to their end and compared by digest.
#pragma once

#include <atomic>
#include <set>
#include <string>
#include <vector>

#include "client/cpp/internal/exchange.h"
#include "tests/integration/client/cluster.h"

namespace gradwire::testing {

struct Case {
  std::string name;
  std::string codec;
  v1::OptimizerKind optimizer;
  bool defers = false;  // the sketches are too small on purpose
  bool small = false;
  uint32_t encode_threads = 1;
  bool mixed = false;  // gradients are FillMixed's
};
inline std::string NameOfCase(const ::testing::TestParamInfo<Case>& info) { return info.param.name; }

// What jobs of several suites differ in.
struct JobCase {
  std::string name;
  const char* codec;
  v1::OptimizerKind optimizer;
  PullMode pull = PullMode::kUpdate;
  float clip = 0;
  const char* update_codec = "";
  bool small = false;
};
inline v1::JobSpec SpecOf(const std::string& job, const JobCase& c, uint32_t workers) {
  v1::JobSpec spec = MakeSpec(job, c.codec, c.optimizer, workers);
  if (c.small) spec = Small(std::move(spec));
  spec.set_clip_norm(c.clip);
  spec.set_update_codec(c.update_codec);
  return spec;
}

// Runs `rounds` steps of `workers` workers; returns the digests of all replicas, checked against the shards.
inline std::set<std::string> Train(const Case& c, const std::string& job, Cluster& cluster, int workers, int rounds,
                                   uint64_t* deferred_elements = nullptr) {
  std::atomic<uint64_t> deferred{0};
  const v1::JobSpec large = MakeSpec(job, c.codec, c.optimizer, workers);
  const v1::JobSpec spec = c.small ? Small(large) : large;
  EXPECT_EQ(Job::Make(spec)->elements() > client::kThreadsAbove, !c.small);
  std::vector<std::string> digests(workers);
  std::vector<std::vector<std::string>> shard_digests(workers);
  InParallel(workers, [&](int w) {
    Worker worker(spec, w);
    SessionOptions options = worker.Options(cluster.addresses());
    options.encode_threads = c.encode_threads;
    ASSERT_TRUE(worker.JoinWith(std::move(options)).ok());
    const std::string first = worker.session().Digest();
    for (int round = 0; round < rounds; ++round) {
      c.mixed ? worker.FillMixed(static_cast<uint64_t>(round)) : worker.Fill(static_cast<uint64_t>(round));
      const absl::Status status = worker.Step(FallingRate(static_cast<uint64_t>(round)));
      ASSERT_TRUE(status.ok()) << status;
    }
    digests[w] = worker.session().Digest();
    shard_digests[w] = worker.session().ShardDigests();
    EXPECT_NE(digests[w], first) << "nothing was learnt";
    EXPECT_EQ(worker.session().version(), static_cast<uint64_t>(rounds) + 1);
    EXPECT_EQ(worker.session().stats().steps, static_cast<uint64_t>(rounds));
    deferred += worker.session().stats().deferred_elements;
  });
  for (int w = 0; w < workers; ++w)
    for (uint32_t s = 0; s < shard_digests[w].size(); ++s)
      EXPECT_EQ(shard_digests[w][s], cluster.ParametersSha256(s, job)) << "worker " << w << " shard " << s;
  if (deferred_elements != nullptr) *deferred_elements += deferred;
  return {digests.begin(), digests.end()};
}

}  // namespace gradwire::testing
