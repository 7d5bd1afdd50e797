// What shards tell each other, over a real transport; the other shard is played by another NormExchange, or two.
#include "server/norms/norm_exchange.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/unit/server/frame_maker.h"

namespace gradwire {
namespace {

using testing_support::SmallSpec;

constexpr absl::Duration kPatience = absl::Seconds(60);

// Where another shard is: hands calls to whom it is told.
class Place final : public transport::Service {
 public:
  absl::StatusOr<std::string> Call(transport::Method method, std::string_view bytes) override {
    v1::ExchangeRequest request;
    if (!request.ParseFromString(std::string(bytes))) return absl::InvalidArgumentError("not an ExchangeRequest");
    NormExchange* const shard = shard_;
    ++calls_;
    if (shard == nullptr) return absl::UnavailableError("it is down");
    const absl::StatusOr<v1::ExchangeReply> reply = shard->Take(request);
    if (!reply.ok()) return reply.status();
    return reply->SerializeAsString();
  }
  absl::StatusOr<std::unique_ptr<transport::StreamSink>> Accept(transport::Method,
                                                                std::shared_ptr<transport::Stream>) override {
    return absl::UnimplementedError("there are calls only");
  }
  void Be(NormExchange* shard) { shard_ = shard; }
  bool WaitForCalls(int count) const {
    const absl::Time bound = absl::Now() + kPatience;
    while (calls_ < count && absl::Now() < bound) absl::SleepFor(absl::Milliseconds(1));
    return calls_ >= count;
  }

 private:
  std::atomic<NormExchange*> shard_ = nullptr;
  std::atomic<int> calls_ = 0;
};

class NormExchangeTest : public testing::Test {
 protected:
  NormExchangeTest() {
    v1::JobSpec spec = SmallSpec("job", 1);
    spec.set_clip_norm(1.0);
    job_ = std::make_unique<Job>(*Job::Make(spec));
    layout_ = std::make_unique<Layout>(*Layout::Make(*job_, 2));
    sums_ = std::make_unique<NormSums>(layout_.get(), job_->tensors().size());
    for (int s = 0; s < 2; ++s) {
      listeners_.push_back(*transport::Listen(absl::StrCat("inproc://norms-", getpid(), "-", s), &places_[s]));
      addresses_.push_back(listeners_.back()->address());
    }
  }

  std::unique_ptr<NormExchange> Shard(uint32_t shard, NormExchange::Written written) {
    auto made = std::make_unique<NormExchange>(job_.get(), layout_.get(), shard, tellers_, std::move(written), [] {});
    EXPECT_TRUE(made->Start().ok());
    made->SetAddresses(1, addresses_);
    return made;
  }
  // Waits until all shards have told.
  static NormExchange::Agreed Agree(NormExchange* exchange, ShardSquares own) {
    exchange->Offer(0, 0, std::move(own));
    const absl::Time bound = absl::Now() + kPatience;
    for (; absl::Now() < bound; absl::SleepFor(absl::Milliseconds(1))) {
      if (std::optional<NormExchange::Agreed> agreed = exchange->TryAgree(0, 0)) return *std::move(agreed);
    }
    ADD_FAILURE() << "no agreement";
    return {};
  }
  ShardSquares Squares(uint32_t shard, double each) const {
    return {std::vector<double>(sums_->runs(shard), each), {}};
  }

  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<NormSums> sums_;
  Place places_[2];
  std::vector<std::unique_ptr<transport::Listener>> listeners_;
  std::vector<std::string> addresses_;
  std::shared_ptr<Tellers> tellers_ = std::make_shared<Tellers>();
};

std::optional<ShardSquares> Nothing(uint64_t, size_t) { return std::nullopt; }

TEST_F(NormExchangeTest, AShardThatDiedWhenItHadAgreedIsAskedAgain) {
  const auto waiting = Shard(0, Nothing);
  const auto early = Shard(1, Nothing);
  places_[1].Be(early.get());  // it has nothing of the round yet
  NormExchange::Agreed agreed;
  std::thread thread([&] { agreed = Agree(waiting.get(), Squares(0, 1.0)); });
  ASSERT_TRUE(places_[1].WaitForCalls(1));
  early->Stop();  // it had agreed, written the round, and died before it told
  const auto again = Shard(1, [&](uint64_t, size_t) { return Squares(1, 2.0); });
  again->SetRound(1);
  places_[1].Be(again.get());
  thread.join();  // unless nobody asks it
  std::vector<ShardSquares> all = {Squares(0, 1.0), Squares(1, 2.0)};
  EXPECT_EQ(agreed.sums, sums_->Add(all, 1));
}

TEST_F(NormExchangeTest, WhoHasAgreedAsksNobody) {
  const auto first = Shard(0, Nothing);
  const auto second = Shard(1, Nothing);
  places_[0].Be(first.get());
  places_[1].Be(second.get());
  std::thread thread([&] { Agree(first.get(), Squares(0, 1.0)); });
  Agree(second.get(), Squares(1, 1.0));
  thread.join();
  EXPECT_TRUE(places_[0].WaitForCalls(1));
  EXPECT_TRUE(places_[1].WaitForCalls(1));
  for (NormExchange* shard : {first.get(), second.get()}) {
    EXPECT_FALSE(shard->TakeNext(true, absl::Now() + absl::Hours(1)).to.has_value());
  }
}

TEST_F(NormExchangeTest, TheFateOfARoundIsToldInJobsThatSkipAlone) {
  const auto shard = Shard(0, Nothing);
  v1::ExchangeRequest request;
  request.set_job("job");
  request.set_layout_digest(layout_->digest());
  request.set_shard(1);
  *request.mutable_sums() = sums_->Encode(1, Squares(1, 1.0), 1);
  request.mutable_sums()->set_fate(v1::FATE_SKIPPED);
  EXPECT_EQ(shard->Take(request).status().code(), absl::StatusCode::kInvalidArgument);
  request.mutable_sums()->clear_fate();
  EXPECT_TRUE(shard->Take(request).ok());
  shard->Offer(0, 0, Squares(0, 1.0));
  const std::optional<NormExchange::Agreed> agreed = shard->TryAgree(0, 0);
  ASSERT_TRUE(agreed.has_value());
  EXPECT_FALSE(agreed->skipped);
}

}  // namespace
}  // namespace gradwire
