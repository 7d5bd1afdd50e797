#include "server/job/parameter_digest.h"

#include <gtest/gtest.h>

#include "common/base/sha256.h"
#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing_support::SmallSpec;
using testing_support::TestJob;

std::string DigestOfAll(TestJob& job, float value) {
  Sha256 sha;
  for (const auto& bucket : job.parts().buckets) {
    const std::vector<float> values(bucket->layout->elements, value);
    sha.Update(std::span<const float>(values));
  }
  return sha.Hex();
}

TEST(ParameterDigest, IsOfTheParametersAndComputedAgainOnlyWhenTheyChange) {
  TestJob job(SmallSpec("job", 1));
  ParameterDigest digest(&job.parts());
  const auto member = job.Join("a");
  job.Initialize(*member, 1.0f);
  EXPECT_EQ(*digest.Get(), DigestOfAll(job, 1.0f));
  {
    // Behind its back, at the same version: nothing says that they have changed.
    BucketState& bucket = job.bucket(0);
    absl::MutexLock lock(&bucket.mu);
    ASSERT_TRUE(bucket.store->Initialize(job.frames().Initialize(0, 2.0f)).ok());
  }
  EXPECT_EQ(*digest.Get(), DigestOfAll(job, 1.0f));
  {
    BucketState& bucket = job.bucket(0);
    absl::MutexLock lock(&bucket.mu);
    ++bucket.version;
  }
  EXPECT_NE(*digest.Get(), DigestOfAll(job, 1.0f));
}

TEST(ParameterDigest, SaysWhyTheJobWasShut) {
  TestJob job(SmallSpec("job", 1));
  ParameterDigest digest(&job.parts());
  {
    absl::MutexLock lock(&job.parts().mu);
    job.parts().shut = absl::AbortedError("deleted");
  }
  EXPECT_EQ(digest.Get().status(), absl::AbortedError("deleted"));
}

TEST(ParameterDigest, OfAJobWithoutParametersIsEmpty) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_NONE);
  TestJob job(spec);
  EXPECT_EQ(*ParameterDigest(&job.parts()).Get(), "");
}

}  // namespace
}  // namespace gradwire
