// The Follow stream, with one end replaced by a script: a standby that says strange things or nothing, a primary that
// sends what no primary would.
#include <gmock/gmock.h>

#include <fstream>

#include "gradwire/v1/replication.pb.h"
#include "server/replication/epoch.h"
#include "server/replication/record_pieces.h"
#include "tests/integration/server/standby_fixture.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::Inbox;
using testing_support::StandbyFixture;

// A standby of the fixture's primary.
class ScriptedStandby {
 public:
  ScriptedStandby(const std::string& address, uint64_t known_epoch, uint64_t lineage = 0)
      : channel_(*transport::Dial(address)) {
    stream_ = *channel_->Open("gradwire.v1.Replication/Follow", &inbox_);
    v1::FollowRequest open;
    open.mutable_open()->set_name("scripted");
    open.mutable_open()->set_known_epoch(known_epoch);
    open.mutable_open()->set_lineage(lineage);
    Say(open);
  }
  ~ScriptedStandby() { stream_.reset(); }

  void Say(const v1::FollowRequest& request) { stream_->Send({request.SerializeAsString(), {}}).IgnoreError(); }
  void Take(const journal::Record& record) {
    v1::FollowRequest request;
    v1::Taken& taken = *request.add_taken();
    taken.set_bucket(record.bucket);
    taken.set_version(record.type == journal::RecordType::kUpdate ? record.round + 1 : record.round);
    Say(request);
  }
  // The next record; beats and other messages on the way are passed over, and counted.
  absl::StatusOr<journal::Record> NextRecord() {
    for (;;) {
      absl::StatusOr<transport::Message> message = inbox_.Next();
      if (!message.ok()) return message.status();
      v1::FollowMessage said;
      EXPECT_TRUE(said.ParseFromString(message->control));
      if (said.has_hello()) epoch = said.hello().server_epoch();
      if (said.has_begin()) ++begun;
      if (!said.has_record()) continue;
      auto record = assembler_.Add(message->frame, said.record().last());
      if (!record.ok()) return record.status();
      if (record->has_value()) return **std::move(record);
    }
  }
  absl::Status Closed() { return inbox_.Closed(); }

  uint64_t epoch = 0;
  int begun = 0;

 private:
  Inbox inbox_;
  std::shared_ptr<transport::Channel> channel_;
  std::unique_ptr<transport::Stream> stream_;
  RecordAssembler assembler_{1 << 20};
};

// Takes Follow streams and sends them what it is told.
class ScriptedPrimary final : public transport::Service {
 public:
  explicit ScriptedPrimary(std::string address) : listener_(*transport::Listen(address, this)) {}
  ~ScriptedPrimary() override { listener_.reset(); }

  // For every stream that is opened: said at once.
  void SetScript(std::vector<transport::Message> script) {
    absl::MutexLock lock(&mu_);
    script_ = std::move(script);
  }
  int ended() {
    absl::MutexLock lock(&mu_);
    return ended_;
  }

  absl::StatusOr<std::string> Call(transport::Method, std::string_view) override {
    return absl::UnimplementedError("a script");
  }
  absl::StatusOr<std::unique_ptr<transport::StreamSink>> Accept(transport::Method,
                                                                std::shared_ptr<transport::Stream> stream) override {
    absl::MutexLock lock(&mu_);
    for (const transport::Message& message : script_) stream->Send(message).IgnoreError();
    return std::make_unique<Sink>(this, std::move(stream));
  }

 private:
  class Sink final : public transport::StreamSink {
   public:
    Sink(ScriptedPrimary* owner, std::shared_ptr<transport::Stream> stream)
        : owner_(owner), stream_(std::move(stream)) {}
    void OnMessage(transport::Message) override {}
    void OnClosed(absl::Status) override {
      absl::MutexLock lock(&owner_->mu_);
      ++owner_->ended_;
    }

   private:
    ScriptedPrimary* const owner_;
    const std::shared_ptr<transport::Stream> stream_;
  };

  absl::Mutex mu_;
  std::vector<transport::Message> script_;
  int ended_ = 0;
  std::unique_ptr<transport::Listener> listener_;
};

transport::Message HelloOf(uint64_t epoch, const Lineage& lineage) {
  v1::FollowMessage message;
  message.mutable_hello()->set_server_epoch(epoch);
  message.mutable_hello()->set_lineage_key(lineage.key());
  return {message.SerializeAsString(), {}};
}

class ReplicationTest : public StandbyFixture {
 protected:
  // The primary, with a job at `version`, and a standby that has taken what it was given.
  std::unique_ptr<ScriptedStandby> StartScripted(uint64_t version) {
    primary_.directory = "primary";
    Start(primary_);
    StartWorkers(Spec());
    for (uint64_t round = 0; round < version; ++round) Step(round);
    auto standby = std::make_unique<ScriptedStandby>(primary_.address, 0);
    // Two buckets: a state, and the updates that workers may ask for.
    const uint64_t records = 2 * (1 + std::min<uint64_t>(version, 2));
    for (uint64_t i = 0; i < records; ++i) {
      auto record = standby->NextRecord();
      EXPECT_EQ(record.status(), absl::OkStatus());
      if (record.ok()) standby->Take(*record);
    }
    EXPECT_TRUE(Eventually([&] { return InSync(); }));
    return standby;
  }
  // What the standby is sent of a real job: messages, from the hello on.
  std::vector<transport::Message> Recorded(uint64_t version) {
    primary_.directory = "primary";
    Start(primary_);
    StartWorkers(Spec());
    for (uint64_t round = 0; round < version; ++round) Step(round);
    Inbox inbox;
    const auto channel = *transport::Dial(primary_.address);
    const auto stream = *channel->Open("gradwire.v1.Replication/Follow", &inbox);
    v1::FollowRequest open;
    open.mutable_open()->set_name("recorder");
    EXPECT_TRUE(stream->Send({open.SerializeAsString(), {}}).ok());
    std::vector<transport::Message> messages;
    for (size_t records = 0; records < 2 * (1 + version);) {
      auto message = inbox.Next();
      EXPECT_TRUE(message.ok()) << message.status();
      if (!message.ok()) break;
      v1::FollowMessage said;
      EXPECT_TRUE(said.ParseFromString(message->control));
      records += said.has_record() && said.record().last() ? 1 : 0;
      messages.push_back(*std::move(message));
    }
    a_.reset();
    b_.reset();
    primary_.daemon.reset();
    return messages;
  }
  // Starts the standby against a primary that says `script`, and waits until it has refused that.
  void ExpectRefused(std::vector<transport::Message> script, const std::string& why) {
    ScriptedPrimary primary(primary_.address);
    primary.SetScript(std::move(script));
    StartStandby();
    EXPECT_TRUE(Eventually([&] { return primary.ended() >= 2; })) << "it tries again";
    absl::Status refused;
    EXPECT_TRUE(Eventually([&] {
      refused = standby_.daemon->replication().Promote(false).status();
      return std::string(refused.message()).find(why) != std::string::npos;
    })) << refused;
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    standby_.daemon.reset();
  }
};

TEST_F(ReplicationTest, NobodySeesAVersionThatTheStandbyHasNotTaken) {
  const auto standby = StartScripted(2);
  ASSERT_EQ(a_->PushAll(2, Value(2)), absl::OkStatus());
  ASSERT_TRUE(a_->RequestPull(v1::PULL_UPDATE, 3).ok());
  ASSERT_EQ(b_->PushAll(2, -Value(2) / 3), absl::OkStatus());
  std::vector<journal::Record> records;
  for (int i = 0; i < 2; ++i) {
    auto record = standby->NextRecord();
    ASSERT_EQ(record.status(), absl::OkStatus());
    EXPECT_EQ(record->round, 2u);
    EXPECT_EQ(record->contributions.size(), 2u);
    records.push_back(*std::move(record));
  }
  ASSERT_TRUE(Eventually([&] { return Status(primary_).durability().durable_version() >= 2; }));
  usleep(50'000);  // time for a version to be shown that should not be
  EXPECT_EQ(Status(primary_).version(), 2u);
  standby->Take(records[0]);
  EXPECT_EQ(a_->NextAnswer()->control.bucket(), records[0].bucket);
  EXPECT_EQ(Status(primary_).version(), 2u);
  standby->Take(records[1]);
  EXPECT_EQ(a_->NextAnswer()->control.bucket(), records[1].bucket);
  EXPECT_EQ(Status(primary_).version(), 3u);
}

TEST_F(ReplicationTest, StandbyThatTakesNothingIsDropped) {
  timeout_ms_ = 300;
  const auto standby = StartScripted(1);
  // It lives, but the records of the round are not taken.
  std::atomic<bool> done{false};
  std::thread alive([&] {
    while (!done) {
      standby->Say(v1::FollowRequest());
      usleep(10'000);
    }
  });
  Step(1);
  EXPECT_EQ(standby->Closed().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Status(primary_).followers_size(), 0);
  Step(2);
  done = true;
  alive.join();
}

TEST_F(ReplicationTest, SilentStandbyIsDropped) {
  timeout_ms_ = 300;
  const auto standby = StartScripted(1);
  const absl::Status dropped = standby->Closed();
  EXPECT_EQ(dropped.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(dropped.message()), HasSubstr("nothing was heard"));
  Step(1);
}

TEST_F(ReplicationTest, StandbyThatTakesWhatItWasNotGivenIsDropped) {
  const auto standby = StartScripted(1);
  v1::FollowRequest request;
  v1::Taken& taken = *request.add_taken();
  taken.set_bucket(1);
  taken.set_version(7);
  standby->Say(request);
  EXPECT_EQ(standby->Closed().code(), absl::StatusCode::kInvalidArgument);
  Step(1);
}

TEST_F(ReplicationTest, StandbyThatKnowsALaterServerIsSentThere) {
  primary_.directory = "primary";
  Start(primary_);
  ScriptedStandby standby(primary_.address, NextTerm(1), Shard(primary_).lineage());
  const absl::Status refused = standby.Closed();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("has replaced this one"));
  EXPECT_FALSE(Shard(primary_).fenced()) << "everybody can say so";
}

TEST_F(ReplicationTest, StandbyRefusesWhatNoPrimarySends) {
  const std::vector<transport::Message> good = Recorded(2);
  ASSERT_GE(good.size(), 4u);
  // A beat that says all is well cannot hide it.
  v1::FollowMessage beat;
  const transport::Message well = {beat.SerializeAsString(), {}};

  ExpectRefused({good[1]}, "not a hello");
  ExpectRefused({{"\xff\xff", {}}}, "not a gradwire.v1.FollowMessage");
  ExpectRefused({good[0], well}, "unknown kind");
  ExpectRefused({good[0], good.back()}, "no job has number");
  ExpectRefused({good[0], good[1], good[1]}, "begins twice");

  std::vector<transport::Message> script(good);
  v1::FollowMessage begin;
  ASSERT_TRUE(begin.ParseFromString(good[1].control));
  ASSERT_TRUE(begin.has_begin());
  begin.mutable_begin()->set_layout_digest(4711);
  script[1].control = begin.SerializeAsString();
  ExpectRefused(script, "shard map");

  script = good;  // of a history that nobody has
  ASSERT_TRUE(begin.ParseFromString(good[1].control));
  begin.mutable_begin()->set_goes_on(true);
  begin.mutable_begin()->set_history(begin.begin().history() + 1);
  script[1].control = begin.SerializeAsString();
  ExpectRefused(script, "no copy of this history");

  script = good;  // a bit of a frame
  std::vector<uint8_t> bytes;
  for (const Bytes& part : good[2].frame) bytes.insert(bytes.end(), part.data(), part.data() + part.size());
  bytes[bytes.size() / 2] ^= 1;
  script[2].frame = {Bytes::FromVector(bytes)};
  ExpectRefused(script, "CRC-32C");

  script = good;  // a hole: the last record comes again, a round later than it is
  auto record = RecordAssembler(1 << 20).Add(good.back().frame, true);
  ASSERT_TRUE(record.ok() && record->has_value());
  (*record)->round += 5;
  script.push_back(good.back());
  script.back().frame = PiecesOf(**record)[0];
  ExpectRefused(script, "should follow");

  script = good;  // records of another job: their frames do not fit
  begin.mutable_begin()->set_goes_on(false);
  begin.mutable_begin()->set_layout_digest(0);
  begin.mutable_begin()->mutable_stored()->mutable_spec()->mutable_tensors(0)->set_shape(0, 7);
  script[1].control = begin.SerializeAsString();
  ExpectRefused(script, "not the parameters of bucket");
}

TEST_F(ReplicationTest, StandbyRefusesAPrimaryOfALowerEpoch) {
  StartPair();
  ASSERT_TRUE(Eventually([&] { return standby_.daemon->replication().Promote(false).ok(); }));
  primary_.daemon.reset();
  standby_.daemon.reset();
  // The former primary as a standby knows the later epoch, and what it follows now has an earlier one.
  standby_ = {.address = "", .directory = "", .follow = ""};
  std::filesystem::remove_all(root_ + "/standby");
  std::filesystem::rename(root_ + "/primary", root_ + "/standby");
  std::string hex;
  std::ifstream(root_ + "/standby/LINEAGE") >> hex;
  const Lineage lineage = *Lineage::Parse(hex);
  ExpectRefused({HelloOf(3, lineage)}, "its epoch is 3");
  ExpectRefused({HelloOf(uint64_t{1} << 60, lineage)}, "is --follow right?");
  ExpectRefused({HelloOf(3, Lineage())}, "the key of a lineage has 0 bytes");
}

TEST_F(ReplicationTest, StandbyKeepsItsJobsFromAPrimaryOfAnotherLineage) {
  StartPair();
  StartWorkers(Spec());
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  Step(0);
  a_.reset();
  b_.reset();
  standby_.daemon.reset();
  primary_.daemon.reset();
  ExpectRefused({HelloOf(uint64_t{5} << 32, Lineage::Random())}, "it is of another lineage");
  EXPECT_FALSE(std::filesystem::is_empty(root_ + "/standby/jobs"));
}

TEST_F(ReplicationTest, MoreStandbysThanItMayHaveAreRefused) {
  primary_.directory = "primary";
  max_standbys_ = 2;
  Start(primary_);
  StartWorkers(Spec());
  auto first = std::make_unique<ScriptedStandby>(primary_.address, 0);
  ScriptedStandby second(primary_.address, 0);
  ASSERT_TRUE(first->NextRecord().ok() && second.NextRecord().ok());
  const absl::Status refused = ScriptedStandby(primary_.address, 0).Closed();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("has 2 standbys (0 more are ending) and --max-standbys is 2"));
  Step(0);
  first.reset();  // there is room again
  EXPECT_TRUE(Eventually([&] { return ScriptedStandby(primary_.address, 0).NextRecord().ok(); }));
}

TEST_F(ReplicationTest, StandbyThatReadsNothingIsDroppedBeforeItsQueueIsLong) {
  primary_.directory = "primary";
  standby_queue_bytes_ = 1;  // less than any record
  Start(primary_);
  StartWorkers(Spec());
  ScriptedStandby standby(primary_.address, 0);
  ASSERT_TRUE(standby.NextRecord().ok() && standby.NextRecord().ok());
  Step(0);
  absl::Status ended;
  while (ended.ok()) ended = standby.NextRecord().status();
  EXPECT_EQ(standby.Closed().code(), absl::StatusCode::kResourceExhausted);
  Step(1);
}

TEST_F(ReplicationTest, StandbyThatWasWaitedForAndFellSilentIsNotWaitedForAgainAtOnce) {
  timeout_ms_ = 300;
  {
    const auto standby = StartScripted(1);
    Step(1);  // it takes none of it: rounds are held
    EXPECT_EQ(standby->Closed().code(), absl::StatusCode::kAborted);
  }
  ScriptedStandby again(primary_.address, 0);
  for (int i = 0; i < 6; ++i) {
    auto record = again.NextRecord();
    ASSERT_EQ(record.status(), absl::OkStatus());
    again.Take(*record);
  }
  // What it would hold is visible without it.
  Step(2);
  EXPECT_FALSE(InSync());
  EXPECT_EQ(Status(primary_).followers_size(), 1);
}

}  // namespace
}  // namespace gradwire
