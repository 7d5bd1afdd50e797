// How tables are dealt where nobody says: by the shards, and by how large they are.
#include "common/job/table_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire {
namespace {

TEST(TableRuns, AreShorterForMoreShardsAndLongerForLargerTables) {
  EXPECT_EQ(TableRun(1 << 20, 0), 4096u);
  EXPECT_EQ(TableRun(1 << 20, 1), 4096u);
  EXPECT_EQ(TableRun(1 << 20, 2), 1024u);
  EXPECT_EQ(TableRun(1 << 20, 3), 256u);
  EXPECT_EQ(TableRun(1 << 20, 4), 256u);
  EXPECT_EQ(TableRun(1 << 20, 8), 64u);
  EXPECT_EQ(TableRun(1 << 20, 16), 16u);
  EXPECT_EQ(TableRun(1 << 20, 64), 16u);
  EXPECT_EQ(TableRun(1 << 20, 4'000'000'000), 16u);
  for (uint32_t shards : {2u, 8u, 64u}) {
    for (uint64_t elements : {uint64_t{64'000'000}, uint64_t{640'000'000}}) {
      EXPECT_LE(elements / TableRun(elements, shards) * 24, shards * (2u << 20)) << elements << " on " << shards;
    }
    EXPECT_EQ(TableRun(UINT64_MAX, shards), 4096u);
  }
}

TEST(TableRuns, AreThoseOfTheLayoutUnlessTheCodecSaysOthers) {
  for (const auto& [codec, shards, wanted] :
       {std::tuple("zen", 1u, 4096u), std::tuple("zen", 2u, 1024u), std::tuple("zen:values=fp16", 8u, 64u),
        std::tuple("zen:run=32", 2u, 32u), std::tuple("zen:run=32", 8u, 32u)}) {
    v1::JobSpec spec;
    spec.set_name("tables");
    spec.set_codec("dense:fp32");
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_NONE);
    v1::CodecRule* const rule = spec.add_rules();
    rule->set_pattern("table");
    rule->set_codec(codec);
    for (const char* name : {"table", "rest"}) {
      v1::TensorSpec* const tensor = spec.add_tensors();
      tensor->set_name(name);
      tensor->add_shape(100'000);
      tensor->add_shape(64);
    }
    const auto job = Job::Make(spec);
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(Job::Make(job->spec())->digest(), job->digest()) << "whatever the shards";
    const auto layout = Layout::Make(*job, shards);
    ASSERT_TRUE(layout.ok()) << layout.status();
    uint32_t longest = 0;
    for (const BucketLayout& slice : layout->slices()) {
      for (const auto& run : slice.runs) longest = run.tensor == 0 ? std::max(longest, run.length) : longest;
    }
    EXPECT_EQ(longest, wanted) << codec << " on " << shards << " shards";
  }
}

}  // namespace
}  // namespace gradwire
