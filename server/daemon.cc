// Putting the parts together, the lease ticker and draining; see daemon.h.
#include "server/daemon.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/base/failpoint.h"
#include "common/base/names.h"
#include "common/base/out_of_memory.h"
#include "common/base/start_thread.h"
#include "common/base/status_macros.h"
#include "common/transport/caps.h"
#include "common/transport/malloc_tuning.h"
#include "kernels/cuda/cuda_backend.h"
#include "server/config/memory.h"

namespace gradwire {
namespace {

// The ticker looks at least this often, so that a lease that begins while it waits is noticed in time.
constexpr absl::Duration kLongestTick = absl::Milliseconds(100);
constexpr absl::Duration kShortestTick = absl::Milliseconds(1);
// A ticker that comes so late did not run meanwhile, nor did what hears the workers: the process was stopped, its
// machine frozen, or both waited for the same.
constexpr TimeNs kNoticedSleep = 500'000'000;
// Freed memory goes back to the system when jobs of this size have gone, or when this much lies idle. It is looked at
// now and then only: that takes the allocator's lock, and rounds fault the memory in again.
constexpr uint64_t kMuchFreedBytes = 16u << 20;
constexpr uint64_t kIdleHeapBytes = 512u << 20;
constexpr TimeNs kBetweenLooks = 5'000'000'000;

uint64_t RandomEpoch() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// Of this server, to its standbys or its primary: this machine and where it listens, as far as that is a server's name.
std::string NameOf(const std::vector<std::string>& addresses) {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  std::string name = IsServerName(host) ? host : "server";
  for (const std::string& address : addresses) {
    if (const std::string longer = absl::StrCat(name, ",", address); IsServerName(longer)) name = longer;
  }
  return name;
}

transport::Caps CapsOf(const ServerConfig& config) {
  transport::Caps caps;
  if (config.max_connections != 0) caps.max_connections = static_cast<int>(config.max_connections);
  caps.max_handshakes = static_cast<int>(config.max_handshakes);
  caps.max_streams = static_cast<int>(config.max_streams);
  if (config.receive_limit_bytes != 0) caps.receive_bytes = config.receive_limit_bytes;
  caps.warn = [](const std::string& what) { spdlog::warn("{}", what); };
  return caps;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const ServerConfig& config, Clock* clock) {
  std::unique_ptr<kernels::Backend> backend;
  if (config.backend == "cuda") {  // jobs on the device, where MakeBackend's copies everything there and back
    GW_ASSIGN_OR_RETURN(backend, kernels::cuda::MakeAsyncCudaBackend());
  } else {
    GW_ASSIGN_OR_RETURN(backend, kernels::MakeBackend(config.backend));
  }
  return Start(config, clock, std::move(backend));
}

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const ServerConfig& config, Clock* clock,
                                                      std::unique_ptr<kernels::Backend> backend) {
  std::unique_ptr<Daemon> daemon(new Daemon());
  daemon->clock_ = clock;
  spdlog::info("computing on {}{}", backend->name(),
               config.backend == "auto" && backend->async() == nullptr
                   ? absl::StrCat(" (the GPU is not used: ", kernels::WhyAutoIsNotCuda(), ")")
                   : "");
  if (kernels::cuda::AsyncBackend* device = backend->async()) {
    daemon->gpu_backend_ = std::move(backend);
    // What has no kernels on the device is summed in host memory.
    GW_ASSIGN_OR_RETURN(backend, kernels::MakeBackend("cpu"));
    GW_ASSIGN_OR_RETURN(daemon->device_, kernels::cuda::DeviceShare::Make(
                                             device, {.memory_limit_bytes = config.device_memory_limit_bytes}));
    spdlog::info("jobs are on {}: up to {} bytes of its memory", device->runtime().Describe(),
                 daemon->device_->memory_limit_bytes());
  }
  daemon->backend_ = std::move(backend);
  JobEnvironment environment;
  environment.backend = daemon->backend_.get();
  environment.device = daemon->device_.get();
  environment.clock = clock;
  environment.frame_limit_bytes = config.frame_limit_bytes;
  environment.job_memory_limit_bytes = config.job_memory_limit_bytes;
  environment.epochs->Begin(RandomEpoch());
  environment.tick_sooner = [d = daemon.get()] {
    absl::MutexLock lock(&d->mu_);
    d->tick_sooner_ = true;
    d->wake_.SignalAll();
  };
  environment.slept = [d = daemon.get()](TimeNs now) {
    const TimeNs late = now - d->tick_due_.load(std::memory_order_relaxed);
    return late < kNoticedSleep ? 0 : late;
  };
  if (!config.data_dir.empty()) {
    GW_ASSIGN_OR_RETURN(daemon->data_, DataDirectory::Open(&daemon->disk_, config.data_dir));
    environment.epochs->Begin(daemon->data_->epoch());
    spdlog::info("data directory {}, server epoch {}", config.data_dir, daemon->data_->epoch());
  }
  if (const uint64_t usable = UsableMemoryBytes(); config.memory_limit_bytes > usable) {
    spdlog::warn("--memory-limit-bytes is {}, and the container is limited to {}: jobs may end this process",
                 config.memory_limit_bytes, usable);
  }
  daemon->registry_ = std::make_unique<JobRegistry>(
      environment,
      JobRegistry::Limits{config.memory_limit_bytes, config.max_jobs, config.snapshot_journal_bytes,
                          static_cast<TimeNs>(config.unused_job_ms) * 1'000'000},
      daemon->data_.get());
  ReplicationOptions standby{.follow = config.follow,
                             .follower_timeout_ms = config.follower_timeout_ms,
                             .lease_ttl_ms = config.lease_ttl_ms,
                             .max_standbys = config.max_standbys,
                             .standby_queue_bytes = config.standby_queue_bytes,
                             .make_lease = {}};
  if (!config.lease.empty()) {
    standby.make_lease = [lease = config.lease, ttl_ms = config.lease_ttl_ms, clock](const std::string& name) {
      return MakeLease(lease, {name, ttl_ms}, clock);
    };
  }
  daemon->replication_ =
      std::make_unique<Replication>(std::move(standby), daemon->registry_.get(), daemon->data_.get(), clock);
  Replication* const replication = daemon->replication_.get();
  GW_RETURN_IF_ERROR(replication->Start());
  GW_FAILPOINT("recovery.before_serving");
  daemon->worker_service_ = std::make_unique<WorkerService>(daemon->registry_.get(), replication);
  daemon->operator_service_ = std::make_unique<OperatorService>(daemon->registry_.get(), replication);
  daemon->replication_service_ = std::make_unique<ReplicationService>(replication);
  daemon->peer_service_ = std::make_unique<PeerService>(daemon->registry_.get());
  daemon->dispatcher_ =
      std::make_unique<Dispatcher>(daemon->worker_service_.get(), daemon->operator_service_.get(),
                                   daemon->replication_service_.get(), daemon->peer_service_.get(), replication);
  transport::Limits limits;
  limits.spin_us = config.spin_us;
  const transport::Caps caps = CapsOf(config);
  for (const std::string& address : config.listen) {
    GW_ASSIGN_OR_RETURN(std::unique_ptr<transport::Listener> listener,
                        transport::ListenWithin(address, daemon->dispatcher_.get(), limits, caps));
    spdlog::info("listening on {}", listener->address());
    if (config.serves_own_process) {
      GW_ASSIGN_OR_RETURN(std::unique_ptr<transport::Listener> within,
                          transport::ListenInProcess(listener->address(), daemon->dispatcher_.get(), limits));
      daemon->within_.push_back(std::move(within));
    }
    daemon->listeners_.push_back(std::move(listener));
  }
  if (!config.metrics_listen.empty()) {
    GW_ASSIGN_OR_RETURN(daemon->exporter_, metrics::Exporter::Start(config.metrics_listen, [d = daemon.get()] {
                          return d->operator_service_->Read();
                        }));
  }
  GW_RETURN_IF_ERROR(replication->Run(config.name.empty() ? NameOf(daemon->addresses()) : config.name,
                                      [d = daemon.get()](bool serving) {
                                        for (const auto& listener : d->listeners_)
                                          listener->SetServing(serving && !d->registry_->draining());
                                      }));
  // As many threads as there may be jobs, started as jobs are slow: those hold up no other.
  daemon->closers_ = std::make_unique<WorkPool>(config.max_jobs);
  GW_ASSIGN_OR_RETURN(daemon->ticker_, StartThread("the ticker", [d = daemon.get()] { d->TickUntilStopped(); }));
  GW_ASSIGN_OR_RETURN(daemon->replication_ticker_,
                      StartThread("the ticker", [d = daemon.get()] { d->TickReplicationUntilStopped(); }));
  return daemon;
}

Daemon::~Daemon() {
  {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
    wake_.SignalAll();
  }
  if (ticker_.joinable()) ticker_.join();
  if (replication_ticker_.joinable()) replication_ticker_.join();
  closers_.reset();
  if (replication_ != nullptr) replication_->Stop();
  listeners_.clear();
  within_.clear();
  if (registry_ == nullptr) return;
  // Journals tell the replication, which goes first.
  for (const auto& job : registry_->All()) {
    job->Shut(absl::UnavailableError("the server has ended"));
    job->log().Stop();
  }
}

std::vector<std::string> Daemon::addresses() const {
  std::vector<std::string> addresses;
  for (const auto& listener : listeners_) addresses.push_back(listener->address());
  return addresses;
}

absl::Duration Daemon::UntilNextTick() {
  absl::Duration wait = kLongestTick;
  const TimeNs now = clock_->Now();
  for (const auto& job : registry_->All()) {
    const std::optional<TimeNs> next = job->NextTick();
    if (next) wait = std::min(wait, absl::Nanoseconds(*next - now));
  }
  return std::max(wait, kShortestTick);
}

void Daemon::TickUntilStopped() {
  TimeNs ran = clock_->Now();
  absl::Duration wait = kShortestTick;
  for (;;) {
    const TimeNs due = ran + absl::ToInt64Nanoseconds(wait);
    tick_due_.store(due, std::memory_order_relaxed);
    {
      absl::MutexLock lock(&mu_);
      if (!stopped_ && !tick_sooner_) wake_.WaitWithTimeout(&mu_, wait);
      if (stopped_) return;
      tick_sooner_ = false;
    }
    ran = clock_->Now();
    const TimeNs slept = ran - due;
    wait = kLongestTick;
    const absl::Status ticked = CatchBadAlloc("a tick", [&] {
      registry_->Tick(closers_.get(), slept < kNoticedSleep ? 0 : slept);
      ReturnFreedMemory();
      wait = UntilNextTick();
      return absl::OkStatus();
    });
    if (!ticked.ok()) registry_->WarnRefused("a tick", ticked);
  }
}

void Daemon::TickReplicationUntilStopped() {
  absl::MutexLock lock(&mu_);
  while (!stopped_) {
    mu_.Unlock();
    const absl::Status ticked = CatchBadAlloc("a tick", [this] {
      replication_->Tick();
      return absl::OkStatus();
    });
    if (!ticked.ok()) registry_->WarnRefused("a tick", ticked);
    mu_.Lock();
    mu_.AwaitWithTimeout(absl::Condition(&stopped_), kLongestTick);
  }
}

void Daemon::ReturnFreedMemory() {
  const TimeNs now = clock_->Now();
  if (now < next_look_) return;
  const uint64_t returned = registry_->environment().account->returned();
  const bool job_gone = returned - returned_ >= kMuchFreedBytes;
  const uint64_t free = transport::FreeHeapBytes();
  // Free at two looks in a row: not only between two rounds.
  const bool lies_idle = std::min(free, free_bytes_) >= kIdleHeapBytes;
  next_look_ = now + kBetweenLooks;
  free_bytes_ = free;
  if (!job_gone && !lies_idle) return;
  returned_ = returned;
  free_bytes_ = 0;
  closers_->Do([] { transport::ReturnFreeMemory(); });
}

absl::Status Daemon::Drain(uint32_t drain_ms) {
  for (const auto& listener : listeners_) listener->SetServing(false);
  registry_->Drain();
  const TimeNs deadline = clock_->Now() + int64_t{drain_ms} * 1'000'000;
  registry_->HurrySnapshots();
  const auto busy = [this] {
    const auto jobs = registry_->All();
    return std::any_of(jobs.begin(), jobs.end(),
                       [](const auto& job) { return job->RoundInProgress() || !job->log().Unsafe().ok(); });
  };
  // Quiet for two looks in a row: workers that have just been answered may still ask for the round's update.
  for (int quiet = 0; clock_->Now() < deadline;) {
    quiet = busy() ? 0 : quiet + 1;
    if (quiet == 2) break;
    absl::MutexLock lock(&mu_);
    if (stopped_) break;
    wake_.WaitWithTimeout(&mu_,
                          std::min(kLongestTick, absl::Nanoseconds(std::max<TimeNs>(1, deadline - clock_->Now()))));
  }
  absl::Status lost;
  for (const auto& job : registry_->All()) {
    const absl::Status unsafe = job->log().Unsafe();
    if (unsafe.ok()) continue;
    lost = unsafe;
    spdlog::error(
        "this server ends with rounds that will not come back: {}; make room and give it more time "
        "(--drain-ms)",
        unsafe.ToString());
  }
  registry_->ShutAll(absl::UnavailableError("this server is shutting down: join again when it is back"));
  return lost;
}

}  // namespace gradwire
