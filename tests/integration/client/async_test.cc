// Asynchronous rounds: nobody waits for anybody, and what was pushed is what was applied plus what lies in residuals.
#include <cmath>

#include "absl/time/clock.h"
#include "tests/integration/client/async_jobs.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::testing {
namespace {

using testing_support::TcpProxy;

struct Case {
  const char* name;
  const char* codec;
  int workers;
  uint32_t shards;
  bool small;
};

class AsyncJobs : public ::testing::TestWithParam<Case> {};

TEST_P(AsyncJobs, ApplyExactlyWhatWasPushed) {
  const Case& c = GetParam();
  Cluster cluster(c.shards, "inproc");
  v1::JobSpec spec = AsyncSpec("exact", c.codec, static_cast<uint32_t>(c.workers));
  if (c.small) spec = Small(std::move(spec));
  std::vector<std::unique_ptr<ExactWorker>> workers;
  for (int w = 0; w < c.workers; ++w) workers.push_back(std::make_unique<ExactWorker>(spec, w));
  InParallel(c.workers, [&](int w) {
    ExactWorker& worker = *workers[w];
    ASSERT_TRUE(worker.worker().Join(cluster.addresses(), PullMode::kParams).ok());
    for (int step = 0; step < 20; ++step) {
      const absl::Status status = worker.Step();
      ASSERT_TRUE(status.ok()) << status;
    }
    const absl::Status drained = worker.Drain();
    ASSERT_TRUE(drained.ok()) << drained;
    EXPECT_GT(worker.worker().session().version(), 0u);
  });
  // A step of every worker is a version of every bucket; calibration is one more.
  uint64_t frames = 0;
  for (const auto& worker : workers) frames += worker->worker().session().stats().steps;
  for (uint32_t s = 0; s < c.shards; ++s) EXPECT_LE(cluster.Describe(s, "exact").version(), frames + 1);
  if (c.workers == 1) {
    EXPECT_EQ(workers[0]->worker().session().version(), frames + 1);
  }
  for (auto& worker : workers) worker->worker().Drop();
  ExpectApplied(spec, cluster.addresses(), workers);
}

INSTANTIATE_TEST_SUITE_P(Codecs, AsyncJobs,
                         ::testing::Values(Case{"DenseOne", "dense:values=fp32", 1, 1, false},
                                           Case{"DenseTwo", "dense:values=fp32", 2, 2, true},
                                           Case{"DenseFour", "dense:values=fp32", 4, 2, false},
                                           Case{"Fixed", "dense:values=fixed32", 4, 1, true},
                                           Case{"TagcOne", "tagc:density=0.3", 1, 2, true},
                                           Case{"TagcTwo", "tagc:density=0.3", 2, 1, false},
                                           Case{"TagcFour", "tagc:density=0.3", 4, 2, true},
                                           Case{"TagcDefers", "tagc:density=0.3,form=sketch,slack=0.6", 4, 2, false}),
                         [](const auto& info) { return info.param.name; });

TEST(AsyncJob, TagcWithSketchesThatAreTooSmallDefers) {
  Cluster cluster(1, "inproc");
  const v1::JobSpec spec = AsyncSpec("defers", "tagc:density=0.3,form=sketch,slack=0.6", 1);
  ExactWorker worker(spec, 0);
  ASSERT_TRUE(worker.worker().Join(cluster.addresses(), PullMode::kParamsBf16).ok());
  for (int step = 0; step < 10; ++step) ASSERT_TRUE(worker.Step().ok());
  const uint64_t deferred = worker.worker().session().stats().deferred_elements;
  EXPECT_GT(deferred, 0u);
  EXPECT_EQ(deferred, cluster.Describe(0, "defers").deferred_elements());  // the shard decoded the same
}

// A worker stands still in the middle of a step: the other one goes on, and what came too late is not lost.
TEST(AsyncJob, AWorkerThatStandsStillHoldsNobodyUp) {
  Cluster cluster(2, "inproc");
  v1::JobSpec spec = AsyncSpec("still", "dense:values=fp32", 2);
  spec.mutable_rounds()->set_staleness(4);
  spec.set_lease_ms(60'000);
  std::vector<std::unique_ptr<ExactWorker>> workers;
  for (int w = 0; w < 2; ++w) {
    workers.push_back(std::make_unique<ExactWorker>(spec, w));
    ASSERT_TRUE(workers[w]->worker().Join(cluster.addresses(), PullMode::kParams).ok());
    ASSERT_TRUE(workers[w]->Step().ok());
  }
  ExactWorker& slow = *workers[0];
  const uint64_t before = slow.worker().session().version();
  slow.Fill(/*zeros=*/false);
  const std::vector<float> rates = {kExactRate};
  ASSERT_TRUE(slow.worker().session().BeginRound(rates).ok());
  for (int step = 0; step < 30; ++step) ASSERT_TRUE(workers[1]->Step().ok());
  for (uint32_t t = 0; t < slow.worker().gradients().size(); ++t)
    ASSERT_TRUE(slow.worker().session().TensorReady(t, slow.worker().gradients()[t].data()).ok());
  ASSERT_TRUE(slow.worker().session().EndRound().ok());
  const SessionStats stats = slow.worker().session().stats();
  EXPECT_EQ(stats.not_included_frames, slow.worker().session().layout().slices().size());
  EXPECT_GE(slow.worker().session().version(), before + 30);
  ASSERT_TRUE(slow.Step(/*zeros=*/true).ok());  // what was returned travels now
  EXPECT_EQ(slow.worker().session().stats().not_included_frames, stats.not_included_frames);
  for (auto& worker : workers) worker->worker().Drop();
  ExpectApplied(spec, cluster.addresses(), workers);
}

// Answers and frames are lost when the network falls silent: nothing is merged twice, nothing is lost.
TEST(AsyncJob, MergesEveryFrameOnceWhenConnectionsBreak) {
  Cluster cluster(2, "grpc");
  TcpProxy proxies[] = {TcpProxy(cluster.addresses()[0]), TcpProxy(cluster.addresses()[1])};
  v1::JobSpec spec = AsyncSpec("broken", "tagc:density=0.3", 2);
  spec.set_lease_ms(900);
  std::vector<std::unique_ptr<ExactWorker>> workers;
  for (int w = 0; w < 2; ++w) workers.push_back(std::make_unique<ExactWorker>(spec, w));
  ASSERT_TRUE(workers[0]->worker().Join(cluster.addresses(), PullMode::kParams).ok());
  ASSERT_TRUE(workers[1]->worker().Join({proxies[0].address(), proxies[1].address()}, PullMode::kParams).ok());
  std::atomic<bool> done{false};
  std::thread cutter([&] {
    for (int cut = 0; cut < 3; ++cut) {
      absl::SleepFor(absl::Milliseconds(100));
      for (TcpProxy& proxy : proxies) proxy.Cut();
      absl::SleepFor(absl::Milliseconds(1200));  // beyond the lease
      for (TcpProxy& proxy : proxies) proxy.Heal();
    }
    done = true;
  });
  InParallel(2, [&](int w) {
    for (int step = 0; step < 30 || (w == 1 && !done); ++step) {
      const absl::Status status = workers[w]->Step(step >= 60);
      ASSERT_TRUE(status.ok()) << status;
    }
    const absl::Status drained = workers[w]->Drain();
    ASSERT_TRUE(drained.ok()) << drained;
  });
  cutter.join();
  for (auto& worker : workers) worker->worker().Drop();
  ExpectApplied(spec, cluster.addresses(), workers);
}

// Each worker has rows of its own; the least squares solution of all of them is known.
class AsyncLeastSquares : public ::testing::TestWithParam<Case> {};

TEST_P(AsyncLeastSquares, Converges) {
  const Case& c = GetParam();
  constexpr int kColumns = 300;
  Cluster cluster(c.shards, "inproc");
  v1::JobSpec spec;
  spec.set_name("squares");
  v1::TensorSpec* tensor = spec.add_tensors();
  tensor->set_name("x");
  tensor->add_shape(kColumns);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.set_codec(c.codec);
  spec.set_max_workers(static_cast<uint32_t>(c.workers));
  spec.set_run_elements(64);
  spec.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
  std::vector<float> solution(kColumns);
  for (int i = 0; i < kColumns; ++i) solution[i] = std::sin(static_cast<float>(i));
  std::vector<double> errors(c.workers);
  InParallel(c.workers, [&](int w) {
    Worker worker(spec, w);
    ASSERT_TRUE(worker.Join(cluster.addresses(), PullMode::kParams).ok());
    std::vector<float>& x = worker.parameters()[0];
    for (int step = 0; step < 400 / c.workers + 100; ++step) {
      // Rows of this worker: the difference of neighbours beside the value itself.
      std::fill(worker.gradients()[0].begin(), worker.gradients()[0].end(), 0.0f);
      for (int i = w; i < kColumns; i += c.workers) {
        const int next = (i + 1) % kColumns;
        const float own = x[i] - solution[i];
        const float slope = own - (x[next] - solution[next]);
        worker.gradients()[0][i] += own + 0.5f * slope;
        worker.gradients()[0][next] -= 0.5f * slope;
      }
      const absl::Status status = worker.Step(0.2f);
      ASSERT_TRUE(status.ok()) << status;
    }
    double error = 0;
    for (int i = 0; i < kColumns; ++i) error = std::max<double>(error, std::fabs(x[i] - solution[i]));
    errors[w] = error;
  });
  for (double error : errors) EXPECT_LT(error, 0.02);
}

INSTANTIATE_TEST_SUITE_P(Codecs, AsyncLeastSquares,
                         ::testing::Values(Case{"DenseOne", "dense:values=fp32", 1, 1, true},
                                           Case{"DenseTwo", "dense:values=fp32", 2, 2, true},
                                           Case{"DenseFour", "dense:values=fp32", 4, 1, true},
                                           Case{"TagcOne", "tagc:density=0.3", 1, 2, true},
                                           Case{"TagcTwo", "tagc:density=0.3", 2, 1, true},
                                           Case{"TagcFour", "tagc:density=0.3", 4, 2, true}),
                         [](const auto& info) { return info.param.name; });

TEST(AsyncJob, ANewcomerStartsWithTheNewestOfEveryBucket) {
  Cluster cluster(2, "inproc");
  const v1::JobSpec spec = AsyncSpec("newcomer", "tagc:density=0.3", 2);
  std::vector<std::unique_ptr<ExactWorker>> workers;
  for (int w = 0; w < 2; ++w) workers.push_back(std::make_unique<ExactWorker>(spec, w));
  ASSERT_TRUE(workers[0]->worker().Join(cluster.addresses(), PullMode::kParams).ok());
  for (int step = 0; step < 10; ++step) ASSERT_TRUE(workers[0]->Step().ok());
  ASSERT_TRUE(workers[1]->worker().Join(cluster.addresses(), PullMode::kParams).ok());
  EXPECT_EQ(workers[1]->worker().session().start_version(), 11u);
  EXPECT_EQ(workers[1]->worker().session().Digest(), workers[0]->worker().session().Digest());
  for (auto& worker : workers) ASSERT_TRUE(worker->Step().ok());
  for (auto& worker : workers) ASSERT_TRUE(worker->Drain().ok());
  for (auto& worker : workers) worker->worker().Drop();
  ExpectApplied(spec, cluster.addresses(), workers);
}

// A process that ends between two rounds and is started again brings its residual along.
TEST(AsyncJob, ACheckpointKeepsTheResidual) {
  Cluster cluster(2, "inproc");
  const v1::JobSpec spec = AsyncSpec("checkpoint", "tagc:density=0.3", 1);
  const std::string path = ::testing::TempDir() + "/async-checkpoint";
  std::vector<std::unique_ptr<ExactWorker>> workers;
  workers.push_back(std::make_unique<ExactWorker>(spec, 0));
  workers.push_back(std::make_unique<ExactWorker>(spec, 0));
  ASSERT_TRUE(workers[0]->worker().Join(cluster.addresses(), PullMode::kParams).ok());
  for (int step = 0; step < 5; ++step) ASSERT_TRUE(workers[0]->Step().ok());
  ASSERT_TRUE(workers[0]->worker().session().Save(path).ok());
  workers[0]->worker().Drop();
  SessionOptions options = workers[1]->worker().Options(cluster.addresses(), PullMode::kParams);
  options.resume.from = path;
  auto session = Session::Join(std::move(options));
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_FALSE((*session)->resumed());
  EXPECT_EQ((*session)->version(), 6u);
  const std::vector<float> rates = {kExactRate};
  std::vector<const float*> zeros;
  for (const auto& gradient : workers[1]->worker().gradients()) zeros.push_back(gradient.data());
  for (int step = 0; step < kRoundsToDrain; ++step) ASSERT_TRUE((*session)->Exchange(zeros, rates).ok());
  session->reset();
  ExpectApplied(spec, cluster.addresses(), workers);
}

TEST(AsyncJob, RefusesWhatItCannotDo) {
  Cluster cluster(1, "inproc");
  v1::JobSpec spec = AsyncSpec("refuses", "dense:values=fp32", 1);
  Worker worker(spec, 0);
  const absl::Status update = worker.Join(cluster.addresses(), PullMode::kUpdate);
  EXPECT_TRUE(absl::IsInvalidArgument(update)) << update;
  EXPECT_NE(update.message().find("params"), std::string::npos) << update;
  spec.mutable_rounds()->set_quorum(1);
  EXPECT_TRUE(absl::IsInvalidArgument(Job::Make(spec).status())) << Job::Make(spec).status();
  spec.mutable_rounds()->clear_quorum();
  spec.mutable_rounds()->set_staleness(257);
  EXPECT_TRUE(absl::IsInvalidArgument(Job::Make(spec).status())) << Job::Make(spec).status();
  spec.mutable_rounds()->clear_staleness();
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_NONE);
  EXPECT_TRUE(absl::IsInvalidArgument(Job::Make(spec).status())) << Job::Make(spec).status();
}

TEST(AsyncJob, ANonFiniteGradientIsRefusedAndTheOthersGoOn) {
  Cluster cluster(1, "inproc");
  const v1::JobSpec spec = AsyncSpec("nonfinite", "dense:values=fp32", 1);
  std::vector<std::unique_ptr<ExactWorker>> workers;
  workers.push_back(std::make_unique<ExactWorker>(spec, 0));
  Worker& worker = workers[0]->worker();
  ASSERT_TRUE(worker.Join(cluster.addresses(), PullMode::kParams).ok());
  ASSERT_TRUE(workers[0]->Step().ok());
  for (auto& gradient : worker.gradients()) std::fill(gradient.begin(), gradient.end(), 0.0f);
  // One tensor, then all of them: buckets with several that are refused keep nothing of any.
  for (const size_t bad : {size_t{1}, worker.gradients().size()}) {
    for (size_t t = 0; t < worker.gradients().size(); ++t)
      worker.gradients()[t].back() = bad > 1 || t == bad ? NAN : 0.0f;
    const absl::Status refused = worker.Step(kExactRate);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  }
  for (auto& gradient : worker.gradients()) gradient.back() = 0;
  ASSERT_TRUE(workers[0]->Step().ok());
  worker.Drop();
  ExpectApplied(spec, cluster.addresses(), workers);
}

}  // namespace
}  // namespace gradwire::testing
