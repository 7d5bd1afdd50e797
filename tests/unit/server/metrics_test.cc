// A status becomes metrics that Prometheus takes: names, types, labels and values; and what a wrong address is told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <set>

#include "server/config/config.h"
#include "server/metrics/exporter.h"
#include "server/metrics/families.h"

namespace gradwire::metrics {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string TextOf(const Reading& reading) { return prometheus::TextSerializer().Serialize(ToFamilies(reading)); }

// A server with a durable job that has everything a job may have.
Reading FullReading() {
  Reading reading;
  reading.shard.set_version("1.2.3");
  reading.shard.set_backend("cpu:avx2");
  reading.shard.set_uptime_s(61);
  reading.shard.set_memory_limit_bytes(1 << 20);
  reading.shard.set_server_epoch(uint64_t{3} << 32 | 5);
  reading.shard.set_jobs(1);
  reading.unrecovered_jobs = 2;
  v1::JobStatus& job = reading.jobs.emplace_back();
  job.set_job("lm");
  job.set_shard_index(1);
  job.set_shard_count(4);
  job.set_version(41);
  job.set_push_bytes(1000);
  job.set_refused_frames(7);
  v1::WorkerStatus& worker = *job.add_workers();
  worker.set_worker("a");
  worker.set_held_up_ms(2500);
  job.mutable_rounds()->set_open_round(41);
  job.mutable_rounds()->set_deadline_ms(250);
  v1::DurabilityStatus& durability = *job.mutable_durability();
  durability.set_level(v1::DURABILITY_FSYNC);
  durability.set_journal_bytes(4096);
  durability.set_failures(1);
  v1::FollowerStatus& follower = *job.add_followers();
  follower.set_follower("b");
  follower.set_version(38);
  follower.set_in_sync(true);
  v1::BucketTraffic& traffic = *job.add_traffic();
  traffic.set_bucket(2);
  traffic.set_codec("adaptive:density=0.01");
  traffic.set_gaps_bytes(77);
  traffic.set_gamma(1.5);
  return reading;
}

TEST(Metrics, NamesTypesAndHelpAreAsPrometheusWantsThem) {
  const std::vector<MetricFamily> families = ToFamilies(FullReading());
  std::set<std::string> names;
  for (const MetricFamily& family : families) {
    SCOPED_TRACE(family.name);
    EXPECT_TRUE(names.insert(family.name).second) << "a family is one piece";
    EXPECT_THAT(family.name, testing::StartsWith("gradwire_"));
    EXPECT_EQ(family.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_"), std::string::npos) << family.name;
    EXPECT_EQ(family.name.find("__"), std::string::npos) << family.name;
    EXPECT_THAT(family.name, testing::Not(testing::EndsWith("_")));
    EXPECT_EQ(family.name.ends_with("_total"), family.type == MetricType::Counter);
    EXPECT_THAT(family.help, testing::EndsWith("."));
    EXPECT_FALSE(family.metric.empty());
  }
}

TEST(Metrics, ValuesAreThoseOfTheStatus) {
  EXPECT_THAT(TextOf(FullReading()),
              AllOf(HasSubstr("gradwire_server_info{version=\"1.2.3\",backend=\"cpu:avx2\"} 1\n"),
                    HasSubstr("gradwire_uptime_seconds 61\n"), HasSubstr("gradwire_unrecovered_jobs 2\n"),
                    HasSubstr("gradwire_epoch_term 3\n"), HasSubstr("gradwire_epoch_starts 5\n"),
                    HasSubstr("gradwire_job_info{job=\"lm\",shard=\"1\",shards=\"4\",durability=\"fsync\"} 1\n"),
                    HasSubstr("gradwire_job_version{job=\"lm\",shard=\"1\"} 41\n"),
                    HasSubstr("gradwire_job_workers{job=\"lm\",shard=\"1\"} 1\n"),
                    HasSubstr("gradwire_job_round_deadline_seconds{job=\"lm\",shard=\"1\"} 0.25\n"),
                    HasSubstr("# TYPE gradwire_job_push_bytes_total counter\n"),
                    HasSubstr("gradwire_job_push_bytes_total{job=\"lm\",shard=\"1\"} 1000\n"),
                    HasSubstr("gradwire_job_refused_frames_total{job=\"lm\",shard=\"1\"} 7\n"),
                    HasSubstr("gradwire_job_journal_bytes{job=\"lm\",shard=\"1\"} 4096\n"),
                    HasSubstr("gradwire_job_journal_failures_total{job=\"lm\",shard=\"1\"} 1\n")));
  EXPECT_THAT(TextOf(FullReading()),
              AllOf(HasSubstr("gradwire_job_follower_lag_rounds{job=\"lm\",shard=\"1\",follower=\"b\"} 3\n"),
                    HasSubstr("gradwire_job_follower_in_sync{job=\"lm\",shard=\"1\",follower=\"b\"} 1\n"),
                    HasSubstr("gradwire_job_worker_held_up_seconds_total{job=\"lm\",shard=\"1\",worker=\"a\"} 2.5\n"),
                    HasSubstr("gradwire_job_bucket_union_ratio{job=\"lm\",shard=\"1\",bucket=\"2\",codec=\"adaptive:"
                              "density=0.01\"} 1.5\n"),
                    HasSubstr("gradwire_job_bucket_form_bytes{job=\"lm\",shard=\"1\",bucket=\"2\",codec=\"adaptive:"
                              "density=0.01\",form=\"gaps\"} 77\n")));
}

TEST(Metrics, DurabilityIsDegradedWhileTheDiskFailsAndUntilAHoleIsClosed) {
  const std::string name = "gradwire_job_durability_degraded{job=\"lm\",shard=\"1\"} ";
  Reading reading = FullReading();
  EXPECT_THAT(TextOf(reading), HasSubstr(name + "0\n"));
  reading.jobs[0].mutable_durability()->set_degraded(true);
  EXPECT_THAT(TextOf(reading), HasSubstr(name + "1\n"));
  reading.jobs[0].mutable_durability()->set_degraded(false);
  reading.jobs[0].mutable_durability()->set_hole(true);
  EXPECT_THAT(TextOf(reading), HasSubstr(name + "1\n"));
}

TEST(Metrics, AJobWithoutAJournalHasNoMetricsOfOne) {
  Reading reading = FullReading();
  reading.jobs[0].mutable_durability()->set_level(v1::DURABILITY_NONE);
  EXPECT_THAT(TextOf(reading), AllOf(HasSubstr("durability=\"none\""), HasSubstr("gradwire_job_durability_degraded{"),
                                     Not(HasSubstr("_journal_")), Not(HasSubstr("_snapshot"))));
}

// A scraper refuses a page on which two series have the same labels.
TEST(Metrics, NoSeriesIsThereTwiceAndTheirNumberIsBounded) {
  Reading reading = FullReading();
  v1::JobStatus& job = reading.jobs[0];
  v1::FollowerStatus& again = *job.add_followers();  // the same standby: its last stream has not ended yet
  again = job.followers(0);
  again.set_version(40);
  for (uint32_t b = 3; b < 5000; ++b) {
    v1::BucketTraffic& traffic = *job.add_traffic();
    traffic.set_bucket(b);
    traffic.set_codec("adaptive:density=0.01");
  }
  for (int w = 0; w < 5000; ++w) job.add_workers()->set_worker("worker-" + std::to_string(w));
  for (const MetricFamily& family : ToFamilies(reading)) {
    std::set<std::vector<prometheus::ClientMetric::Label>> labels;
    for (const prometheus::ClientMetric& metric : family.metric) {
      EXPECT_TRUE(labels.insert(metric.label).second) << family.name;
    }
    EXPECT_LE(family.metric.size(), std::max<size_t>(kMaxTrafficBuckets * 5, kMaxWorkersTold)) << family.name;
  }
  EXPECT_THAT(TextOf(reading),
              HasSubstr("gradwire_job_follower_lag_rounds{job=\"lm\",shard=\"1\",follower=\"b\"} 1\n"));
}

TEST(Metrics, NamesOfOthersAreQuoted) {
  Reading reading = FullReading();
  reading.jobs[0].mutable_followers(0)->set_follower("b\"} 1\ngradwire_fenced 1\n");
  EXPECT_THAT(TextOf(reading), Not(HasSubstr("\ngradwire_fenced 1\n")));
}

TEST(MetricsExporter, AWrongAddressIsToldWhatToGive) {
  for (const char* wrong : {"9464", "localhost", ":9464", "::1:9464", "host:99999", "http://host:1"}) {
    ServerConfig config;
    config.metrics_listen = wrong;
    const absl::Status status = config.Validate();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << wrong;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(wrong), HasSubstr("give HOST:PORT, for example")));
  }
}

TEST(MetricsExporter, APortThatIsTakenIsToldByItsNumber) {
  const auto first = Exporter::Start("127.0.0.1:0", [] { return FullReading(); });
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string& url = (*first)->url();
  const std::string taken = url.substr(7, url.size() - 7 - std::string("/metrics").size());
  const auto second = Exporter::Start(taken, [] { return FullReading(); });
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()),
              AllOf(HasSubstr("cannot serve metrics on " + taken + ": address in use"),
                    HasSubstr("give another --metrics-listen")));
  const auto nowhere = Exporter::Start("no-such-host.invalid:9464", [] { return FullReading(); });
  EXPECT_THAT(std::string(nowhere.status().message()), HasSubstr("cannot serve metrics on no-such-host.invalid:9464"));
}

}  // namespace
}  // namespace gradwire::metrics
