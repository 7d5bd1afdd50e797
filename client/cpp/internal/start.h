// How a session gets from "joined" to "has the parameters of its start version": every shard agrees on the version,
// whoever is asked to uploads the initial parameters, everybody else pulls.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/include/gradwire/session.h"
#include "client/cpp/internal/replica.h"
#include "client/cpp/internal/shard_link.h"
#include "common/codec/codec.h"

namespace gradwire::client {

// Borrowed; outlives the calls.
struct StartContext {
  const Job* job = nullptr;
  const Layout* layout = nullptr;
  PullMode pull = PullMode::kUpdate;
  uint64_t incarnation = 0;
  std::vector<const Codec*> codecs;  // of Layout::slices()
  std::vector<ShardLink*> links;
  Replica* replica = nullptr;
  int64_t timeout_ms = 0;
};

struct StartState {
  uint64_t version = 0;            // asynchronous rounds: that every slice has passed
  std::vector<uint64_t> versions;  // per slice: `version`, or with asynchronous rounds later ones
  std::vector<PlanWindow> plans;   // up to that version, of Layout::slices()
};

// Joins every shard to start anew, not before `version`, until all name the same start; that version.
absl::StatusOr<uint64_t> AgreeToCatchUp(const std::vector<FrameLink*>& links, uint64_t version);
// What a worker pulls of the version that it starts from.
v1::PullKind StartKind(const Job& job, PullMode pull);

// Receives events until the exchange takes over. Where a shard of a durable job breaks off meanwhile, its link joins
// again, and what was under way there is sent and asked for again. Thread-safe.
class Starter final : public LinkEvents {
 public:
  explicit Starter(const StartContext& context);
  ~Starter() override;

  // Joins every shard and starts its link. A shard that is behind the others is asked to wait for this worker only
  // from the latest start version on (JoinRequest.start_version), so one round number holds everywhere.
  absl::Status JoinAll(const v1::JoinRequest& request);
  // Uploads or pulls. The worker that shard 0 chose uploads every shard: shard 0 first, the others once it has all of
  // its parameters, so no shard ever holds those of a worker that shard 0 may still replace. Where that worker or a
  // shard is lost in between, a worker whose own values are those of shard 0 uploads what is missing.
  absl::StatusOr<StartState> Run();
  // That JoinAll agreed on.
  uint64_t version() const { return version_; }
  // A shard has no parameters and wants this worker's.
  bool asked_to_initialize() const;
  // Makes Run return Cancelled, now or when it is called.
  void Cancel();

  void OnAck(uint32_t shard, const v1::PushAck& ack) override;
  void OnAnswer(uint32_t shard, PullAnswer answer) override;
  void OnMustInitialize(uint32_t shard) override;
  std::optional<ResumePoint> ResumeAt(uint32_t shard) override;
  void OnJoinedAnew(uint32_t shard, const v1::JoinReply& reply, bool behind) override;
  void OnLost(uint32_t shard, const absl::Status& status) override;

 private:
  struct State;
  void NoteJoined(uint32_t shard, const v1::JoinReply& reply);
  void AllowInitialize(bool may);
  // Sends the initial parameters, on the connection that is the `connection`-th one of the link, or not at all.
  absl::Status Upload(uint32_t shard, uint64_t connection);
  absl::Status RequestPull(uint32_t shard);
  // OutOfRange: another version has to be agreed on.
  absl::Status WaitForAll();
  // Are the parameters that were pulled from shard 0 those that this worker came with?
  absl::StatusOr<bool> HasValuesOfFirst(const std::vector<std::vector<wire::Chunk>>& answers);
  // The version was replaced before it was pulled, or a shard that was joined again names another one: a later one.
  absl::Status Again();
  absl::StatusOr<StartState> Finish();
  // Of pulled parameters.
  absl::StatusOr<uint64_t> VersionOf(std::span<const wire::Chunk> answer) const;

  const StartContext context_;
  std::atomic<uint64_t> version_{0};
  std::unique_ptr<State> state_;
};

}  // namespace gradwire::client
