// Ranges, defaults, and what a wrong file is told.
#include "server/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "server/config/memory.h"

namespace gradwire {
namespace {

TEST(ServerConfig, DefaultsAreValidAndTakeMostOfTheMemory) {
  ServerConfig config;
  ASSERT_TRUE(config.Validate().ok());
  EXPECT_GT(config.memory_limit_bytes, 0u);
  EXPECT_EQ(config.job_memory_limit_bytes, config.memory_limit_bytes);
}

TEST(ServerConfig, EveryStreamMayHaveAMessageThatHasComeInPart) {
  const uint64_t most = UsableMemoryBytes() / 4;
  ServerConfig usual, few, given;
  few.max_streams = 1;
  given.receive_limit_bytes = 64u << 20;
  ASSERT_TRUE(usual.Validate().ok());
  ASSERT_TRUE(few.Validate().ok());
  ASSERT_TRUE(given.Validate().ok());
  EXPECT_EQ(usual.receive_limit_bytes, std::min<uint64_t>(8192 * (261u << 10), most));
  EXPECT_EQ(few.receive_limit_bytes, std::min<uint64_t>(512u << 20, most));
  EXPECT_EQ(given.receive_limit_bytes, 64u << 20);
}

// A tree with /proc/self/cgroup and files of limits.
class GroupsTest : public ::testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  uint64_t Usable() const { return UsableMemoryBytes(root_.string()); }

  const std::filesystem::path root_ =
      std::filesystem::path(::testing::TempDir()) / ("groups-" + std::to_string(getpid()));
  const uint64_t machine_ = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
};

TEST_F(GroupsTest, TheLeastLimitOfThoseAroundCounts) {
  EXPECT_EQ(Usable(), machine_) << "no groups at all";
  Write("proc/self/cgroup", "0::/kubepods/pod7/one\n");
  Write("sys/fs/cgroup/kubepods/pod7/one/memory.max", "max\n");
  EXPECT_EQ(Usable(), machine_);
  Write("sys/fs/cgroup/kubepods/pod7/memory.max", "134217728\n");
  Write("sys/fs/cgroup/kubepods/memory.max", "268435456\n");
  EXPECT_EQ(Usable(), 134217728u);
}

TEST_F(GroupsTest, AContainersOwnGroupIsAtTheTop) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "67108864\n");
  EXPECT_EQ(Usable(), 67108864u);
}

TEST_F(GroupsTest, OfTheFirstVersionToo) {
  Write("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/docker/x\nnonsense\n0::\n");
  Write("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "33554432\n");
  EXPECT_EQ(Usable(), 33554432u);
  Write("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(Usable(), machine_) << "as the kernel writes none";
}

TEST(ServerConfig, NamesTheKnobTheValueAndTheRange) {
  ServerConfig config;
  config.drain_ms = 600'001;
  const absl::Status status = config.Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "drain_ms is 600001; allowed are 0 to 600000");
  config = {};
  config.backend = "tpu";
  EXPECT_EQ(config.Validate().message(), "backend is 'tpu'; allowed are auto, cpu, cuda, reference");
  config = {};
  config.listen.clear();
  EXPECT_FALSE(config.Validate().ok());
}

TEST(ServerConfig, ConnectionsLeaveDescriptorsToJobs) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  rlimit few = old;
  few.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  ServerConfig most, too_many, two_addresses, little;
  most.max_connections = 616;  // of 1000; 128 and 4 for each of 64 jobs are kept
  too_many.max_connections = 617;
  two_addresses.listen = {"grpc://127.0.0.1:1", "tcp://127.0.0.1:2"};
  const absl::Status fits = most.Validate();
  const absl::Status refused = too_many.Validate();
  const absl::Status divided = two_addresses.Validate();
  few.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const absl::Status halved = little.Validate();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_EQ(fits, absl::OkStatus());
  EXPECT_EQ(refused.message(),
            "max_connections is 617 for each of 1 addresses; of 1000 descriptors that this process may have, 384 are "
            "kept for jobs: allowed are 1 to 616, or raise the limit (ulimit -n)");
  EXPECT_EQ(divided, absl::OkStatus());
  EXPECT_EQ(two_addresses.max_connections, 308u) << "each";
  EXPECT_EQ(halved, absl::OkStatus());
  EXPECT_EQ(little.max_connections, 128u) << "never more than half is kept";
}

// A file in the test's folder, and what comes of it.
absl::Status Apply(const std::string& name, const std::string& text, ServerConfig* config) {
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path) << text;
  return ApplyConfigFile(path, config);
}

TEST(ServerConfig, UnknownFieldIsAnErrorWithItsLine) {
  ServerConfig config;
  const absl::Status status = Apply("server.textproto", "max_jobs: 3\nmax_job: 4\n", &config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), testing::HasSubstr("server.textproto: line 2"));
  EXPECT_THAT(status.message(), testing::HasSubstr("'max_job': did you mean 'max_jobs'?"));
}

TEST(ServerConfig, YamlAndTextSetTheSame) {
  ServerConfig yaml, text, json;
  ASSERT_EQ(Apply("same.yaml",
                  "# two addresses\nlisten:\n  - grpc://127.0.0.1:1\n  - unix:///run/g.sock\n"
                  "memory_limit_bytes: 4294967296\nframe_limit_bytes: 65536\ndrain_ms: 0\nlog_level: debug\n",
                  &yaml),
            absl::OkStatus());
  ASSERT_EQ(Apply("same.textproto",
                  "listen: \"grpc://127.0.0.1:1\" listen: \"unix:///run/g.sock\" memory_limit_bytes: 4294967296\n"
                  "frame_limit_bytes: 65536 drain_ms: 0 log_level: \"debug\"",
                  &text),
            absl::OkStatus());
  ASSERT_EQ(Apply("same.json",
                  R"({"listen": ["grpc://127.0.0.1:1", "unix:///run/g.sock"], "memory_limit_bytes": 4294967296,
                      "frame_limit_bytes": 65536, "drain_ms": 0, "log_level": "debug"})",
                  &json),
            absl::OkStatus());
  for (const ServerConfig& config : {yaml, text, json}) {
    EXPECT_EQ(config.listen, (std::vector<std::string>{"grpc://127.0.0.1:1", "unix:///run/g.sock"}));
    EXPECT_EQ(config.memory_limit_bytes, 4294967296u);
    EXPECT_EQ(config.frame_limit_bytes, 65536u);
    EXPECT_EQ(config.drain_ms, 0u) << "a 0 in the file is a value";
    EXPECT_EQ(config.log_level, "debug");
    EXPECT_EQ(config.max_jobs, 64u);
  }
}

TEST(ServerConfig, FlagsOverrideTheFile) {
  const std::string path = testing::TempDir() + "/server.textproto";
  std::ofstream(path) << "listen: \"grpc://127.0.0.1:1\" drain_ms: 7 max_jobs: 9 spin_us: 0 data_dir: \"/file\" "
                         "snapshot_journal_bytes: 2097152\n";
  const std::string flag = "--config=" + path;
  const char* argv[] = {"gradwire-server", flag.c_str(), "--drain-ms", "8"};
  const auto parsed = ParseFlags(4, argv);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->config.drain_ms, 8u);
  EXPECT_EQ(parsed->config.max_jobs, 9u);
  EXPECT_EQ(parsed->config.spin_us, 0u);
  EXPECT_EQ(parsed->config.data_dir, "/file");
  EXPECT_EQ(parsed->config.snapshot_journal_bytes, 2097152u);
  EXPECT_EQ(parsed->config.listen, std::vector<std::string>{"grpc://127.0.0.1:1"});
}

TEST(ServerConfig, WrongFlagExitsWithUsage) {
  const char* argv[] = {"gradwire-server", "--no-such-flag"};
  const auto parsed = ParseFlags(2, argv);
  ASSERT_TRUE(parsed.ok());
  EXPECT_TRUE(parsed->exit);
  EXPECT_EQ(parsed->exit_code, 2);
}

TEST(ServerConfig, WrongFlagIsToldWithTheProgramAndItsHelp) {
  const char* argv[] = {"gradwire-server", "--no-such-flag"};
  testing::internal::CaptureStderr();
  ASSERT_TRUE(ParseFlags(2, argv).ok());
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, testing::StartsWith("gradwire-server: "));
  EXPECT_THAT(said, testing::AllOf(testing::HasSubstr("--no-such-flag"), testing::HasSubstr("gradwire-server --help")));
}

// A variable that is not set: the next flag is not its value.
TEST(ServerConfig, AFlagWithoutItsValueIsWrong) {
  const char* argv[] = {"gradwire-server", "--data-dir=", "--listen=grpc://127.0.0.1:0"};
  testing::internal::CaptureStderr();
  const auto parsed = ParseFlags(3, argv);
  const std::string said = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->exit_code, 2);
  EXPECT_THAT(said, testing::AllOf(testing::HasSubstr("--data-dir= has no value"), testing::HasSubstr("--help")));
}

TEST(ServerConfig, ValuesMayEndWithAnEqualsSign) {
  const char* argv[] = {"gradwire-server", "--data-dir=/key=", "--drain-ms=7"};
  const auto parsed = ParseFlags(3, argv);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->config.data_dir, "/key=");
  EXPECT_EQ(parsed->config.drain_ms, 7u);
}

TEST(ServerConfig, MissingFileIsNamed) {
  const char* argv[] = {"gradwire-server", "--config=/no/such/file.yaml"};
  EXPECT_EQ(ParseFlags(2, argv).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace gradwire
