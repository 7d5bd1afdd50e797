// What happened in simulated runs, counted: faults that were injected, and situations that the real code went through.
// A simulator that never gets into a situation proves nothing about it, so a count of zero fails a whole run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace gradwire::sim {

enum class Event : uint32_t {
  // Faults, by the table in faults.cc or by chance per message.
  kBreak,
  kHalfOpenServer,
  kHalfOpenWorker,
  kPartition,
  kServerKilled,
  kServerKilledAtWrite,
  kPowerLost,
  kPowerLostAtWrite,
  kOldServerLives,
  kDiskFull,
  kSyncFails,
  kWriteFails,
  kWorkerCrashed,
  kWorkerPaused,
  kWorkerSlow,
  kWorkerLeaves,
  kSnapshotAsked,
  kStandbyKilled,
  kStandbyCut,
  kPrimaryLost,
  kBadGradient,
  kChunkLost,
  kChunkRepeated,
  kChunksSwapped,
  kFrameBegunAnew,
  kCutInFrame,
  kFaultAtStart,
  kFrameFlipped,
  kFrameRepeated,
  kRequestLost,
  kReplyLost,
  kRequestRepeated,
  // Situations.
  kDuplicateRecognized,
  kNotIncluded,
  kRefused,
  kAbstained,
  kResumed,
  kResumedAfterRestart,
  kResentFrames,
  kRoundOverAtResume,
  kEpochFenced,
  kDataLossTold,
  kJoinedAnew,
  kLeaseExpired,
  kTornTailCut,
  kRecoveredFromSnapshot,
  kSnapshotTaken,
  kJournalCut,
  kDiskFullWaits,
  kDegradedGoesOn,
  kJournalHealed,
  kStartInterrupted,
  kDeferredElements,
  kFramePartlyThere,
  kShortRound,
  kAnswerGone,
  kCaughtUpByUpdates,
  kCaughtUpByParameters,
  kRoundsSkipped,
  kRolledBack,
  kStepOfTwoRounds,
  kRecoveredWithinStep,
  kRoundAhead,
  kReturnedBesideLater,
  kShardsAgreed,
  kPeerNotTold,
  kSkipAsked,
  kRoundNotApplied,
  kAskedTooLate,
  kFateAsked,
  kAsyncStep,
  kAsyncBehind,
  kStandbyInSync,
  kPromoted,
  kPromotionRefused,
  kCount
};

inline constexpr size_t kEvents = static_cast<size_t>(Event::kCount);
const char* NameOf(Event event);

using Coverage = std::array<uint64_t, kEvents>;

}  // namespace gradwire::sim
