// Which of a shard's servers is joined, by what each says of itself.
#include "client/cpp/internal/server_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"

namespace gradwire::client {
namespace {

using testing::HasSubstr;

// Says `status` of itself, or what is no status.
class Operator final : public transport::Service {
 public:
  absl::StatusOr<std::string> Call(transport::Method method, std::string_view request) override {
    EXPECT_EQ(method, "gradwire.v1.Operator/DescribeShard");
    return garbled ? std::string("\xff") : status.SerializeAsString();
  }
  absl::StatusOr<std::unique_ptr<transport::StreamSink>> Accept(transport::Method method,
                                                                std::shared_ptr<transport::Stream> stream) override {
    return absl::UnimplementedError("no streams here");
  }
  v1::ShardStatus status;
  bool garbled = false;
};

class ServerChoiceTest : public testing::Test {
 protected:
  // A server at inproc://NAME.
  Operator* Serve(const std::string& name, const ServerEpoch& epoch) {
    services_.push_back(std::make_unique<Operator>());
    Operator* const made = services_.back().get();
    made->status.set_server_epoch(epoch.epoch);
    made->status.set_lineage(epoch.lineage);
    auto listener = transport::Listen("inproc://server-choice-" + name, made);
    EXPECT_TRUE(listener.ok()) << listener.status();
    listeners_.push_back(*std::move(listener));
    addresses_ += (addresses_.empty() ? "" : "|") + listeners_.back()->address();
    return made;
  }
  // The epoch of the server that was chosen by one that knows `known`.
  ServerEpoch Chosen(const ServerEpoch& known = {}) {
    ServerChoice choice(addresses_, 5000);
    EXPECT_TRUE(choice.Dial().ok());
    const absl::Status chosen = choice.Choose(known, absl::Now() + absl::Seconds(5));
    EXPECT_TRUE(chosen.ok()) << chosen;
    const auto status = choice.Describe();
    EXPECT_TRUE(status.ok()) << status.status();
    return status.ok() ? ServerEpoch{status->server_epoch(), status->lineage()} : ServerEpoch{};
  }
  absl::Status Refusal() {
    ServerChoice choice(addresses_, 5000);
    EXPECT_TRUE(choice.Dial().ok());
    return choice.Choose({}, absl::Now() + absl::Seconds(5));
  }

  std::vector<std::unique_ptr<Operator>> services_;
  std::vector<std::unique_ptr<transport::Listener>> listeners_;
  std::string addresses_;
};

TEST_F(ServerChoiceTest, OfOneLineageTheLargestEpoch) {
  Serve("first", {4, 7});
  Serve("second", {6, 7});
  Serve("third", {5, 7});
  EXPECT_EQ(Chosen().epoch, 6u);
}

TEST_F(ServerChoiceTest, OfSeveralLineagesTheKnownOneElseTheFirstNamed) {
  Serve("mine", {2, 7});
  Serve("strange", {9, 8});
  EXPECT_EQ(Chosen({1, 8}).lineage, 8u);
  EXPECT_EQ(Chosen({1, 7}).lineage, 7u);
  EXPECT_EQ(Chosen().lineage, 7u);
}

TEST_F(ServerChoiceTest, StandbysAndFencedServersAreNotChosen) {
  Serve("fenced", {9, 7})->status.set_fenced(true);
  Serve("standby", {9, 7})->status.set_following("inproc://server-choice-primary");
  Serve("primary", {3, 7});
  EXPECT_EQ(Chosen().epoch, 3u);
}

TEST_F(ServerChoiceTest, WhereNoneServesEachIsNamedWithWhatItSaid) {
  Serve("fenced", {9, 7})->status.set_fenced(true);
  Serve("standby", {9, 7})->status.set_following("inproc://elsewhere");
  Serve("garbled", {9, 7})->garbled = true;
  Serve("gone", {9, 7});
  listeners_.back().reset();
  const absl::Status refused = Refusal();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("fenced is fenced"), HasSubstr("standby is a standby"),
                    HasSubstr("garbled: its answer cannot be parsed"), HasSubstr("server-choice-gone: ")));
}

TEST_F(ServerChoiceTest, ASingleServerIsNotAsked) {
  Serve("only", {1, 7})->garbled = true;
  EXPECT_TRUE(Refusal().ok());
}

}  // namespace
}  // namespace gradwire::client
