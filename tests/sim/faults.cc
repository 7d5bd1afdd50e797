// See faults.h.
#include "tests/sim/faults.h"

namespace gradwire::sim {
namespace {

bool BreakBoth(Run& run, bool tell_client, bool tell_server) {
  WorkerNode& worker = run.AnyWorker();
  if (worker.session() == nullptr) return false;
  World& world = run.world();
  const TimeNs client = tell_client ? world.Between(kUs, 20 * kMs) : world.Between(kSecond, kKeepalive);
  const TimeNs server = tell_server ? world.Between(kUs, 20 * kMs) : world.Between(kSecond, kKeepalive);
  worker.session()->Break(run.AnyShard(), client, server);
  return true;
}

bool Kill(Run& run, bool power) {
  if (power && !run.MayLosePower()) return false;
  ServerNode& server = run.AnyServer();
  if (server.process() == nullptr) return false;
  server.Kill(power, run.world().Between(kMs, 2 * kSecond));
  return true;
}

bool KillAtWrite(Run& run, bool power) {
  if (power && !run.MayLosePower()) return false;
  ServerNode& server = run.AnyServer();
  if (server.process() == nullptr) return false;
  const uint64_t calls = run.world().Below(12);
  if (power) {
    server.disk().CrashAt(server.disk().calls() + calls);
  } else {
    server.process()->disk().DieAt(calls, run.world().Chance(0.5));
  }
  return true;
}

bool ReplaceServer(Run& run) {
  ServerNode& server = run.AnyServer();
  if (server.process() == nullptr) return false;
  server.Kill(/*power=*/false, run.world().Between(kMs, 200 * kMs), /*leave_old=*/true);
  return true;
}

// Some faults of disks may lose versions that were seen, which the contract says: not where other shards would be
// ahead.
template <typename F>
bool DiskFault(Run& run, bool sync, F fault) {
  const bool may_lose = !run.setup().waits_for_disk() || (sync && run.setup().may_lose_versions());
  if (may_lose && run.setup().shards > 1) return false;
  ServerNode& server = run.AnyServer();
  if (may_lose) server.MayLoseVersions();
  server.NoteDiskFault();
  fault(server.disk());
  run.world().After(run.world().Between(10 * kMs, 3 * kSecond), [&server] { server.HealDisk(); });
  return true;
}

bool FillDisk(Run& run) {
  return DiskFault(run, /*sync=*/false, [&run](testing_support::FakeDisk& disk) {
    uint64_t bytes = run.world().Below(2000);
    for (const std::string& file : disk.Files()) bytes += disk.SizeOf(file);
    disk.set_capacity(bytes);
  });
}

bool KillStandby(Run& run) {
  ServerNode* const standby = run.AnyStandby();
  if (standby == nullptr || standby->process() == nullptr) return false;
  standby->Kill(/*power=*/false, run.world().Between(kMs, 2 * kSecond));
  return true;
}

bool CutStandbyOff(Run& run) {
  ServerNode* const standby = run.AnyStandby();
  if (standby == nullptr || standby->process() == nullptr) return false;
  World& world = run.world();
  const auto delay = [&] {
    return world.Chance(0.7) ? world.Between(kUs, 20 * kMs) : world.Between(kSecond, kKeepalive);
  };
  const TimeNs own = delay();
  standby->CutOff(own, delay());
  return true;
}

constexpr Fault kFaults[] = {
    {Event::kBreak, 6, [](Run& run) { return BreakBoth(run, true, true); }},
    {Event::kHalfOpenServer, 3, [](Run& run) { return BreakBoth(run, true, false); }},
    {Event::kHalfOpenWorker, 2, [](Run& run) { return BreakBoth(run, false, true); }},
    {Event::kPartition, 3,
     [](Run& run) {
       World& world = run.world();
       run.AnyWorker().path(run.AnyShard()).stalled_until = world.Now() + world.Between(20 * kMs, 4 * kSecond);
       return true;
     }},
    {Event::kServerKilled, 5, [](Run& run) { return Kill(run, false); }},
    {Event::kServerKilledAtWrite, 6, [](Run& run) { return KillAtWrite(run, false); }},
    {Event::kPowerLost, 4, [](Run& run) { return Kill(run, true); }},
    {Event::kPowerLostAtWrite, 6, [](Run& run) { return KillAtWrite(run, true); }},
    {Event::kOldServerLives, 2, ReplaceServer},
    {Event::kDiskFull, 3, FillDisk},
    {Event::kSyncFails, 3,
     [](Run& run) {
       return DiskFault(run, /*sync=*/true,
                        [](auto& disk) { disk.set_sync_error(absl::UnknownError("an I/O error")); });
     }},
    {Event::kWriteFails, 3,
     [](Run& run) {
       return DiskFault(run, /*sync=*/false,
                        [](auto& disk) { disk.set_write_error(absl::UnknownError("an I/O error")); });
     }},
    {Event::kWorkerCrashed, 4,
     [](Run& run) {
       run.AnyWorker().Crash(run.world().Between(kMs, kSecond));
       return true;
     }},
    {Event::kWorkerPaused, 2,
     [](Run& run) {
       run.AnyWorker().Pause(run.world().Between(50 * kMs, 4 * kSecond));
       return true;
     }},
    {Event::kWorkerSlow, 2,
     [](Run& run) {
       run.AnyWorker().SlowDown(run.world().Between(300 * kMs, 3 * kSecond));
       return true;
     }},
    {Event::kWorkerLeaves, 3,
     [](Run& run) {
       run.AnyWorker().Leave(run.world().Between(kMs, kSecond));
       return true;
     }},
    {Event::kSnapshotAsked, 4,
     [](Run& run) {
       ServerNode& server = run.AnyServer();
       if (server.process() == nullptr) return false;
       server.process()->TakeSnapshot();
       return true;
     }},
    {Event::kStandbyKilled, 4, KillStandby},
    {Event::kStandbyCut, 4, CutStandbyOff},
    {Event::kPrimaryLost, 6, [](Run& run) { return run.LosePrimary(); }},
};

}  // namespace

std::span<const Fault> Faults() { return kFaults; }

}  // namespace gradwire::sim
