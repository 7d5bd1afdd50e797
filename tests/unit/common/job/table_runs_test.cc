// How tables are dealt where nobody says: by how large they are, and not by the shards.
#include "common/job/table_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire {
namespace {

v1::JobSpec SpecWith(const std::string& codec, const std::string& of_table, uint64_t rows = 1000) {
  v1::JobSpec spec;
  spec.set_name("tables");
  spec.set_codec(codec);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_NONE);
  v1::CodecRule* const rule = spec.add_rules();
  rule->set_pattern("table");
  rule->set_codec(of_table);
  for (const char* name : {"table", "rest"}) {
    v1::TensorSpec* const tensor = spec.add_tensors();
    tensor->set_name(name);
    tensor->add_shape(rows);
    tensor->add_shape(64);
  }
  return spec;
}

TEST(TableRuns, AreAsLongAsLeavesTheirMapInACache) {
  EXPECT_EQ(TableRun(0), 256u);
  EXPECT_EQ(TableRun(12'800'000), 256u);
  EXPECT_EQ(TableRun(64'000'000), 512u);
  EXPECT_EQ(TableRun(640'000'000), 4096u);
  EXPECT_EQ(TableRun(UINT64_MAX), 4096u);
}

TEST(TableRuns, AreFilledInWhereACodecLeavesThemOpen) {
  const v1::JobSpec filled = WithTableRuns(SpecWith("tagc:density=0.01", "zen:values=fp16"));
  EXPECT_EQ(filled.codec(), "tagc:density=0.01") << "not a table's";
  EXPECT_EQ(filled.rules(0).codec(), "zen:index=smallest,values=fp16,run=256");
  EXPECT_EQ(WithTableRuns(SpecWith("zen", "zen:run=32")).rules(0).codec(), "zen:run=32") << "who says it has it";
  EXPECT_EQ(WithTableRuns(SpecWith("zen:values=int8", "")).codec(), "zen:values=int8")
      << "Job::Make says what is wrong";
}

TEST(TableRuns, AreThoseOfTheLayoutForAnyNumberOfShards) {
  for (const auto& [codec, wanted] :
       {std::pair("zen", 512u), std::pair("zen:values=fp16", 512u), std::pair("zen:run=32", 32u)}) {
    const auto job = Job::Make(SpecWith("dense:fp32", codec, 500'000));
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(Job::Make(job->spec())->digest(), job->digest()) << "the canonical spec says them";
    for (uint32_t shards : {1u, 2u, 8u}) {
      const auto layout = Layout::Make(*job, shards);
      ASSERT_TRUE(layout.ok()) << layout.status();
      uint32_t longest = 0;
      for (const BucketLayout& slice : layout->slices()) {
        for (const auto& run : slice.runs) longest = run.tensor == 0 ? std::max(longest, run.length) : longest;
      }
      EXPECT_EQ(longest, wanted) << codec << " on " << shards << " shards";
    }
  }
}

}  // namespace
}  // namespace gradwire
