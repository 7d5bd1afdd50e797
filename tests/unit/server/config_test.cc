// Ranges, defaults, and what a wrong file is told.
#include "server/config/config.h"

#include <gtest/gtest.h>

#include <fstream>

namespace gradwire {
namespace {

TEST(ServerConfig, DefaultsAreValidAndTakeMostOfTheMemory) {
  ServerConfig config;
  ASSERT_TRUE(config.Validate().ok());
  EXPECT_GT(config.memory_limit_bytes, 0u);
  EXPECT_EQ(config.job_memory_limit_bytes, config.memory_limit_bytes);
}

TEST(ServerConfig, NamesTheKnobTheValueAndTheRange) {
  ServerConfig config;
  config.drain_ms = 600'001;
  const absl::Status status = config.Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "drain_ms is 600001; allowed are 0 to 600000");
  config = {};
  config.backend = "tpu";
  EXPECT_EQ(config.Validate().message(), "backend is 'tpu'; allowed are auto, cpu, cuda");
  config = {};
  config.listen.clear();
  EXPECT_FALSE(config.Validate().ok());
}

TEST(ServerConfig, UnknownFieldIsAnErrorWithItsLine) {
  ServerConfig config;
  const absl::Status status = ApplyConfigText("max_jobs: 3\nmax_job: 4\n", "server.textproto", &config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("server.textproto: line 2"), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("max_job"), absl::string_view::npos) << status;
}

TEST(ServerConfig, FlagsOverrideTheFile) {
  const std::string path = testing::TempDir() + "/server.textproto";
  std::ofstream(path) << "listen: \"grpc://127.0.0.1:1\" drain_ms: 7 max_jobs: 9\n";
  const std::string flag = "--config=" + path;
  const char* argv[] = {"gradwire-server", flag.c_str(), "--drain-ms", "8"};
  const auto parsed = ParseFlags(4, argv);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->config.drain_ms, 8u);
  EXPECT_EQ(parsed->config.max_jobs, 9u);
  EXPECT_EQ(parsed->config.listen, std::vector<std::string>{"grpc://127.0.0.1:1"});
}

TEST(ServerConfig, WrongFlagExitsWithUsage) {
  const char* argv[] = {"gradwire-server", "--no-such-flag"};
  const auto parsed = ParseFlags(2, argv);
  ASSERT_TRUE(parsed.ok());
  EXPECT_TRUE(parsed->exit);
  EXPECT_EQ(parsed->exit_code, 2);
}

TEST(ServerConfig, MissingFileIsNamed) {
  const char* argv[] = {"gradwire-server", "--config=/no/such/file"};
  EXPECT_EQ(ParseFlags(2, argv).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace gradwire
