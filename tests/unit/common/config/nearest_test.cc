#include "common/config/nearest.h"

#include <gtest/gtest.h>

namespace gradwire {
namespace {

TEST(NearestName, FindsMisspellings) {
  const std::vector<std::string> known = {"listen", "memory_limit_bytes", "job_memory_limit_bytes", "max_jobs"};
  EXPECT_EQ(NearestName("lisetn", known), "listen");
  EXPECT_EQ(NearestName("memoryLimitBytes", known), "memory_limit_bytes");
  EXPECT_EQ(NearestName("MAX-JOBS", known), "max_jobs");
  EXPECT_EQ(NearestName("memory_limit", known), "memory_limit_bytes");
  EXPECT_EQ(NearestName("job_memory_limit_byte", known), "job_memory_limit_bytes");
}

TEST(NearestName, SaysNothingWhereNothingIsNear) {
  EXPECT_EQ(NearestName("tls_certificate", {"listen", "max_jobs"}), "");
  EXPECT_EQ(NearestName("", {"listen"}), "");
  EXPECT_EQ(NearestName("listen", {}), "");
  EXPECT_EQ(NearestName(std::string(1000, 'x'), {"listen"}), "");
}

}  // namespace
}  // namespace gradwire
