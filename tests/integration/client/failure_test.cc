// Lost workers, lost shards, servers that are not there, jobs that do not match.
#include "client/cpp/internal/shard_link.h"
#include "tests/integration/client/cluster.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::testing {
namespace {

class NoEvents final : public client::LinkEvents {
 public:
  void OnAck(uint32_t, const v1::PushAck&) override {}
  void OnAnswer(uint32_t, client::PullAnswer) override {}
  void OnMustInitialize(uint32_t) override {}
  void OnLost(uint32_t, const absl::Status&) override {}
};

TEST(LostWorker, IsNotWaitedForAfterItsLeaseAndMayJoinAgain) {
  Cluster cluster(2, "grpc");
  v1::JobSpec spec = MakeSpec("lost", "dense:values=fixed32", v1::OPTIMIZER_ADAMW, 2);
  spec.set_lease_ms(700);
  auto job = Job::Make(spec);
  ASSERT_TRUE(job.ok());
  auto layout = Layout::Make(*job, 2);
  ASSERT_TRUE(layout.ok());
  Worker first(spec, 0);
  // A worker that takes part and then falls silent, as a process that was killed does.
  NoEvents events;
  std::vector<std::unique_ptr<client::ShardLink>> links;
  std::thread joining([&] {
    const absl::Status status = first.Join(cluster.addresses());
    EXPECT_TRUE(status.ok()) << status;
  });
  for (uint32_t s = 0; s < 2; ++s) {
    client::LinkOptions options;
    options.address = cluster.addresses()[s];
    options.shard = s;
    options.identity.set_job("lost");
    options.identity.set_worker("worker-1");
    options.identity.set_incarnation(42);
    options.connect_timeout_ms = 5000;
    options.rpc_timeout_ms = 5000;
    links.push_back(std::make_unique<client::ShardLink>(options));
    v1::JoinRequest request;
    *request.mutable_identity() = options.identity;
    *request.mutable_spec() = job->spec();
    request.set_shard_index(s);
    request.set_shard_count(2);
    request.set_layout_digest(layout->digest());
    joining.joinable() ? joining.join() : void();  // the first worker initialises the parameters
    const auto reply = links[s]->Join(request);
    ASSERT_TRUE(reply.ok()) << reply.status();
    ASSERT_TRUE(links[s]->Start(700, &events).ok());
  }
  for (auto& link : links) ASSERT_TRUE(link->Close(false).ok());
  first.Fill(0);
  const absl::Status waited = first.Step(0.01f);  // ends when the lease does
  ASSERT_TRUE(waited.ok()) << waited;
  std::string digest;
  std::atomic<uint64_t> target{UINT64_MAX};  // both stop at this version, some rounds after the newcomer's first
  std::thread second([&] {
    Worker worker(spec, 1);
    const absl::Status joined = worker.Join(cluster.addresses());
    ASSERT_TRUE(joined.ok()) << joined;
    target = worker.session().start_version() + 10;
    while (worker.session().version() < target) {
      worker.Fill(worker.session().version());
      ASSERT_TRUE(worker.Step(0.01f).ok());
    }
    digest = worker.session().Digest();
  });
  while (first.session().version() < target) {
    first.Fill(first.session().version());
    const absl::Status status = first.Step(0.01f);
    ASSERT_TRUE(status.ok()) << status;
  }
  second.join();
  EXPECT_EQ(digest, first.session().Digest());
}

// A session that has lost one shard, in a process that lives on: the others have that shard, and do not wait for it on
// those which it still reaches.
TEST(FailedSession, IsWaitedForNoLongerThanItsLease) {
  Cluster cluster(2, "grpc");
  testing_support::TcpProxy proxy(cluster.addresses()[0]);
  v1::JobSpec spec = MakeSpec("half", "dense:values=fixed32", v1::OPTIMIZER_ADAMW, 2);
  Worker stays(spec, 0), fails(spec, 1);
  InParallel(2, [&](int w) {
    SessionOptions options = fails.Options({proxy.address(), cluster.addresses()[1]});
    options.timeouts.reconnect_ms = 500;
    const absl::Status joined = w == 0 ? stays.Join(cluster.addresses()) : fails.JoinWith(std::move(options));
    ASSERT_TRUE(joined.ok()) << joined;
  });
  for (uint64_t step = 0; step < 2; ++step) {
    InParallel(2, [&](int w) {
      Worker& worker = w == 0 ? stays : fails;
      worker.Fill(step);
      ASSERT_TRUE(worker.Step(0.01f).ok());
    });
  }
  proxy.Cut();
  std::thread lost([&] {
    fails.Fill(2);
    EXPECT_FALSE(fails.Step(0.01f).ok());
  });
  for (uint64_t step = 2; step < 6; ++step) {
    stays.Fill(step);
    const absl::Status stepped = stays.Step(0.01f);
    ASSERT_TRUE(stepped.ok()) << "step " << step << ": " << stepped;
  }
  lost.join();
  // Its lease has ended where it gave no sign of life.
  EXPECT_EQ(fails.session().Leave(), absl::OkStatus());
}

TEST(Start, InitialParametersAreThoseOfOneWorkerOnEveryShard) {
  Cluster cluster(2, "grpc");
  const v1::JobSpec spec = MakeSpec("one-start", "dense:values=fp32", v1::OPTIMIZER_SGD, 2);
  Worker a(spec, 0);
  Worker b(spec, 1);
  for (std::vector<float>& tensor : b.parameters()) std::fill(tensor.begin(), tensor.end(), 3.0f);
  const std::vector<std::vector<float>> expected = a.parameters();
  // A is chosen on shard 0 and waits for shard 1, by now with a long back-off: B gets there first.
  cluster.Kill(1);
  std::thread first([&] {
    const absl::Status status = a.Join(cluster.addresses());
    EXPECT_TRUE(status.ok()) << status;
  });
  while (!cluster.HasJob(0, "one-start")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  cluster.Restart(1);
  const absl::Status status = b.Join(cluster.addresses());
  first.join();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(a.parameters() == expected);
  EXPECT_TRUE(b.parameters() == expected);
  EXPECT_EQ(a.session().ShardDigests(), b.session().ShardDigests());
}

// A shard that was lost before round 0 has no parameters when it is back; shard 0 has those of the worker it chose.
TEST(LostShard, GetsItsInitialParametersFromAWorkerWithTheValuesOfShard0) {
  Cluster cluster(2, "grpc");
  v1::JobSpec spec = MakeSpec("again", "dense:values=fp32", v1::OPTIMIZER_ADAMW, 2);
  {
    Worker chosen(spec, 0);
    ASSERT_TRUE(chosen.Join(cluster.addresses()).ok());
    cluster.Kill(1);
  }
  cluster.Restart(1);
  Worker other(spec, 1);
  for (auto& tensor : other.parameters()) tensor[0] += 1.0f;
  SessionOptions options = other.Options(cluster.addresses());
  options.timeouts.start_ms = 1000;
  const auto refused = Session::Join(std::move(options));
  EXPECT_TRUE(absl::IsDeadlineExceeded(refused.status())) << refused.status();
  std::vector<std::string> digests(2);
  InParallel(2, [&](int w) {
    Worker worker(spec, w);
    if (w == 1) worker.parameters() = other.parameters();
    const absl::Status joined = worker.Join(cluster.addresses());
    ASSERT_TRUE(joined.ok()) << joined;
    worker.Fill(0);
    const absl::Status stepped = worker.Step(0.01f);
    ASSERT_TRUE(stepped.ok()) << stepped;
    digests[w] = worker.session().Digest();
  });
  EXPECT_EQ(digests[0], digests[1]);
}

// What a start that must fail leaves on a shard that lost everything would be in the way of what is restored there.
TEST(LostShard, KeepsNoJobOfAStartThatFailed) {
  for (const uint32_t lost : {0u, 1u}) {
    SCOPED_TRACE(lost);
    Cluster cluster(2, "inproc");
    const v1::JobSpec spec = MakeSpec("empty", "dense:values=fp32", v1::OPTIMIZER_SGD, 1);
    {
      Worker worker(spec, 0);
      ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
      for (uint64_t step = 0; step < 4; ++step) {
        worker.Fill(step);
        ASSERT_TRUE(worker.Step(0.01f).ok());
      }
      cluster.Kill(lost);
    }
    cluster.Restart(lost);
    Worker late(spec, 1);
    const absl::Status refused = late.Join(cluster.addresses());
    EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
    EXPECT_NE(std::string(refused.message()).find("durability is none"), std::string::npos) << refused;
    EXPECT_FALSE(cluster.HasJob(lost, "empty"));
    EXPECT_GE(cluster.Describe(1 - lost, "empty").version(), 5u);
  }
}

// How often `words` stand in a message.
size_t CountIn(const absl::Status& status, const std::string& words) {
  const std::string text(status.message());
  size_t count = 0;
  for (size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) ++count;
  return count;
}

TEST(LostShard, IsNamedAndTheSessionStaysFailed) {
  for (const auto& [scheme, small] : {std::pair("inproc", false), {"grpc", false}, {"grpc", true}, {"tcp", false}}) {
    Cluster cluster(2, scheme);
    const v1::JobSpec large = MakeSpec("gone", "dense:values=fp32", v1::OPTIMIZER_SGD, 1);
    Worker worker(small ? Small(large) : large, 0);
    ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
    worker.Fill(0);
    ASSERT_TRUE(worker.Step(0.01f).ok());
    cluster.Kill(1);
    const absl::Status status = worker.Step(0.01f);
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(CountIn(status, absl::StrCat("shard 1 at ", cluster.addresses()[1])), 1u) << status;
    EXPECT_EQ(worker.session().EndRound(), status);
    const std::vector<float> rates = {0.01f};
    EXPECT_EQ(worker.session().BeginRound(rates), status);
  }
}

TEST(Join, GivesUpOnAServerThatIsNotThere) {
  Worker worker(MakeSpec("nobody", "dense:values=fp32", v1::OPTIMIZER_SGD, 1), 0);
  for (const std::string address : {"grpc://127.0.0.1:1", "grpc://no-such-host.invalid:7070", "inproc://nobody",
                                    "tcp://127.0.0.1:1", "tcp://no-such-host.invalid:7070"}) {
    SessionOptions options = worker.Options({address});
    options.timeouts.connect_ms = 400;
    const auto session = Session::Join(std::move(options));
    ASSERT_FALSE(session.ok());
    EXPECT_TRUE(absl::IsUnavailable(session.status()) || absl::IsDeadlineExceeded(session.status()))
        << session.status();
    EXPECT_NE(std::string(session.status().message()).find(address), std::string::npos) << session.status();
  }
}

TEST(Join, StopsWaitingForAServer) {
  Worker worker(MakeSpec("nobody", "dense:values=fp32", v1::OPTIMIZER_SGD, 1), 0);
  for (const std::string address : {"grpc://127.0.0.1:1", "inproc://nobody", "tcp://127.0.0.1:1"}) {
    std::stop_source stop;
    SessionOptions options = worker.Options({address});
    options.timeouts.connect_ms = 600'000;
    options.stop = stop.get_token();
    absl::Status status;
    std::thread joining([&] { status = Session::Join(std::move(options)).status(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it is trying; earlier would do as well
    stop.request_stop();
    joining.join();
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
  }
}

TEST(Join, StopsWaitingForInitialParametersAndLeaves) {
  for (const std::string scheme : {"inproc", "grpc", "tcp"}) {
    Cluster cluster(1, scheme);
    const v1::JobSpec spec = MakeSpec("silent", "dense:values=fp32", v1::OPTIMIZER_SGD, 2);
    auto job = Job::Make(spec);
    ASSERT_TRUE(job.ok());
    // Chosen to send the initial parameters, and never does.
    client::LinkOptions link_options;
    link_options.address = cluster.addresses()[0];
    link_options.identity.set_job("silent");
    link_options.identity.set_worker("silent-worker");
    link_options.identity.set_incarnation(42);
    link_options.connect_timeout_ms = link_options.rpc_timeout_ms = 5000;
    NoEvents events;
    client::ShardLink silent(link_options);
    v1::JoinRequest request;
    *request.mutable_identity() = link_options.identity;
    *request.mutable_spec() = job->spec();
    request.set_shard_count(1);
    ASSERT_TRUE(silent.Join(request).ok());
    ASSERT_TRUE(silent.Start(spec.lease_ms(), &events).ok());
    Worker worker(spec, 0);
    std::stop_source stop;
    SessionOptions options = worker.Options(cluster.addresses());
    options.timeouts.start_ms = 600'000;
    options.stop = stop.get_token();
    absl::Status status;
    std::thread joining([&] { status = Session::Join(std::move(options)).status(); });
    while (cluster.Workers(0, "silent") < 2) std::this_thread::yield();
    stop.request_stop();
    joining.join();
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
    EXPECT_EQ(cluster.Workers(0, "silent"), 1);
  }
}

TEST(Join, NamesTheTimeoutThatCannotBe) {
  Cluster cluster(1, "inproc");
  Worker worker(MakeSpec("timeouts", "dense:values=fp32", v1::OPTIMIZER_SGD, 1), 0);
  const std::pair<int64_t SessionTimeouts::*, const char*> timeouts[] = {
      {&SessionTimeouts::connect_ms, "timeouts.connect_ms"},
      {&SessionTimeouts::start_ms, "timeouts.start_ms"},
      {&SessionTimeouts::rpc_ms, "timeouts.rpc_ms"},
      {&SessionTimeouts::round_ms, "timeouts.round_ms"},
      {&SessionTimeouts::reconnect_ms, "timeouts.reconnect_ms"}};
  for (const auto& [member, name] : timeouts) {
    for (const int64_t value : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
      SessionOptions options = worker.Options(cluster.addresses());
      options.timeouts.*member = value;
      const absl::Status status = Session::Join(std::move(options)).status();
      EXPECT_EQ(status.message(), absl::StrCat(name, " is ", value, "; allowed are 1 to 1000000000000 milliseconds"));
    }
  }
}

TEST(Join, NamesTheNumberOfThreadsThatCannotBe) {
  Cluster cluster(1, "inproc");
  Worker worker(MakeSpec("threads", "dense:values=fp32", v1::OPTIMIZER_SGD, 1), 0);
  for (const uint32_t threads : {0u, 65u, UINT32_MAX}) {
    SessionOptions options = worker.Options(cluster.addresses());
    options.encode_threads = threads;
    EXPECT_EQ(Session::Join(std::move(options)).status(),
              absl::InvalidArgumentError(absl::StrCat("encode_threads is ", threads, "; allowed are 1 to 64")));
  }
}

TEST(Join, RefusesWhatDoesNotFit) {
  Cluster cluster(1, "inproc");
  const v1::JobSpec spec = MakeSpec("fit", "dense:values=fp32", v1::OPTIMIZER_SGD, 2);
  Worker first(spec, 0);
  ASSERT_TRUE(first.Join(cluster.addresses()).ok());
  v1::JobSpec other = spec;
  other.set_codec("dense:values=fixed32");
  Worker second(other, 1);
  const absl::Status mismatch = second.Join(cluster.addresses());
  EXPECT_TRUE(absl::IsFailedPrecondition(mismatch)) << mismatch;
  EXPECT_TRUE(absl::IsInvalidArgument(first.Join({}))) << "no servers";
  EXPECT_TRUE(absl::IsInvalidArgument(first.Join({"nonsense"}))) << "bad address";
  SessionOptions short_memory = first.Options(cluster.addresses());
  short_memory.memory[3] = short_memory.memory[3].first(5);
  const auto session = Session::Join(std::move(short_memory));
  EXPECT_TRUE(absl::IsInvalidArgument(session.status())) << session.status();
  EXPECT_NE(std::string(session.status().message()).find("h.0.mlp.weight"), std::string::npos) << session.status();
}

void TimeOutAndGoOn(const v1::JobSpec& spec) {
  Cluster cluster(1, "inproc");
  Worker first(spec, 0);
  Worker second(spec, 1);
  ASSERT_TRUE(first.Join(cluster.addresses()).ok());
  ASSERT_TRUE(second.Join(cluster.addresses()).ok());
  first.Fill(0);
  second.Fill(0);
  const std::vector<float> rates = {0.01f};
  ASSERT_TRUE(first.session().BeginRound(rates).ok());
  for (uint32_t t = 0; t < first.gradients().size(); ++t)
    ASSERT_TRUE(first.session().TensorReady(t, first.gradients()[t].data()).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(first.session().EndRound(100)));
  std::thread other([&] { EXPECT_TRUE(second.Step(0.01f).ok()); });
  EXPECT_TRUE(first.session().EndRound().ok());
  other.join();
  EXPECT_EQ(first.session().Digest(), second.session().Digest());
}

TEST(EndRound, TimesOutAndGoesOn) {
  const v1::JobSpec spec = MakeSpec("slow", "dense:values=fp32", v1::OPTIMIZER_SGD, 2);
  TimeOutAndGoOn(spec);
  TimeOutAndGoOn(Small(spec));
}

TEST(EndRound, WritesNothingToTheParametersOnceItHasTimedOut) {
  const v1::JobSpec spec = MakeSpec("timed-out", "dense:values=fp32", v1::OPTIMIZER_SGD, 2);
  Cluster cluster(1, "inproc");
  Worker workers[] = {Worker(spec, 0), Worker(spec, 1)};
  InParallel(2, [&](int w) {
    ASSERT_TRUE(workers[w].Join(cluster.addresses()).ok());
    workers[w].Fill(0);
    EXPECT_TRUE(workers[w].Step(0.01f).ok());  // which calibrates
  });
  auto& [first, second] = workers;
  ASSERT_TRUE(first.session().BeginRound(std::vector<float>{0.01f}).ok());
  for (uint32_t t = 0; t < first.gradients().size(); ++t)
    ASSERT_TRUE(first.session().TensorReady(t, first.gradients()[t].data()).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(first.session().EndRound(1)));
  const std::vector<std::vector<float>> before = first.parameters();
  const uint64_t first_pulled = first.session().stats().pulled_bytes;
  const uint64_t second_pulled = second.session().stats().pulled_bytes;
  EXPECT_TRUE(second.Step(0.01f).ok());
  const uint64_t update = second.session().stats().pulled_bytes - second_pulled;
  while (first.session().stats().pulled_bytes < first_pulled + update)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // in which what has come might be applied
  EXPECT_EQ(first.parameters(), before);
  EXPECT_TRUE(first.session().EndRound().ok());
  EXPECT_EQ(first.parameters(), second.parameters());
}

TEST(Exchange, OpensNoRoundForAGradientThatIsMissing) {
  const v1::JobSpec spec = Small(MakeSpec("null", "dense:values=fp32", v1::OPTIMIZER_SGD, 1));
  Cluster cluster(1, "inproc");
  Worker worker(spec, 0);
  ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
  std::vector<const float*> gradients;
  for (const auto& gradient : worker.gradients()) gradients.push_back(gradient.data());
  const float* const third = std::exchange(gradients[2], nullptr);
  const std::vector<float> rates = {0.01f};
  const absl::Status refused = worker.session().Exchange(gradients, rates);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_NE(refused.message().find(spec.tensors(2).name()), absl::string_view::npos) << refused;
  gradients[2] = third;
  EXPECT_TRUE(worker.session().Exchange(gradients, rates).ok());
}

// A worker that was cut off does not go on in a job that only has the name of its own, at a version near to it.
TEST(Failures, AWorkerDoesNotGoOnInAJobThatWasMadeAnew) {
  Cluster cluster(1, "grpc");
  testing_support::TcpProxy proxy(cluster.addresses()[0]);
  v1::JobSpec spec = Small(MakeSpec("anew", "dense:values=fp32", v1::OPTIMIZER_ADAMW, 2));
  spec.set_min_workers(1);
  spec.set_lease_ms(900);
  Worker old(spec, 0);
  ASSERT_TRUE(old.Join({proxy.address()}).ok());
  const auto train = [](Worker& worker) {
    for (int i = 0; i < 4; ++i) {
      worker.Fill(0);
      const absl::Status status = worker.Step(0.01f);
      ASSERT_TRUE(status.ok()) << status;
    }
  };
  train(old);
  proxy.Cut();
  absl::SleepFor(absl::Seconds(2));  // its connections are given up
  ASSERT_TRUE(cluster.Delete(0, "anew").ok());
  Worker other(spec, 1);
  ASSERT_TRUE(other.Join(cluster.addresses()).ok());
  train(other);
  proxy.Heal();
  old.Fill(0);
  const absl::Status status = old.Step(0.01f);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_NE(std::string(status.message()).find("start the worker again"), std::string::npos) << status;
}

}  // namespace
}  // namespace gradwire::testing
