// The worker's side of Gradwire: join a job, exchange gradients every step, leave.
//
//   auto session = gradwire::Session::Join(options);       // pulls or uploads the initial parameters
//   for (...) (*session)->Exchange(gradients, {lr});        // push, merge on the shards, pull, apply
//
// Exchange is BeginRound + TensorReady for every tensor + EndRound. Calling these yourself, TensorReady from a backward
// hook, overlaps encoding, sending and pulling of early buckets with the rest of the backward pass.
//
// Tensors travel in buckets. A frame is what one worker pushes of a bucket in a round; an update frame is what the
// shard makes of all their frames. What a codec does not send waits in a residual. Round r makes version r + 1.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gradwire/v1/job.pb.h"

namespace gradwire {

class Job;
class Layout;
namespace kernels {
struct Stream;
namespace cuda {
class AsyncBackend;
}
}  // namespace kernels

// A device in whose memory a session's tensors lie. Thread-safe.
using Device = kernels::cuda::AsyncBackend;
// A cudaStream_t, cast; null is the calling thread's own (cudaStreamPerThread).
using Stream = kernels::Stream;

// An NVIDIA GPU, by its number in this process. Errors: FailedPrecondition where it cannot be used, saying why.
absl::StatusOr<std::shared_ptr<Device>> OpenCudaDevice(int index);

// What a worker pulls after each round.
enum class PullMode {
  kUpdate,      // update frames; the session replays the optimizer on its replica. Cheapest on the wire
  kParams,      // parameters in float32; the worker holds no optimizer state
  kParamsBf16,  // parameters rounded to bfloat16
  kMean,        // the mean of what was pushed, unapplied; the job's optimizer must be OPTIMIZER_NONE
};

// Where a session's tensors lie: its parameters, gradients, residuals and moments.
struct SessionPlace {
  // Null: host memory. Else the tensors lie on this device; only frames, update frames and checkpoints pass through the
  // host. Such a session needs tensors that travel by tagc or dense codecs and, with kUpdate, an optimizer other than
  // lamb, lans and lion and no clip_norm; else Join returns Unimplemented.
  std::shared_ptr<Device> device;
  Stream* stream = nullptr;  // with a device: what was launched on this stream before Join makes the parameters' values
};

// Each from 1 to 10^12 ms.
struct SessionTimeouts {
  int64_t connect_ms = 20'000;  // all attempts to reach and join a shard together
  int64_t start_ms = 600'000;   // the wait for the initial parameters (another worker may upload them)
  int64_t rpc_ms = 10'000;      // one unary call
  int64_t round_ms = 600'000;   // EndRound's default
  // A shard that cannot be reached is tried again for this long before it counts as lost. A shard of a job that is not
  // durable is lost after one second in which nothing listens at its address.
  int64_t reconnect_ms = 60'000;
};

// What a session begins with in the place of its caller's values.
struct SessionResume {
  // A file of Session::Save, of the same job and worker: this session goes on where the one that wrote it stood. Where
  // the shards still wait for the round that came next (this worker's process was started again in time), nothing is
  // lost: the same gradients give frames with the same bytes, and shards recognize those that they have merged. Where
  // the shards went on without this worker, it takes their parameters; residuals and the preconditioner's state come
  // from the file. Session::resumed tells which of the two happened. With bounded staleness it is always the second,
  // for gradients depend on when versions came. The session overwrites SessionOptions::memory. Empty: a newcomer.
  std::string from;
  // Set this beside `from` where the servers do not have the job, or have one of its name that nobody has trained yet:
  // the job then begins with the parameters of the file. The file may be of a job of another name, of another worker
  // and of other servers; where the jobs differ in nothing else, the file's residuals and preconditioner are taken,
  // too. Moments that the shards kept begin at 0.
  bool anew = false;
};

// Where the time of some rounds goes: what this session and every shard did to each bucket, and when, as one file in
// Chrome's trace format (https://ui.perfetto.dev, or any JSON reader). Times are those of shard 0's clock; the file
// says by how much other processes' may be off. Other workers' frames and answers are in it as the shards saw them; a
// worker with a `path` of its own, and the same rounds, writes a file whose events may be put beside these. The shards
// note the rounds that were asked for last, whoever asked. Noting costs a bucket some microseconds; before and after
// these rounds nothing.
struct TraceOptions {
  // Written one round after those that are noted, or when the session is left before; what goes wrong with that is a
  // notice. In a folder that exists. Empty: nothing is noted.
  std::string path;
  uint64_t first_round = 2;  // of the job, counted from 0; the first step is rounds 0 and 1
  uint64_t rounds = 1;       // 1 to 1000; at most 32768 events are kept by each process
};

struct SessionOptions {
  // Address of shard i at index i; the same list, in order, on every worker. A shard that has standbys is named by all
  // of their addresses, "grpc://a:7070|grpc://b:7070": the one that serves is found, also when another is promoted.
  std::vector<std::string> servers;
  v1::JobSpec job;     // the same on every worker
  std::string worker;  // unique in the job
  PullMode pull = PullMode::kUpdate;
  // One span per tensor of the job, of exactly its elements: the parameters (initial values on entry; pulled values
  // from then on), or for kMean where means are written. The caller keeps them alive until the session is destroyed.
  // With kMean a span may be empty: that mean is not wanted. Of a bucket that has no other tensor only what the next
  // round needs is pulled.
  std::vector<std::span<float>> memory;
  SessionPlace place;
  SessionTimeouts timeouts;
  SessionResume resume;
  // How long EndRound of a small job (see Session) busy-waits for updates before it blocks, if updates usually come
  // that fast: 0 (never) to 10000 microseconds. A blocked thread wakes some 40 us late.
  int64_t spin_us = 100;
  // Threads that take in and encode gradients, 1 to 64, of a session that has threads (see Session); tensors on a
  // device have one. What is sent has the same bits with any number. More than one pays where encoding is what steps
  // wait for and backward leaves cores free.
  uint32_t encode_threads = 1;
  // Updates are applied as they come, not only in EndRound, to tensors of buckets that this worker has sent: a longer
  // round of the network or of a large replica hides behind backward. For callers that do not read a parameter between
  // its TensorReady and EndRound: whoever leaves between the two finds some tensors a version ahead of others. A
  // session that has failed writes nothing more. Of small jobs (see Session) EndRound applies all the same. Not with
  // asynchronous rounds, nor on a device.
  bool early_updates = false;
  // A request to stop makes Join give up what it waits for (a call that is under way ends by timeouts.rpc_ms), leave
  // the job and return Cancelled. Without effect once Join has returned.
  std::stop_token stop;
  TraceOptions trace;
  // The session calls this with what a person may want to know: a shard is away, is back, a worker has gone. Calls come
  // from threads of the session until it is destroyed; the function must return quickly. May be empty.
  std::function<void(const std::string&)> notice;
  std::string backend = "auto";  // see kernels::MakeBackend
};

// A gradient that is 0 but for some rows of its tensor, along the first dimension, as an embedding's is.
struct RowGradient {
  std::span<const int64_t> rows;  // ascending, each of them once
  const float* values = nullptr;  // row after row, in the order of `rows`
};

// Totals since Join.
struct SessionStats {
  uint64_t steps = 0;                // steps that EndRound has ended; the calibration round is not one
  uint64_t skipped_rounds = 0;       // rounds that went on without this worker, while it was late or away
  uint64_t nonfinite_rounds = 0;     // those of `steps` that all shards skipped: some worker's gradient was not finite
  uint64_t pushed_bytes = 0;         // chunks handed to the transport, headers counted
  uint64_t pulled_bytes = 0;         // chunks received from the transport, headers counted
  uint64_t start_bytes = 0;          // of the two above, those before the first round: initial parameters
  uint64_t selected_elements = 0;    // elements that sparse codecs sent
  uint64_t deferred_elements = 0;    // elements that update frames named as undecodable; back in the residual
  uint64_t sanitized_elements = 0;   // non-finite gradient elements that counted as 0
  uint64_t not_included_frames = 0;  // frames that came too late for their round; back in the residual
  uint32_t members = 0;              // workers of the job, this one counted, as shard 0 said with its last heartbeat
  double encode_seconds = 0;         // encoding, on all encoding threads together or in TensorReady
  double apply_seconds = 0;          // decoding and the optimizer, on the applying thread or in EndRound
  double wait_seconds = 0;           // callers' time inside EndRound
};

// Thread-safe, except that one round is driven by one thread at a time: BeginRound and EndRound must not overlap each
// other; TensorReady may be called from any thread between them. Owns encode_threads threads and one more (none for a
// small job in host memory, of at most 16384 elements) and, per shard, one for heartbeats and those of its connection.
//
// No shard holds the frames of another: of each, frames of 8 MiB may wait for the network beside 1 MiB in the
// transport, and one frame per encoding thread; what is above is encoded later. Frames are kept until their round is
// over (with bounded staleness s, those of s + 1 rounds).
//
// Errors are absl statuses. When a shard is lost (Unavailable, naming its address) or refuses this worker for good,
// the session has failed: every later call returns the same status at once. Join again to go on; the new session
// starts from the parameters that the shards hold.
//
// A worker that was late (a job with a quorum does not wait) or away (stopped beyond its lease, or cut off) catches up:
// EndRound loads the parameters of the round that the others are at, version() jumps, residuals stay. What was not
// merged travels later. proto/ROUNDS.md is the contract.
//
// A job with bounded staleness s (JobSpec.rounds, ROUNDS_BOUNDED): EndRound of round r returns once version r + 1 - s
// is applied, and applies whatever else is there. So up to s rounds that this worker has pushed are on their way when
// EndRound returns; a later EndRound returns the error of a frame that a shard refused. Drain, Save and Leave wait for
// all of them.
//
// A job with codec powersgd takes two rounds for a step: TensorReady's frames carry the first factor, EndRound
// exchanges the second one and applies the update. version() goes up by two with each step; so does skipped_rounds
// with each step that the others make without this worker.
//
// The network to a shard may break off, and a shard of a durable job (JobSpec.durability) be restarted: the session
// connects again, sends the same bytes of each frame whose round is not over on that shard, and goes on; Join or
// EndRound takes longer. DataLoss: that shard's disk lost versions that this worker has seen.
class Session {
 public:
  // Blocks until the parameters of the start version are in `memory`. Errors: InvalidArgument (options or job; says
  // which field), Unavailable (a server cannot be reached within timeouts.connect_ms), FailedPrecondition (another
  // spec or shard map), DeadlineExceeded (nobody initialises the parameters), Cancelled (options.stop). With
  // resume.from also NotFound (no such file, or a shard does not have the job), DataLoss (the file is damaged, or the
  // shards are behind it: their disks lost versions), FailedPrecondition (it is of another job, worker or pull mode).
  static absl::StatusOr<std::unique_ptr<Session>> Join(SessionOptions options);
  ~Session();  // leaves the job, without draining
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Opens the next round. `learning_rates`: one per parameter group, or one for all.
  absl::Status BeginRound(std::span<const float> learning_rates);
  // The gradient of a tensor is complete. Returns at once; the work happens on encoding threads (a small job is encoded
  // and sent right here), where cores are scarce some tensors later, or with the last of them. `gradient`: as many
  // elements as the tensor has; must stay unchanged until EndRound has returned. With a device the gradient is in its
  // memory, made by what was launched on `stream` until now; this call does not wait for that work.
  absl::Status TensorReady(uint32_t tensor, const float* gradient, Stream* stream = nullptr);
  // The same of a gradient that is known by its rows; in host memory, unchanged until EndRound has returned. It sends
  // what TensorReady would. With a codec that sends all that is not 0 (zen, adaptive) the work grows with these rows,
  // with others with the tensor. InvalidArgument: they are no rows of this tensor; Unimplemented: of a session on a
  // device.
  absl::Status RowsReady(uint32_t tensor, const RowGradient& gradient);
  // Waits until the round is applied in every bucket (with bounded staleness: see above). The parameters may change
  // from the call until its return (with early_updates from TensorReady on). Errors: FailedPrecondition (a tensor was
  // not reported ready; nothing is waited for), DeadlineExceeded (the round stays open: call again), InvalidArgument (a
  // non-finite gradient under NONFINITE_REFUSE: names tensor, index, value and round; this worker contributed nothing
  // to the buckets of that tensor, its finite neighbours wait in the residual), or what a shard refused. Under
  // NONFINITE_SKIP such a round is no error: parameters, moments and this worker's residuals are as they were before
  // it, and stats().nonfinite_rounds has grown, on every worker. All errors but the first two leave the round closed
  // and the parameters at the new version. With a device the parameters change after what was launched on `stream`
  // until now, and have changed on return, for every stream.
  absl::Status EndRound(int64_t timeout_ms = -1, Stream* stream = nullptr);

  // Between two rounds: waits until every round that this worker pushed is applied in every bucket, as EndRound does
  // without staleness. Returns what shards refused since the last EndRound. -1: SessionOptions.timeouts.round_ms.
  // `stream`: as for EndRound.
  absl::Status Drain(int64_t timeout_ms = -1, Stream* stream = nullptr);

  // Every worker of the job calls this in the same step, in the place of BeginRound and TensorReady; EndRound ends the
  // step. What `memory` holds becomes the parameters of the job, on every shard and worker. Moments and residuals stay,
  // optimizers do not count the round. Every worker must have the same values, to the last bit, and leave them until
  // EndRound has returned. Errors: InvalidArgument (a value that is not finite; no round is open then),
  // FailedPrecondition (before the first step), and those of jobs that replacing does not go with
  // (common/job/COMPATIBILITY.md). EndRound's FailedPrecondition: another worker pushed gradients in this step, or has
  // other values; the session has failed then. A worker that ends before EndRound returns may leave some buckets
  // replaced and others not. proto/ROUNDS.md is the contract.
  absl::Status BeginReplacement();

  // A whole round. `gradients`: one per tensor. `stream`: as for TensorReady and EndRound.
  absl::Status Exchange(std::span<const float* const> gradients, std::span<const float> learning_rates,
                        Stream* stream = nullptr);

  // For tests and benchmarks, between BeginRound and EndRound. Push reports the tensors of `bucket` ready (those that
  // were not) and waits until every shard has acknowledged its frame; Pull waits until the bucket's update is applied.
  absl::Status Push(uint32_t bucket, std::span<const float* const> gradients);
  absl::Status Pull(uint32_t bucket);

  // Between two rounds: drains, then writes what SessionOptions.resume needs to the file `path`: parameters, moments,
  // residuals, the preconditioner's state and who this worker is. The file is replaced at once or not at all, and
  // synced to disk; that takes as long as writing 2 to 5 times the parameters. CHECKPOINT.md has the bytes. `notes`,
  // UTF-8, at most 1 MiB together: what the training loop wants to find in it. Errors: InvalidArgument (notes that are
  // not that), FailedPrecondition (during a round), and those of the disk; the file stays as it was with the first two.
  absl::Status Save(const std::string& path, std::map<std::string, std::string> notes = {});

  // Ends the membership and closes the connections; later calls return Cancelled. Errors are those of Drain and of the
  // shards; the session is over in any case. `drain`: drains first, if no round is open. Without draining, as the
  // destructor leaves, shards merge what was pushed all the same, but `memory` stays at the version that it has; of an
  // open round with early_updates some tensors have the next one.
  absl::Status Leave(bool drain = true);

  SessionStats stats() const;
  // The version of the parameters in memory: every bucket has reached it. With bounded staleness buckets may be up to
  // `staleness` versions beyond it until Drain, with early_updates in an open round one.
  uint64_t version() const;
  uint64_t start_version() const;  // the version at which this session joined
  // How many steps the job had made by then: a training loop takes up its schedule there. With asynchronous rounds
  // they are those of all workers together.
  uint64_t start_step() const;
  bool resumed() const;  // whether the session went on exactly where the checkpoint stood
  uint64_t incarnation() const;
  const Job& job() const;
  const Layout& layout() const;
  // SHA-256 (hex) of the memory, tensor by tensor, float32 little-endian. Not during a round.
  std::string Digest() const;
  // CRC-32C of the same, to see whether somebody has written there: a twelfth of the time. Not during a round.
  uint32_t Checksum() const;
  // Per shard, its slices in layout order: what the shard's DescribeJob reports as parameters_sha256.
  std::vector<std::string> ShardDigests() const;

 private:
  class Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradwire
