// What a shard server and its standbys say to each other: messages of a Follow stream, records in pieces, and which of
// them a standby says that it has taken.
#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/slice.h>

#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "common/base/clock.h"
#include "common/transport/grpc/message_codec.h"
#include "gradwire/v1/replication.pb.h"
#include "server/replication/record_pieces.h"
#include "server/replication/replicated_sink.h"
#include "tests/conformance/codec/codec_harness.h"
#include "tests/fuzz/buckets.h"
#include "tests/fuzz/chunk_input.h"
#include "tests/fuzz/record_input.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

constexpr uint64_t kLimitBytes = 4096;

// What the chunks of an input are: `bucket` modulo 3.
enum Kind : uint8_t { kMessages, kRecords, kTaken };

// The standby's end, as far as it reads bytes.
class Standby {
 public:
  absl::StatusOr<std::optional<journal::Record>> Hear(Input message, uint8_t slicing) {
    std::vector<::grpc::Slice> slices;
    for (const Bytes& slice : Slices(message, slicing)) slices.emplace_back(slice.data(), slice.size());
    auto decoded = transport::DecodeMessage(::grpc::ByteBuffer(slices.data(), slices.size()));
    if (!decoded.ok()) return decoded.status();
    v1::FollowMessage said;
    if (!said.ParseFromString(decoded->control)) return absl::InvalidArgumentError("not a gradwire.v1.FollowMessage");
    if (!said.has_record()) return std::optional<journal::Record>();
    RecordAssembler& assembler = assemblers_.try_emplace(said.record().job(), kLimitBytes).first->second;
    return assembler.Add(decoded->frame, said.record().last());
  }

 private:
  std::map<uint32_t, RecordAssembler> assemblers_;
};

std::vector<uint8_t> MessageOf(bool last, std::vector<Bytes> piece) {
  v1::FollowMessage message;
  message.mutable_record()->set_job(1);
  message.mutable_record()->set_last(last);
  const std::string bytes =
      transport::ToString(transport::EncodeMessage({message.SerializeAsString(), std::move(piece)}));
  return {bytes.begin(), bytes.end()};
}

void RunMessages(const ChunkInput& input) {
  Standby whole, sliced;
  for (const std::vector<uint8_t>& message : input.chunks) {
    const auto record = whole.Hear(message, 0);
    const auto same = sliced.Hear(message, input.slicing);
    Require(record.status() == same.status(), "slices do not change the verdict");
    if (!record.ok()) return;  // the stream ends
    Require(record->has_value() == same->has_value(), "slices do not change where a record ends");
    if (*record) RequireRoundTrip(**record);
  }
}

// Odd `slicing`: checksums are made right first.
void RunRecords(ChunkInput input) {
  Standby standby;
  for (std::vector<uint8_t>& bytes : input.chunks) {
    if (input.slicing % 2 == 1 && bytes.size() >= journal::kRecordHeaderBytes) bytes.resize(RepairRecord(bytes, 0));
    const std::vector<Bytes> pieces = Slices(bytes, input.slicing);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const bool last = i + 1 == pieces.size();
      const auto record = standby.Hear(MessageOf(last, {pieces[i]}), 0);
      if (!record.ok()) return;
      Require(record->has_value() == last, "a record ends with its last piece");
      if (!last) continue;
      Require(bytes.size() <= kLimitBytes, "records keep to the limit");
      RequireRoundTrip(**record);
      const std::vector<std::vector<Bytes>> again = PiecesOf(**record);
      RecordAssembler assembler(2 * kLimitBytes);
      for (const std::vector<Bytes>& piece : again) {
        const auto back = assembler.Add(piece, &piece == &again.back());
        Require(back.ok() && back->has_value() == (&piece == &again.back()), "a record is cut and put together");
        if (*back) Require((*back)->contributions == (*record)->contributions, "and stays the same");
      }
    }
  }
}

class WrittenAtOnce final : public UpdateSink {
 public:
  void Append(journal::Record, std::function<void()> visible) override { visible(); }
  void Stop() override {}
  journal::JournalStatus status() const override { return {}; }
  void SnapshotTaken(uint64_t, uint64_t) override {}
};

class Follower final : public RecordFollower {
 public:
  const std::string& name() const override { return name_; }
  void Enqueue(const journal::Record&) override {}

 private:
  const std::string name_ = "standby";
};

// Each chunk a FollowRequest, from a standby in sync.
void RunTaken(const ChunkInput& input) {
  constexpr uint32_t kBuckets = 2;
  constexpr uint64_t kState = 5, kRounds = 3;
  SteadyClock clock;
  const std::atomic<TimeNs> serve_until{INT64_MAX};
  Follower follower;
  ReplicatedSink sink(std::make_unique<WrittenAtOnce>(), &clock, {&serve_until, [] {}, {}});
  sink.Attach(&follower);
  for (uint32_t b = 0; b < kBuckets; ++b) sink.GiveState(&follower, b, kState);
  sink.StatesGiven(&follower);
  uint64_t taken[kBuckets] = {kState, kState}, visible[kBuckets] = {kState, kState};
  for (uint32_t b = 0; b < kBuckets; ++b) Require(sink.Take(&follower, b, kState).ok(), "states can be taken");
  Require(sink.InSync(&follower), "then it is in sync");
  for (uint64_t round = kState; round < kState + kRounds; ++round) {
    for (uint32_t b = 0; b < kBuckets; ++b) {
      journal::Record record;
      record.bucket = b;
      record.round = round;
      sink.Append(std::move(record), [&visible, b, round] { visible[b] = round + 1; });
    }
  }
  const google::protobuf::LogSilencer silent;
  for (const std::vector<uint8_t>& bytes : input.chunks) {
    v1::FollowRequest request;
    if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
    for (const v1::Taken& said : request.taken()) {
      if (!sink.Take(&follower, said.bucket(), said.version()).ok()) return;
      Require(said.bucket() < kBuckets && said.version() <= kState + kRounds, "only what was given is taken");
      taken[said.bucket()] = std::max(taken[said.bucket()], said.version());
      for (uint32_t b = 0; b < kBuckets; ++b)
        Require(visible[b] == taken[b], "what was taken is visible, nothing else");
    }
  }
}

}  // namespace

// As an input of chunks.
void RunReplication(Input bytes) {
  ChunkInput input = ParseInput(bytes);
  const google::protobuf::LogSilencer silent;
  switch (input.bucket % 3) {
    case kMessages:
      return RunMessages(input);
    case kRecords:
      return RunRecords(std::move(input));
    case kTaken:
      return RunTaken(input);
  }
}

Seeds ReplicationSeeds() {
  Seeds seeds;
  ChunkInput messages{kMessages, 0, 3, {}}, records{kRecords, 0, 5, {}};
  const Round& round = Buckets()[0].rounds[0];
  journal::Record record;
  record.round = round.round;
  record.contributions = {{7, "worker-0", 1, 2, true}, {8, "", 3, 4, false}};
  record.chunks = round.update;
  records.chunks.push_back(BytesOf(journal::EncodeRecord(record, 0, 0)));
  record.type = journal::RecordType::kState;
  record.contributions.clear();
  records.chunks.push_back(BytesOf(journal::EncodeRecord(record, 0, 0)));
  v1::FollowMessage said;
  said.mutable_hello()->set_server_epoch(7);
  const auto add = [&] {
    const std::string bytes = transport::ToString(transport::EncodeMessage({said.SerializeAsString(), {}}));
    messages.chunks.emplace_back(bytes.begin(), bytes.end());
  };
  add();
  said.mutable_begin()->mutable_stored()->mutable_spec()->set_name("job");
  add();
  const std::vector<std::vector<Bytes>> pieces = PiecesOf(record);
  for (const std::vector<Bytes>& piece : pieces) messages.chunks.push_back(MessageOf(&piece == &pieces.back(), piece));
  said.mutable_beat()->add_in_sync(1);
  add();
  seeds.push_back(ToBytes(messages));
  seeds.push_back(ToBytes(records));
  records.slicing = 0;
  seeds.push_back(ToBytes(records));
  ChunkInput taken{kTaken, 0, 0, {}};
  for (const uint64_t version : {6, 8}) {
    v1::FollowRequest request;
    for (uint32_t b = 0; b < 2; ++b) {
      v1::Taken& one = *request.add_taken();
      one.set_bucket(b);
      one.set_version(version);
    }
    const std::string bytes = request.SerializeAsString();
    taken.chunks.emplace_back(bytes.begin(), bytes.end());
  }
  seeds.push_back(ToBytes(taken));
  return seeds;
}

}  // namespace gradwire::fuzz
