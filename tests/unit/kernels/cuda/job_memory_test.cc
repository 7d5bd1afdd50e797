// The device memory of jobs: never more than the budget, everything given back.
#include "kernels/cuda/job_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/kernels/cuda/late_runtime.h"

namespace gradwire::kernels::cuda {
namespace {

using ::testing::HasSubstr;

TEST(MemoryBudget, AdmitsJobsUntilItIsUsedUp) {
  LateRuntime runtime(10'000);
  MemoryBudget budget(&runtime, 4096);
  auto first = budget.Admit(3000);
  ASSERT_TRUE(first.ok());
  const auto second = budget.Admit(2000);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("1096 of 4096"));
  EXPECT_TRUE(budget.Admit(1096).ok());
  EXPECT_EQ(budget.Admit(SIZE_MAX).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(budget.used(), 3000u);
  first->reset();
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_EQ(runtime.left(), 10'000u);
  EXPECT_TRUE(budget.Admit(4096).ok());
}

TEST(MemoryBudget, GivesBackWhatTheDeviceDoesNotHave) {
  LateRuntime runtime(1000);
  MemoryBudget budget(&runtime, 4096);
  const auto job = budget.Admit(2000);
  EXPECT_EQ(job.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(job.status().message()), HasSubstr("the device has not"));
  EXPECT_EQ(budget.used(), 0u);
}

TEST(JobMemory, ArraysDoNotOverlapAndEnd) {
  LateRuntime runtime(10'000);
  MemoryBudget budget(&runtime, 4096);
  auto job = *budget.Admit(1024);
  float* const a = *job->Take<float>(65);  // 260 bytes: two lines of 256
  uint8_t* const b = *job->Take<uint8_t>(1);
  EXPECT_EQ(reinterpret_cast<uint8_t*>(a) + 512, b);
  EXPECT_EQ(job->left(), 256u);
  EXPECT_EQ(job->Take<double>(33).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(job->Take<double>(SIZE_MAX / 8).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(job->Take<double>(32).ok());
  EXPECT_EQ(job->left(), 0u);
  EXPECT_EQ(JobMemory::Rounded(65, 4) + JobMemory::Rounded(1, 1) + JobMemory::Rounded(32, 8), 1024u);
}

}  // namespace
}  // namespace gradwire::kernels::cuda
