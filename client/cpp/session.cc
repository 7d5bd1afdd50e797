// The public session: validates options, owns the parts, forwards to the exchange.
#include "client/cpp/include/gradwire/session.h"

#include <algorithm>
#include <random>
#include <stop_token>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/internal/async_exchange.h"
#include "client/cpp/internal/checkpoint.h"
#include "client/cpp/internal/exchange.h"
#include "client/cpp/internal/gradients.h"
#include "client/cpp/internal/replica.h"
#include "client/cpp/internal/round_input.h"
#include "client/cpp/internal/session_trace.h"
#include "client/cpp/internal/shard_link.h"
#include "client/cpp/internal/start.h"
#include "client/cpp/internal/tensor_memory.h"
#include "client/cpp/internal/ways.h"
#include "common/base/float_mode.h"
#include "common/base/hash.h"
#include "common/base/status_macros.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/job/round_mode.h"
#include "common/storage/posix_disk.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"

namespace gradwire {
namespace {

constexpr int64_t kMaxSpinUs = 10'000;
constexpr uint32_t kMaxEncodeThreads = 64;
constexpr int64_t kMaxTimeoutMs = 1'000'000'000'000;  // 31 years; a time that far ahead is still a time

uint64_t RandomIncarnation() {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;
}

absl::Status CheckNumbers(const SessionOptions& options) {
  const std::pair<const char*, int64_t> timeouts[] = {{"timeouts.connect_ms", options.timeouts.connect_ms},
                                                      {"timeouts.start_ms", options.timeouts.start_ms},
                                                      {"timeouts.rpc_ms", options.timeouts.rpc_ms},
                                                      {"timeouts.round_ms", options.timeouts.round_ms},
                                                      {"timeouts.reconnect_ms", options.timeouts.reconnect_ms}};
  for (const auto& [name, value] : timeouts) {
    if (value >= 1 && value <= kMaxTimeoutMs) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", value, "; allowed are 1 to ", kMaxTimeoutMs, " milliseconds"));
  }
  if (options.spin_us < 0 || options.spin_us > kMaxSpinUs)
    return absl::InvalidArgumentError(
        absl::StrCat("spin_us is ", options.spin_us, "; allowed are 0 to ", kMaxSpinUs, " microseconds"));
  if (options.encode_threads < 1 || options.encode_threads > kMaxEncodeThreads)
    return absl::InvalidArgumentError(
        absl::StrCat("encode_threads is ", options.encode_threads, "; allowed are 1 to ", kMaxEncodeThreads));
  return absl::OkStatus();
}

absl::Status CheckOptions(const SessionOptions& options, const Job& job) {
  if (options.servers.empty()) return absl::InvalidArgumentError("no servers were given");
  if (options.worker.empty()) return absl::InvalidArgumentError("the worker has no name; names are unique in the job");
  GW_RETURN_IF_ERROR(CheckNumbers(options));
  GW_RETURN_IF_ERROR(client::SessionTrace::Check(options.trace));
  GW_RETURN_IF_ERROR(job.CheckGoesWith(client::WaysOf(options.pull, options.place.device != nullptr)));
  if (options.early_updates && (IsAsync(job) || options.place.device != nullptr))
    return absl::InvalidArgumentError("early_updates: asynchronous rounds and tensors on a device do not have them");
  if (job.elements() == 0) return absl::InvalidArgumentError("the tensors of the job have no elements");
  if (options.memory.size() != job.tensors().size())
    return absl::InvalidArgumentError(
        absl::StrCat("memory was given for ", options.memory.size(), " tensors; the job has ", job.tensors().size()));
  for (size_t t = 0; t < options.memory.size(); ++t) {
    if (options.memory[t].size() == job.tensors()[t].elements) continue;
    if (options.memory[t].empty() && options.pull == PullMode::kMean) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensor '", job.tensors()[t].name, "' has ",
                                                   job.tensors()[t].elements, " elements in the job; its memory has ",
                                                   options.memory[t].size()));
  }
  return absl::OkStatus();
}

}  // namespace

class Session::Impl {
 public:
  Impl(SessionOptions options, Job job, Layout layout, std::unique_ptr<kernels::Backend> backend)
      : options_(std::move(options)),
        job_(std::move(job)),
        layout_(std::move(layout)),
        backend_(std::move(backend)),
        trace_(options_.trace, &job_, options_.worker, options_.notice) {}
  ~Impl() { Leave(/*drain=*/false).IgnoreError(); }

  absl::Status Start() {
    GW_RETURN_IF_ERROR(MakeParts());
    memory_->After(options_.place.stream);
    GW_RETURN_IF_ERROR(CheckFinite());
    const absl::Status connected = Connect();
    memory_->Wait();
    if (options_.stop.stop_requested()) return absl::CancelledError("joining was stopped");
    GW_RETURN_IF_ERROR(connected);
    start_bytes_ = WireBytes();
    std::vector<client::OperatorCall> shards;
    for (const auto& link : links_)
      shards.emplace_back([l = link.get()](std::string_view method, std::string request) {
        return l->CallOperator(method, std::move(request));
      });
    trace_.Begin(std::move(shards));
    return absl::OkStatus();
  }

  absl::Status Leave(bool drain) {
    absl::Status drained;
    if (drain && exchange_ != nullptr) drained = exchange_->Drain(options_.timeouts.round_ms);
    // In the middle of a round, or when the session has failed or was left, there is nothing to drain.
    if (!absl::IsDeadlineExceeded(drained) && !absl::IsInvalidArgument(drained)) drained = absl::OkStatus();
    absl::MutexLock leaving(&leave_mu_);
    if (std::exchange(left_, true)) return drained;
    trace_.End();
    for (auto& link : links_) link->Cancel();  // nothing blocks on a slow shard any more
    if (exchange_ != nullptr) exchange_->Stop(absl::CancelledError("the session was left"));
    if (memory_ != nullptr) memory_->Wait();
    std::vector<absl::Status> closed(links_.size());
    {
      std::vector<std::jthread> closing;  // side by side: a shard that does not answer holds up itself alone
      for (size_t s = 0; s < links_.size(); ++s) {
        closing.emplace_back([this, &closed, s] { closed[s] = links_[s]->Close(true); });
      }
    }
    const auto failed = std::find_if(closed.begin(), closed.end(), [](const auto& status) { return !status.ok(); });
    return failed == closed.end() ? drained : *failed;
  }

  uint64_t WireBytes() const {
    uint64_t bytes = 0;
    for (const auto& link : links_) bytes += link->pushed_bytes() + link->pulled_bytes();
    return bytes;
  }

  SessionStats Stats() const {
    SessionStats stats;
    exchange_->AddStats(&stats);
    for (const auto& link : links_) {
      stats.pushed_bytes += link->pushed_bytes();
      stats.pulled_bytes += link->pulled_bytes();
    }
    stats.start_bytes = start_bytes_;
    if (!links_.empty()) stats.members = links_[0]->members();
    return stats;
  }

  // Reports the tensors of `bucket` ready that were not.
  absl::Status ReadyBucket(uint32_t bucket, std::span<const float* const> gradients) {
    if (bucket >= layout_.bucket_count())
      return absl::InvalidArgumentError(
          absl::StrCat("bucket ", bucket, "; the job has ", layout_.bucket_count(), " buckets"));
    GW_RETURN_IF_ERROR(client::CheckCount(job_, gradients));
    for (const BucketPart& part : layout_.parts(bucket)) {
      if (exchange_->IsReady(part.tensor)) continue;
      GW_RETURN_IF_ERROR(Ready(part.tensor, gradients[part.tensor], nullptr));
    }
    return absl::OkStatus();
  }

  // Before a round is opened for them.
  absl::Status CheckGradients(std::span<const float* const> gradients) const {
    return client::CheckGradients(job_, gradients);
  }

  absl::Status Ready(uint32_t tensor, const float* gradient, Stream* stream) {
    memory_->Announce(tensor, stream);
    return exchange_->Ready(tensor, gradient);
  }
  absl::Status Ready(uint32_t tensor, const RowGradient& rows) {
    if (!memory_->on_host())
      return absl::UnimplementedError(
          "RowsReady takes rows in host memory, and this session's tensors lie on a device: give TensorReady the whole "
          "gradient");
    return exchange_->Ready(tensor, client::GivenGradient(rows));
  }
  // A wait of the exchange in which it may write to the caller's tensors.
  absl::Status Applying(Stream* stream, absl::FunctionRef<absl::Status(client::Exchanger&)> wait) {
    memory_->After(stream);
    absl::Status status = wait(*exchange_);
    memory_->Wait();
    return status;
  }

  absl::Status EndRound(int64_t timeout_ms, Stream* stream) {
    GW_RETURN_IF_ERROR(Applying(stream, [&](client::Exchanger& exchange) { return exchange.End(timeout_ms); }));
    trace_.NoteVersion(exchange_->version());
    return absl::OkStatus();
  }

  client::Exchanger& exchange() { return *exchange_; }
  const client::Exchanger& exchange() const { return *exchange_; }
  const client::Replica& replica() const { return *replica_; }
  const SessionOptions& options() const { return options_; }
  const Job& job() const { return job_; }
  const Layout& layout() const { return layout_; }
  uint64_t incarnation() const { return incarnation_; }
  uint64_t start_version() const { return start_version_; }
  bool resumed() const { return resumed_; }

  absl::Status Save(const std::string& path, std::map<std::string, std::string> notes) {
    GW_RETURN_IF_ERROR(Applying(nullptr, [this](client::Exchanger& e) { return e.Drain(options_.timeouts.round_ms); }));
    GW_ASSIGN_OR_RETURN(const std::vector<PlanWindow> plans, exchange_->Plans());
    client::CheckpointIdentity identity;
    identity.worker = options_.worker;
    identity.incarnation = incarnation_;
    identity.version = exchange_->version();
    identity.pull = options_.pull;
    identity.notes = std::move(notes);
    for (const auto& link : links_) {
      const client::ServerEpoch server = link->server_epoch();
      identity.server_epochs.push_back(server.epoch);
      identity.server_lineages.push_back(server.lineage);
      identity.job_instances.push_back(link->job_instance());
    }
    return client::WriteCheckpoint(disk_, path, job_, layout_, identity, *replica_, *gradients_, plans);
  }

 private:
  absl::Status MakeParts() {
    std::vector<const Codec*> of_tensor(job_.tensors().size());
    for (const BucketLayout& slice : layout_.slices()) {
      CodecContext context;
      context.job = &job_;
      context.layout = &slice;
      context.backend = backend_.get();
      GW_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, MakeCodec(context));
      codecs_.push_back(std::move(codec));
      codec_pointers_.push_back(codecs_.back().get());
      for (const BucketPart& part : layout_.parts(slice.job_bucket)) of_tensor[part.tensor] = codec_pointers_.back();
    }
    const bool applies_updates = options_.pull == PullMode::kUpdate;
    if (options_.place.device == nullptr) {
      memory_ = client::MakeHostMemory(backend_.get());
    } else {
      GW_ASSIGN_OR_RETURN(memory_, client::MakeDeviceMemory({.device = options_.place.device.get(),
                                                             .job = &job_,
                                                             .layout = &layout_,
                                                             .codecs = codec_pointers_,
                                                             .applies_updates = applies_updates}));
    }
    gradients_ = std::make_unique<client::GradientStore>(&job_, std::move(of_tensor), memory_);
    replica_ = std::make_unique<client::Replica>(&job_, &layout_, memory_, options_.memory, applies_updates);
    return absl::OkStatus();
  }

  absl::Status CheckFinite() const {
    if (options_.pull == PullMode::kMean) return absl::OkStatus();
    for (size_t t = 0; t < options_.memory.size(); ++t) {
      const int64_t bad = memory_->FindNonFinite(options_.memory[t]);
      if (bad < 0) continue;
      const client::HostView value = memory_->View(options_.memory[t].subspan(static_cast<size_t>(bad), 1));
      return absl::InvalidArgumentError(absl::StrCat("the initial parameter ", bad, " of tensor '",
                                                     job_.tensors()[t].name, "' is ", value.values[0]));
    }
    return absl::OkStatus();
  }

  absl::Status Connect() {
    if (!options_.resume.from.empty()) return ConnectWithCheckpoint();
    return ConnectAnew({});
  }

  absl::Status ConnectWithCheckpoint() {
    if (options_.resume.anew) {
      GW_ASSIGN_OR_RETURN(const client::CheckpointFile old,
                          client::CheckpointFile::ReadForNewJob(disk_, options_.resume.from, job_));
      GW_RETURN_IF_ERROR(old.RestoreForNewJob(replica_.get(), gradients_.get()));
      if (options_.notice) options_.notice(old.DescribeForNewJob());
      return ConnectAnew({});
    }
    GW_ASSIGN_OR_RETURN(
        const client::CheckpointFile checkpoint,
        client::CheckpointFile::Read(disk_, options_.resume.from, job_, layout_, options_.worker, options_.pull));
    GW_RETURN_IF_ERROR(checkpoint.Restore(replica_.get(), gradients_.get()));
    // The frames of later rounds that it sent may be merged, and could not be made again; with asynchronous rounds no
    // round waits for them.
    if (job_.spec().rounds().staleness() == 0) {
      GW_ASSIGN_OR_RETURN(resumed_, Resume(checkpoint));
    }
    return resumed_ ? absl::OkStatus() : ConnectAnew(checkpoint.identity());
  }

  v1::JoinRequest RequestOf(uint64_t incarnation) const {
    v1::JoinRequest request;
    request.mutable_identity()->set_job(job_.spec().name());
    request.mutable_identity()->set_worker(options_.worker);
    request.mutable_identity()->set_incarnation(incarnation);
    request.mutable_identity()->set_session(session_);
    *request.mutable_spec() = job_.spec();
    request.set_shard_count(layout_.shard_count());
    request.set_layout_digest(layout_.digest());
    request.mutable_shards()->Assign(options_.servers.begin(), options_.servers.end());
    return request;
  }

  // Those of an incarnation before are closed.
  std::vector<client::ShardLink*> MakeLinks(const v1::WorkerIdentity& identity) {
    links_.clear();
    std::vector<client::ShardLink*> links;
    for (uint32_t s = 0; s < layout_.shard_count(); ++s) {
      client::LinkOptions link;
      link.address = options_.servers[s];
      link.shard = s;
      link.identity = identity;
      link.connect_timeout_ms = options_.timeouts.connect_ms;
      link.rpc_timeout_ms = options_.timeouts.rpc_ms;
      link.durable = job_.durable();
      link.reconnect_timeout_ms = options_.timeouts.reconnect_ms;
      link.sanitized_elements = [this] { return gradients_->sanitized_elements(); };
      link.notice = options_.notice;
      links_.push_back(std::make_unique<client::ShardLink>(std::move(link)));
      links.push_back(links_.back().get());
    }
    incarnation_ = identity.incarnation();
    return links;
  }

  void MakeExchange(const std::vector<client::ShardLink*>& links, client::StartState start) {
    start_version_ = start.version;
    const client::SliceContext context{&job_,
                                       &layout_,
                                       options_.pull,
                                       incarnation_,
                                       codec_pointers_,
                                       replica_.get(),
                                       gradients_.get(),
                                       HashString(options_.worker),
                                       trace_.recorder()};
    const std::vector<client::FrameLink*> frame_links(links.begin(), links.end());
    if (IsAsync(job_)) {
      exchange_ = std::make_unique<client::AsyncExchange>(context, frame_links, start.versions, std::move(start.plans),
                                                          options_.encode_threads);
      return;
    }
    exchange_ =
        std::make_unique<client::Exchange>(client::ExchangeContext{context, frame_links, options_.spin_us,
                                                                   options_.encode_threads, options_.early_updates},
                                           start.version, std::move(start.plans));
  }

  // Goes on with the round that came next when the checkpoint was written, as the incarnation that wrote it. False: a
  // shard is past that round. After an error this worker is still a member where it was one, for another attempt.
  absl::StatusOr<bool> Resume(const client::CheckpointFile& checkpoint) {
    const client::CheckpointIdentity& identity = checkpoint.identity();
    v1::JoinRequest request = RequestOf(identity.incarnation);
    request.set_resume(true);
    request.set_resume_round(identity.version);
    const std::vector<client::ShardLink*> links = MakeLinks(request.identity());
    std::vector<int64_t> lease_ms;
    {
      const std::stop_callback on_stop(options_.stop, [&links] {
        for (client::ShardLink* link : links) link->Cancel();
      });
      for (client::ShardLink* link : links) {
        request.set_shard_index(static_cast<uint32_t>(lease_ms.size()));
        request.set_known_epoch(identity.server_epochs[lease_ms.size()]);
        request.set_known_lineage(identity.server_lineages[lease_ms.size()]);
        if (KnowsInstances(identity)) request.set_known_instance(identity.job_instances[lease_ms.size()]);
        const absl::StatusOr<v1::JoinReply> reply = link->Join(request);
        if (absl::IsFailedPrecondition(reply.status())) return false;
        if (!reply.ok()) return Abandoned(reply.status());
        if (reply->start_version() != identity.version) return false;
        lease_ms.push_back(reply->lease_ms() > 0 ? reply->lease_ms() : job_.spec().lease_ms());
      }
    }
    MakeExchange(links, {identity.version, {}, checkpoint.plans()});
    for (size_t s = 0; s < links.size(); ++s)
      if (absl::Status started = links[s]->Start(lease_ms[s], exchange_.get()); !started.ok())
        return Abandoned(started);
    return true;
  }

  // Closes the links without leaving the job.
  absl::Status Abandoned(const absl::Status& why) {
    for (const auto& link : links_) link->Cancel();
    if (exchange_ != nullptr) exchange_->Stop(why);
    links_.clear();
    exchange_.reset();
    return why;
  }

  // A newcomer. `before`: the checkpoint whose gradients it brings along; its version is 0 where there is none.
  absl::Status ConnectAnew(const client::CheckpointIdentity& before) {
    bool replaced = false;
    const absl::Status connected = ConnectOnce(before, &replaced);
    // A process that was killed may have sent a request to join that is taken after this one's: that is nobody's
    // worker.
    return replaced && !connected.ok() ? ConnectOnce(before, &replaced) : connected;
  }

  // *replaced: it had joined, and lost its place to another incarnation.
  absl::Status ConnectOnce(const client::CheckpointIdentity& before, bool* replaced) {
    const v1::JoinRequest request = RequestOf(RandomIncarnation());
    const std::vector<client::ShardLink*> links = MakeLinks(request.identity());
    starter_ = std::make_unique<client::Starter>(client::StartContext{&job_, &layout_, options_.pull, incarnation_,
                                                                      codec_pointers_, links, replica_.get(),
                                                                      options_.timeouts.start_ms});
    absl::StatusOr<client::StartState> start = JoinAndStart(request, links, before);
    for (client::ShardLink* link : links) *replaced = *replaced || link->replaced();
    GW_RETURN_IF_ERROR(start.status());
    MakeExchange(links, *std::move(start));
    for (client::ShardLink* link : links) link->SetEvents(exchange_.get());
    // A link that was lost while nobody of the exchange listened is found by its next use.
    return absl::OkStatus();
  }

  // What may take long; a request to stop ends it.
  absl::StatusOr<client::StartState> JoinAndStart(const v1::JoinRequest& request,
                                                  const std::vector<client::ShardLink*>& links,
                                                  const client::CheckpointIdentity& before) {
    const std::stop_callback on_stop(options_.stop, [this, &links] {
      for (client::ShardLink* link : links) link->Cancel();
      starter_->Cancel();
    });
    GW_RETURN_IF_ERROR(starter_->JoinAll(request));
    if (IsAsync(job_) ? starter_->asked_to_initialize() : starter_->version() < before.version) {
      GW_RETURN_IF_ERROR(CheckNotBehind(starter_->version(), before));
    }
    for (size_t s = 0; job_.durable() && s < before.server_epochs.size(); ++s)
      if (links[s]->server_epoch().Before({before.server_epochs[s], before.server_lineages[s]}))
        return links[s]->Annotate(absl::FailedPreconditionError(absl::StrCat(
            "this server has epoch ", links[s]->server_epoch().epoch, " and was replaced by one of epoch ",
            before.server_epochs[s], ", which the checkpoint knows: stop this server, or name the other one")));
    for (size_t s = 0; s < links.size(); ++s) GW_RETURN_IF_ERROR(CheckSameInstance(*links[s], s, before));
    GW_ASSIGN_OR_RETURN(client::StartState start, starter_->Run());
    GW_RETURN_IF_ERROR(CheckNotBehind(start.version, before));
    return start;
  }

  // At version 0 nothing was trained: it belongs to any job.
  static bool KnowsInstances(const client::CheckpointIdentity& before) {
    return before.version > 0 && !before.job_instances.empty();
  }

  // A job in memory that its server lost with its own end, and others made anew, is gone on with: residuals come along,
  // parameters are the shards'. One that was deleted is not.
  absl::Status CheckSameInstance(client::ShardLink& link, size_t shard,
                                 const client::CheckpointIdentity& before) const {
    if (!KnowsInstances(before)) return absl::OkStatus();
    const uint64_t known = before.job_instances[shard], found = link.job_instance();
    if (known == 0 || found == 0 || known == found) return absl::OkStatus();
    const client::ServerEpoch server = link.server_epoch();
    const bool restarted =
        server.epoch != before.server_epochs[shard] || server.lineage != before.server_lineages[shard];
    if (restarted && !job_.durable()) return absl::OkStatus();
    return link.Annotate(absl::FailedPreconditionError(absl::StrCat(
        "the job '", job_.spec().name(), "' that the checkpoint '", options_.resume.from,
        "' was trained in was deleted, and this is another one of its name, which goes on from other parameters: start "
        "this worker again without the checkpoint, and it joins that one, or give the job another name, and the "
        "checkpoint begins it")));
  }

  absl::Status CheckNotBehind(uint64_t version, const client::CheckpointIdentity& before) const {
    if (version >= before.version) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(
        "the shards hold version ", version, ", the checkpoint '", options_.resume.from, "' is of version ",
        before.version,
        ": these are not the servers it was trained with, or their disks lost what lies between. Join without the "
        "checkpoint to start from what they hold"));
  }

  // Destroyed in reverse: links before what they report to.
  const SessionOptions options_;
  const Job job_;
  const Layout layout_;
  const std::unique_ptr<kernels::Backend> backend_;
  client::SessionTrace trace_;
  PosixDisk disk_;  // of checkpoints
  const uint64_t session_ = RandomIncarnation();
  uint64_t incarnation_ = 0;
  std::vector<std::unique_ptr<Codec>> codecs_;
  std::vector<const Codec*> codec_pointers_;
  std::shared_ptr<client::TensorMemory> memory_;
  std::unique_ptr<client::Replica> replica_;
  std::unique_ptr<client::GradientStore> gradients_;
  std::unique_ptr<client::Starter> starter_;
  std::unique_ptr<client::Exchanger> exchange_;
  std::vector<std::unique_ptr<client::ShardLink>> links_;
  uint64_t start_version_ = 0;
  uint64_t start_bytes_ = 0;
  bool resumed_ = false;
  absl::Mutex leave_mu_;  // held while it is left; another caller returns when that is done
  bool left_ ABSL_GUARDED_BY(leave_mu_) = false;
};

absl::StatusOr<std::shared_ptr<Device>> OpenCudaDevice(int index) { return kernels::cuda::MakeAsyncCudaBackend(index); }

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::~Session() {
  const AgreedFloatMode mode;
  impl_.reset();
}

absl::StatusOr<std::unique_ptr<Session>> Session::Join(SessionOptions options) {
  const AgreedFloatMode mode;
  GW_ASSIGN_OR_RETURN(Job job, Job::Make(options.job));
  GW_RETURN_IF_ERROR(CheckOptions(options, job));
  GW_ASSIGN_OR_RETURN(Layout layout, Layout::Make(job, static_cast<uint32_t>(options.servers.size())));
  GW_ASSIGN_OR_RETURN(std::unique_ptr<kernels::Backend> backend, kernels::MakeBackend(options.backend));
  auto impl = std::make_unique<Impl>(std::move(options), std::move(job), std::move(layout), std::move(backend));
  GW_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

absl::Status Session::BeginRound(std::span<const float> learning_rates) {
  const AgreedFloatMode mode;
  return impl_->exchange().Begin(learning_rates);
}

absl::Status Session::BeginReplacement() {
  const AgreedFloatMode mode;
  return impl_->exchange().BeginReplacement();
}

absl::Status Session::TensorReady(uint32_t tensor, const float* gradient, Stream* stream) {
  const AgreedFloatMode mode;
  return impl_->Ready(tensor, gradient, stream);
}

absl::Status Session::RowsReady(uint32_t tensor, const RowGradient& gradient) {
  const AgreedFloatMode mode;
  return impl_->Ready(tensor, gradient);
}

absl::Status Session::EndRound(int64_t timeout_ms, Stream* stream) {
  const AgreedFloatMode mode;
  const int64_t limit_ms = timeout_ms < 0 ? impl_->options().timeouts.round_ms : timeout_ms;
  return impl_->EndRound(limit_ms, stream);
}

absl::Status Session::Exchange(std::span<const float* const> gradients, std::span<const float> learning_rates,
                               Stream* stream) {
  GW_RETURN_IF_ERROR(impl_->CheckGradients(gradients));
  GW_RETURN_IF_ERROR(BeginRound(learning_rates));
  // Backward order, in which buckets are filled.
  absl::Status ready;
  for (size_t t = gradients.size(); t-- > 0 && ready.ok();)
    ready = TensorReady(static_cast<uint32_t>(t), gradients[t], stream);
  const absl::Status ended = EndRound(-1, stream);  // of a session that failed: once nothing reads the gradients
  return ready.ok() ? ended : ready;
}

absl::Status Session::Push(uint32_t bucket, std::span<const float* const> gradients) {
  const AgreedFloatMode mode;
  GW_RETURN_IF_ERROR(impl_->ReadyBucket(bucket, gradients));
  return impl_->exchange().WaitPushed(bucket, impl_->options().timeouts.round_ms);
}

absl::Status Session::Pull(uint32_t bucket) {
  const AgreedFloatMode mode;
  return impl_->Applying(nullptr, [&](client::Exchanger& exchange) {
    return exchange.WaitApplied(bucket, impl_->options().timeouts.round_ms);
  });
}

absl::Status Session::Leave(bool drain) {
  const AgreedFloatMode mode;
  return impl_->Leave(drain);
}

absl::Status Session::Drain(int64_t timeout_ms, Stream* stream) {
  const AgreedFloatMode mode;
  const int64_t limit_ms = timeout_ms < 0 ? impl_->options().timeouts.round_ms : timeout_ms;
  return impl_->Applying(stream, [&](client::Exchanger& exchange) { return exchange.Drain(limit_ms); });
}

SessionStats Session::stats() const { return impl_->Stats(); }
uint64_t Session::version() const { return impl_->exchange().version(); }
uint64_t Session::start_version() const { return impl_->start_version(); }
uint64_t Session::start_step() const { return StepsIn(impl_->job(), impl_->start_version()); }
bool Session::resumed() const { return impl_->resumed(); }
absl::Status Session::Save(const std::string& path, std::map<std::string, std::string> notes) {
  const AgreedFloatMode mode;
  return impl_->Save(path, std::move(notes));
}
uint64_t Session::incarnation() const { return impl_->incarnation(); }
const Job& Session::job() const { return impl_->job(); }
const Layout& Session::layout() const { return impl_->layout(); }
std::string Session::Digest() const { return impl_->replica().Digest(); }
uint32_t Session::Checksum() const { return impl_->replica().Checksum(); }
std::vector<std::string> Session::ShardDigests() const { return impl_->replica().ShardDigests(); }

}  // namespace gradwire
