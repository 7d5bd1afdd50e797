// The real programs: gradwire-server drains on SIGTERM, a second signal ends it, and `gradwire` operates it.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/integration/server/raw_worker.h"
#include "tests/lib/server_process.h"
#include "tests/lib/small_disk.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::RawWorker;
using testing_support::ServerProcess;
using testing_support::SmallDisk;
using testing_support::SmallSpec;

struct Output {
  int exit_code = -1;
  std::string text;
};

// Runs a program to its end; standard output and error together.
Output RunProgram(const std::string& command) {
  Output output;
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return output;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) output.text.append(buffer, n);
  output.exit_code = WEXITSTATUS(pclose(pipe));
  return output;
}

Output RunCli(const std::string& arguments) { return RunProgram(std::string(GRADWIRE_CLI_BINARY) + " " + arguments); }

TEST(ServerProcess, SigtermLetsTheOpenRoundFinishAndExitsWithZero) {
  ServerProcess server({"--drain-ms=10000", "--backend=cpu"});
  const std::string address = server.Address();
  ASSERT_FALSE(address.empty());
  const v1::JobSpec spec = SmallSpec("job", 2);
  RawWorker a(address, spec, "a", 1), b(address, spec, "b", 2);
  ASSERT_EQ(a.Start(1.0f), absl::OkStatus());
  ASSERT_EQ(b.Start(1.0f), absl::OkStatus());
  ASSERT_EQ(a.PushAll(0, 1.0f), absl::OkStatus());
  ASSERT_EQ(b.RequestPull(v1::PULL_UPDATE, 1), absl::OkStatus());
  server.Signal(SIGTERM);
  EXPECT_EQ(b.PushAll(0, 1.0f), absl::OkStatus());
  EXPECT_TRUE(b.FollowUpdate(1, true).ok());
  EXPECT_EQ(server.WaitForExit(), 0);
  EXPECT_EQ(b.push_inbox().Closed().code(), absl::StatusCode::kUnavailable);
}

TEST(ServerProcess, SecondSignalEndsItAtOnce) {
  ServerProcess server({"--drain-ms=60000", "--backend=cpu"});
  const std::string address = server.Address();
  RawWorker a(address, SmallSpec("job", 2), "a", 1), b(address, SmallSpec("job", 2), "b", 2);
  ASSERT_EQ(a.Start(1.0f), absl::OkStatus());
  ASSERT_EQ(b.Start(1.0f), absl::OkStatus());
  ASSERT_EQ(a.PushAll(0, 1.0f), absl::OkStatus());
  server.Signal(SIGTERM);
  // Draining is visible as a refused join; then the second signal cannot be merged with the first.
  absl::Status joined = absl::OkStatus();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  RawWorker late(address, SmallSpec("job", 2), "late", 3);
  while (joined.ok() && std::chrono::steady_clock::now() < deadline) joined = late.Join().status();
  EXPECT_EQ(joined.code(), absl::StatusCode::kUnavailable);
  server.Signal(SIGINT);
  EXPECT_EQ(server.WaitForExit(), 1);
}

TEST(ServerProcess, AddressInUseIsToldOnceInOurOwnWords) {
  ServerProcess server({"--backend=cpu"});
  const std::string address = server.Address();
  const std::string command = std::string(GRADWIRE_SERVER_BINARY) + " --backend=cpu --listen " + address;
  const Output second = RunProgram(command);
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.text, HasSubstr("cannot listen on " + address + ": address in use"));
  EXPECT_EQ(second.text.find("address in use"), second.text.rfind("address in use")) << second.text;
}

// The line of /proc/PID/limits.
std::string DescriptorLimits(pid_t pid) {
  std::ifstream limits(absl::StrCat("/proc/", pid, "/limits"));
  for (std::string line; std::getline(limits, line);) {
    if (absl::StartsWith(line, "Max open files")) return line;
  }
  return "";
}

TEST(ServerProcess, TakesAsManyDescriptorsAsItMayHave) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  if (old.rlim_max < 2048) GTEST_SKIP() << "no more than " << old.rlim_max << " descriptors may be had here";
  rlimit few = old;
  few.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  ServerProcess server({"--backend=cpu", "--max-connections=1000"});  // of 256 descriptors that would be refused
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  ASSERT_FALSE(server.Address().empty());
  const std::string most = std::to_string(old.rlim_max);
  EXPECT_THAT(DescriptorLimits(server.pid()),
              testing::MatchesRegex("Max open files +" + most + " +" + most + " +files *"));
}

// A connection that says nothing.
int ConnectSilently(const std::string& address) {
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  name.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  return fd;
}

TEST(ServerProcess, CapsAreThoseOfItsFlags) {
  ServerProcess server({"--backend=cpu", "--max-streams=2", "--max-handshakes=3"});
  const std::string address = server.Address();
  ASSERT_FALSE(address.empty());
  const v1::JobSpec spec = SmallSpec("job", 1);
  RawWorker a(address, spec, "a", 1), b(address, spec, "b", 2);
  ASSERT_EQ(a.Start(1.0f), absl::OkStatus());  // with two streams
  ASSERT_TRUE(b.Join().ok());
  (void)b.Open();
  EXPECT_EQ(b.push_inbox().Closed().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(b.push_inbox().Closed().message(), HasSubstr("--max-streams"));
  // One silent connection more than there may be: the first makes room, long before its handshake's time is over.
  std::vector<int> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(ConnectSilently(address));
  pollfd first{silent[0], POLLRDHUP, 0};
  EXPECT_EQ(poll(&first, 1, 5000), 1) << "it was not ended";
  pollfd last{silent[3], POLLRDHUP, 0};
  EXPECT_EQ(poll(&last, 1, 100), 0) << "the last one stands";
  for (int fd : silent) close(fd);
  ASSERT_EQ(a.PushAll(0, 1.0f), absl::OkStatus());
}

TEST(ServerProcess, OperatorToolCreatesDescribesAndDeletes) {
  ServerProcess server({"--backend=cpu"});
  const std::string address = server.Address();
  std::string text;
  ASSERT_TRUE(google::protobuf::TextFormat::PrintToString(SmallSpec("job", 1), &text));
  const std::string spec_path = testing::TempDir() + "/job-" + std::to_string(getpid()) + ".textproto";
  std::ofstream(spec_path) << text;
  const std::string servers = " --servers " + address;
  Output out = RunCli("job create --spec " + spec_path + servers);
  EXPECT_EQ(out.exit_code, 0) << out.text;
  out = RunCli("job describe job --digest" + servers);
  EXPECT_EQ(out.exit_code, 0) << out.text;
  EXPECT_THAT(out.text, testing::AllOf(HasSubstr("shard 0 of 1"), HasSubstr("sha256")));
  out = RunCli("job list --json" + servers);
  EXPECT_THAT(out.text, HasSubstr("\"job\":\"job\""));
  out = RunCli("shard describe" + servers);
  EXPECT_THAT(out.text, HasSubstr("serving"));
  out = RunCli("layout --shards 2 --spec " + spec_path);
  EXPECT_EQ(out.exit_code, 0) << out.text;
  EXPECT_THAT(out.text, HasSubstr("of even"));
  out = RunCli("job delete job" + servers);
  EXPECT_EQ(out.exit_code, 0) << out.text;
  out = RunCli("job describe job" + servers);
  EXPECT_EQ(out.exit_code, 1);
  EXPECT_THAT(out.text, HasSubstr("does not exist"));
  std::remove(spec_path.c_str());
}

TEST(ServerProcess, FullDiskDoesWhatTheJobSaysAndHeals) {
  for (const v1::DiskFailurePolicy policy : {v1::DISK_FAILURE_WAIT, v1::DISK_FAILURE_CONTINUE}) {
    SCOPED_TRACE(policy);
    SmallDisk disk;
    if (!disk.mounted()) GTEST_SKIP() << "cannot mount a tmpfs here (needs root)";
    {
      ServerProcess server({"--backend=cpu", "--data-dir=" + disk.path()});
      v1::JobSpec spec = SmallSpec("job", 1);
      spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
      spec.mutable_durability()->set_on_failure(policy);
      RawWorker a(server.Address(), spec, "a", 1);
      ASSERT_EQ(a.Start(1.0f), absl::OkStatus());
      ASSERT_EQ(a.PushAll(0, 1.0f), absl::OkStatus());
      ASSERT_TRUE(a.FollowUpdate(1).ok());
      disk.Fill();
      ASSERT_EQ(a.PushAll(1, 1.0f), absl::OkStatus());
      const auto describe = [&] { return *testing_support::DescribeJob(a.channel(), "job", false); };
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (!describe().durability().degraded() && std::chrono::steady_clock::now() < deadline) usleep(1000);
      EXPECT_TRUE(describe().durability().degraded());
      EXPECT_EQ(describe().durability().durable_version(), 1u);
      EXPECT_THAT(RunCli("job describe job --servers " + server.Address()).text,
                  HasSubstr("durability DEGRADED: cannot write to"));
      ASSERT_TRUE(a.RequestPull(v1::PULL_UPDATE, 2).ok());
      if (policy == v1::DISK_FAILURE_CONTINUE) {
        ASSERT_TRUE(a.FollowUpdate(2, true).ok());
        EXPECT_EQ(describe().version(), 2u);
      } else {
        usleep(200'000);
        EXPECT_EQ(describe().version(), 1u) << "the round waits";
      }
      disk.Free();
      if (policy == v1::DISK_FAILURE_WAIT) {
        ASSERT_TRUE(a.FollowUpdate(2, true).ok());
      }
      while (describe().durability().durable_version() < 2 && std::chrono::steady_clock::now() < deadline) usleep(1000);
      const v1::JobStatus status = describe();
      EXPECT_FALSE(status.durability().degraded());
      EXPECT_EQ(status.durability().durable_version(), 2u);
      EXPECT_EQ(status.durability().failures(), 1u);
      server.Signal(SIGKILL);
      server.WaitForExit();
    }
    ServerProcess again({"--backend=cpu", "--data-dir=" + disk.path()});
    const auto channel = transport::Dial(again.Address());
    EXPECT_EQ(testing_support::DescribeJob(**channel, "job", false)->version(), 2u);
  }
}

TEST(ServerProcess, DoesNotStartOnAFullDiskAndSaysWhatToDo) {
  SmallDisk disk;
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount a tmpfs here (needs root)";
  disk.Fill();
  const Output out = RunProgram(std::string(GRADWIRE_SERVER_BINARY) +
                                " --backend=cpu --listen tcp://127.0.0.1:0 --data-dir=" + disk.path());
  EXPECT_EQ(out.exit_code, 1);
  EXPECT_THAT(out.text, testing::AllOf(HasSubstr("cannot start: "), HasSubstr("No space left on device"),
                                       HasSubstr("make room on that disk")));
}

// A job on two servers, as `gradwire job create` makes it. Returns where they listen.
std::string CreateOnTwo(ServerProcess& a, ServerProcess& b) {
  std::string text;
  EXPECT_TRUE(google::protobuf::TextFormat::PrintToString(SmallSpec("job", 1), &text));
  const std::string spec_path = testing::TempDir() + "/two-" + std::to_string(getpid()) + ".textproto";
  std::ofstream(spec_path) << text;
  const std::string servers = absl::StrCat(a.Address(), ",", b.Address());
  const Output created = RunCli("job create --spec " + spec_path + " --servers " + servers);
  EXPECT_EQ(created.exit_code, 0) << created.text;
  std::remove(spec_path.c_str());
  return servers;
}

TEST(ServerProcess, JobIsDeletedWhereItStillIs) {
  ServerProcess a({"--backend=cpu"}), b({"--backend=cpu"});
  const std::string servers = CreateOnTwo(a, b);
  EXPECT_EQ(RunCli("job delete job --servers " + a.Address()).exit_code, 0);  // as if b had been away
  const Output rest = RunCli("job delete job --servers " + servers);
  EXPECT_EQ(rest.exit_code, 0) << rest.text;
  EXPECT_THAT(rest.text, testing::AllOf(HasSubstr(a.Address() + ": has no job job"),
                                        HasSubstr(b.Address() + ": deleted job job")));
  const Output gone = RunCli("job delete job --servers " + servers);
  EXPECT_EQ(gone.exit_code, 1);
  EXPECT_THAT(gone.text, HasSubstr("does not exist"));
}

TEST(ServerProcess, WhatOneServerSaysIsShownWhereAnotherIsAway) {
  ServerProcess a({"--backend=cpu"}), b({"--backend=cpu"});
  const std::string servers = CreateOnTwo(a, b);
  b.Signal(SIGKILL);
  b.WaitForExit();
  for (const std::string command : {"job list", "job describe job", "job delete job"}) {
    const Output out = RunCli(absl::StrCat(command, " --timeout-ms 500 --servers ", servers));
    EXPECT_EQ(out.exit_code, 1) << command;
    EXPECT_THAT(out.text, testing::AllOf(HasSubstr(a.Address()), HasSubstr("FAILED"))) << command;
  }
  EXPECT_THAT(RunCli("job list --servers " + a.Address()).text, testing::Not(HasSubstr("waits for")))
      << "it is deleted";
}

TEST(ServerProcess, SnapshotNeedsAllShards) {
  ServerProcess a({"--backend=cpu"}), b({"--backend=cpu"});
  CreateOnTwo(a, b);
  const Output one = RunCli("snapshot job --servers " + a.Address());
  EXPECT_EQ(one.exit_code, 1);
  EXPECT_THAT(one.text, HasSubstr("has 2 shards"));
}

TEST(ServerProcess, TraceLooksFirstWhetherItsFileCanBeWritten) {
  ServerProcess server({"--backend=cpu"});
  const std::string trace = "trace job --servers " + server.Address() + " --out ";
  const Output wrong = RunCli(trace + "/nowhere/at/all.json");
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.text, HasSubstr("'/nowhere/at/all.json' cannot be written"));
  const testing_support::TemporaryFolder folder("traces");
  const std::string old = folder.path() + "/old.json";
  std::ofstream(old) << "of yesterday";
  EXPECT_EQ(RunCli(trace + old).exit_code, 1) << "there is no such job";
  EXPECT_EQ(std::filesystem::file_size(old), 12u);
  EXPECT_EQ(RunCli(trace + folder.path() + "/new.json").exit_code, 1);
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/new.json"));
}

TEST(ServerProcess, SignalBeforeItServesEndsIt) {
  const testing_support::TemporaryFolder folder("slow");
  ASSERT_EQ(mkfifo((folder.path() + "/EPOCH").c_str(), 0600), 0);  // which nobody writes: reading it takes for ever
  ServerProcess server({"--backend=cpu", "--data-dir=" + folder.path()});
  const std::string tasks = absl::StrCat("/proc/", server.pid(), "/task");
  const auto threads = [&tasks] {
    return std::distance(std::filesystem::directory_iterator(tasks), std::filesystem::directory_iterator());
  };
  for (int tries = 0; tries < 500 && threads() < 2; ++tries) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(), 1);
}

TEST(ServerProcess, OperatorToolTakesSnapshotsThatOutliveTheJournal) {
  const testing_support::TemporaryFolder folder("snapshots");
  const std::string& data = folder.path();
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  ServerProcess server({"--backend=cpu", "--data-dir=" + data});
  {
    RawWorker a(server.Address(), spec, "a", 1);
    ASSERT_EQ(a.Start(1.0f), absl::OkStatus());
    for (uint64_t round = 0; round < 3; ++round) {
      ASSERT_EQ(a.PushAll(round, 1.0f), absl::OkStatus());
      ASSERT_TRUE(a.FollowUpdate(round + 1).ok());
    }
    const Output out = RunCli("snapshot job --servers " + server.Address());
    EXPECT_EQ(out.exit_code, 0) << out.text;
    EXPECT_THAT(out.text, HasSubstr("snapshot of version 3"));
    EXPECT_THAT(RunCli("job describe job --servers " + server.Address()).text, HasSubstr("snapshot of version 3"));
  }
  const Output digest = RunCli("job describe job --digest --servers " + server.Address());
  server.Signal(SIGKILL);
  server.WaitForExit();
  std::filesystem::remove_all(data + "/jobs/job.job/journal");  // the snapshot alone
  std::filesystem::create_directory(data + "/jobs/job.job/journal");
  ServerProcess again({"--backend=cpu", "--data-dir=" + data});
  const std::string sha = digest.text.substr(digest.text.find("sha256"), 71);
  EXPECT_THAT(RunCli("job describe job --digest --servers " + again.Address()).text,
              testing::AllOf(HasSubstr("version 3"), HasSubstr(sha)));
  EXPECT_THAT(RunCli("snapshot nobody --servers " + again.Address()).text, HasSubstr("does not exist"));
}

TEST(OperatorTool, SaysWhatToDo) {
  EXPECT_THAT(RunCli("codec explain tagc:density=0.01").text, HasSubstr("residual"));
  const Output wrong = RunCli("codec explain tacg:density=0.01");
  EXPECT_EQ(wrong.exit_code, 2);
  const Output incomplete = RunCli("job create");
  EXPECT_EQ(incomplete.exit_code, 2);
  EXPECT_THAT(incomplete.text, testing::AllOf(HasSubstr("gradwire job create: --spec is required"),
                                              HasSubstr("`gradwire job create --help`")));
  EXPECT_THAT(RunCli("job list").text, HasSubstr("GRADWIRE_SERVERS"));
  const Output full = RunCli("features > /dev/full");
  EXPECT_EQ(full.exit_code, 1);
  const Output nobody = RunCli("job list --timeout-ms 500 --servers grpc://127.0.0.1:1");
  EXPECT_EQ(nobody.exit_code, 1);
  EXPECT_THAT(nobody.text, HasSubstr("is gradwire-server running there"));
}

}  // namespace
}  // namespace gradwire
