// What Prometheus reads from a daemon over HTTP while a worker trains and the disk fails.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "server/daemon.h"
#include "tests/integration/server/raw_worker.h"
#include "tests/lib/small_disk.h"

namespace gradwire {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing_support::RawWorker;
using testing_support::SmallDisk;
using testing_support::SmallSpec;

// The whole answer, headers too; empty where nobody answers. `url`: http://ADDRESS:PORT/PATH
std::string Get(const std::string& url) {
  const size_t host = url.find("://") + 3, colon = url.find(':', host), slash = url.find('/', colon);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(url.substr(colon + 1, slash - colon - 1))));
  inet_pton(AF_INET, url.substr(host, colon - host).c_str(), &address.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  std::string answer;
  const std::string request = absl::StrCat("GET ", url.substr(slash), " HTTP/1.0\r\n\r\n");
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size())) {
    char part[4096];
    for (ssize_t n; (n = recv(fd, part, sizeof(part), 0)) > 0;) answer.append(part, static_cast<size_t>(n));
  }
  close(fd);
  return answer;
}

// A page on which `words` stand; the last one read within 20 s otherwise.
std::string WaitFor(const std::string& url, const std::string& words) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::string page = Get(url);
  while (page.find(words) == std::string::npos && std::chrono::steady_clock::now() < deadline) {
    usleep(2000);
    page = Get(url);
  }
  return page;
}

ServerConfig Config(const std::string& data_dir) {
  ServerConfig config;
  config.listen = {"tcp://127.0.0.1:0"};
  config.backend = "cpu";
  config.data_dir = data_dir;
  config.metrics_listen = "127.0.0.1:0";
  EXPECT_EQ(config.Validate(), absl::OkStatus());
  return config;
}

TEST(ServerMetrics, FollowRoundsWhileTheyGoOn) {
  SteadyClock clock;
  auto daemon = Daemon::Start(Config(""), &clock);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const std::string url = (*daemon)->metrics_url();
  EXPECT_THAT(Get(url), AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("gradwire_jobs 0\n"),
                              HasSubstr("gradwire_memory_limit_bytes ")));
  RawWorker a((*daemon)->addresses()[0], SmallSpec("job", 1), "a", 1);
  ASSERT_EQ(a.Start(1.0f), absl::OkStatus());
  std::jthread scraper([&url](std::stop_token stop) {
    while (!stop.stop_requested()) EXPECT_THAT(Get(url), HasSubstr("gradwire_job_version{job=\"job\",shard=\"0\"} "));
  });
  for (uint64_t round = 0; round < 50; ++round) {
    ASSERT_EQ(a.PushAll(round, 1.0f), absl::OkStatus());
    ASSERT_TRUE(a.FollowUpdate(round + 1).ok());
  }
  scraper.request_stop();
  scraper.join();
  const v1::JobStatus status = *testing_support::DescribeJob(a.channel(), "job", false);
  EXPECT_THAT(Get(url),
              AllOf(HasSubstr("gradwire_jobs 1\n"), HasSubstr("gradwire_job_version{job=\"job\",shard=\"0\"} 50\n"),
                    HasSubstr("gradwire_job_workers{job=\"job\",shard=\"0\"} 1\n"),
                    HasSubstr(absl::StrCat("gradwire_job_push_bytes_total{job=\"job\",shard=\"0\"} ",
                                           status.push_bytes(), "\n")),
                    HasSubstr("durability=\"none\"")));
  (*daemon)->Drain(0).IgnoreError();
  EXPECT_THAT(Get(url), HasSubstr("gradwire_draining 1\n"));
  daemon->reset();
  EXPECT_EQ(Get(url), "");
}

TEST(ServerMetrics, DurabilityIsDegradedWhileTheDiskIsFull) {
  SmallDisk disk;
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount a tmpfs here (needs root)";
  SteadyClock clock;
  auto daemon = Daemon::Start(Config(absl::StrCat(disk.path(), "/data")), &clock);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const std::string url = (*daemon)->metrics_url();
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  RawWorker a((*daemon)->addresses()[0], spec, "a", 1);
  ASSERT_EQ(a.Start(1.0f), absl::OkStatus());
  ASSERT_EQ(a.PushAll(0, 1.0f), absl::OkStatus());
  ASSERT_TRUE(a.FollowUpdate(1).ok());
  const std::string degraded = "gradwire_job_durability_degraded{job=\"job\",shard=\"0\"} ";
  const std::string failures = "gradwire_job_journal_failures_total{job=\"job\",shard=\"0\"} ";
  const std::string durable = "gradwire_job_durable_version{job=\"job\",shard=\"0\"} ";
  EXPECT_THAT(Get(url), AllOf(HasSubstr(degraded + "0\n"), HasSubstr(failures + "0\n"), HasSubstr(durable + "1\n")));
  disk.Fill();
  ASSERT_EQ(a.PushAll(1, 1.0f), absl::OkStatus());
  EXPECT_THAT(WaitFor(url, degraded + "1\n"), AllOf(HasSubstr(degraded + "1\n"), HasSubstr(durable + "1\n")));
  EXPECT_THAT(Get(url), testing::Not(HasSubstr("gradwire_job_journal_backlog_bytes{job=\"job\",shard=\"0\"} 0\n")));
  disk.Free();
  ASSERT_TRUE(a.FollowUpdate(2).ok());
  EXPECT_THAT(WaitFor(url, durable + "2\n"),
              AllOf(HasSubstr(degraded + "0\n"), HasSubstr(failures + "1\n"), HasSubstr(durable + "2\n")));
}

TEST(ServerMetrics, AServerThatEndsWritesFirstWhatRoundsWentOnWithout) {
  for (const bool freed : {true, false}) {
    SCOPED_TRACE(freed);
    SmallDisk disk;
    if (!disk.mounted()) GTEST_SKIP() << "cannot mount a tmpfs here (needs root)";
    SteadyClock clock;
    auto daemon = Daemon::Start(Config(absl::StrCat(disk.path(), "/data")), &clock);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    v1::JobSpec spec = SmallSpec("job", 1);
    spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
    spec.mutable_durability()->set_on_failure(v1::DISK_FAILURE_CONTINUE);
    uint64_t version = 0;
    {
      RawWorker a((*daemon)->addresses()[0], spec, "a", 1);
      ASSERT_EQ(a.Start(1.0f), absl::OkStatus());
      const auto round = [&] {
        ASSERT_EQ(a.PushAll(version, 1.0f), absl::OkStatus());
        ASSERT_TRUE(a.FollowUpdate(++version).ok());
      };
      round();
      disk.Fill();
      for (int i = 0; i < 5; ++i) round();
    }
    if (freed) disk.Free();
    const absl::Status drained = (*daemon)->Drain(freed ? 60'000 : 100);
    EXPECT_EQ(drained.code(), freed ? absl::StatusCode::kOk : absl::StatusCode::kDataLoss) << drained;
    daemon->reset();
    disk.Free();
    daemon = Daemon::Start(Config(absl::StrCat(disk.path(), "/data")), &clock);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    const auto job = (*daemon)->registry().Find("job");
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ((*job)->NewestVersion(), freed ? version : 1);
  }
}

TEST(ServerMetrics, APortThatIsTakenStopsTheStart) {
  SteadyClock clock;
  const auto first = Daemon::Start(Config(""), &clock);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string url = (*first)->metrics_url();
  ServerConfig config = Config("");
  config.metrics_listen = url.substr(7, url.rfind('/') - 7);
  EXPECT_THAT(std::string(Daemon::Start(config, &clock).status().message()), HasSubstr("address in use"));
}

}  // namespace
}  // namespace gradwire
