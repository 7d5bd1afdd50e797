// One bucket of a job with any number of workers, driven round by round without servers or threads: what the codec
// conformance suite, and tests of single codecs, are written against.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/codec/codec.h"
#include "common/codec/update/update.h"
#include "common/codec/update/update_compressor.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "kernels/backend.h"

namespace gradwire::testing {

// What the suite may expect of a codec beyond what all of them promise.
struct CodecTraits {
  bool keeps_rest = true;    // what was not sent is in the residual, but for `rounding`
  double rounding = 0;       // of gradients below 4
  bool unbiased = false;     // the expectation of what a frame stands for is the gradient
  bool exact_means = false;  // the sum can be had back from the update frame for any number of workers
  // Where the bytes of a frame depend on the number of elements alone: bits of a run with n of them.
  std::function<uint64_t(uint64_t n)> run_bits;
  bool sends_ranges = false;  // and a range per run before that
};
CodecTraits TraitsOf(const std::string& codec);
// A spec of every codec in every form, and a name for a test of one.
std::vector<std::string> AllCodecs();
std::vector<std::string> CodecsWith(const std::function<bool(const CodecTraits&)>& promise);
std::string NameOf(const std::string& codec, const std::string& backend);

struct ClusterOptions {
  std::string codec = "tagc:density=0.01";
  std::string update_codec = {};  // empty: none
  uint32_t workers = 1;
  uint32_t max_workers = 0;  // 0: workers
  uint64_t elements = 1;     // of the bucket; 0: an empty share of a bucket
  uint32_t run_elements = 4096;
  uint64_t seed = 1;  // of the job and of the order of arrival
  std::string backend = "cpu";
};

// A tensor of so many elements, at least 1, as square as it gets: a matrix, unless their number is prime.
std::vector<uint64_t> SquarestShape(uint64_t elements);

// The reference and every SIMD target that this machine runs, as MakeBackend knows them.
std::vector<std::string> Backends();

// The gradient of one worker in one round.
using GradientFn = std::function<void(uint32_t worker, uint64_t round, std::vector<float>* out)>;

// What happened in one round.
struct RoundResult {
  std::vector<EncodedFrame> frames;  // per worker
  UpdateFrame update_frame;
  Update update;
  std::vector<double> applied;  // sum over workers that the update frame stands for, per element
};

// Not thread-safe. Steps that must succeed abort the test when they do not.
class Cluster {
 public:
  explicit Cluster(const ClusterOptions& options);

  // Adds the gradients to the residuals, encodes, merges in a random interleaving through an accumulator, finishes,
  // decodes, and returns what was deferred. Also adds to pushed() and applied(). From round 1 on the next one carries
  // values again: rounds that prepare it are done, too.
  RoundResult Round(const GradientFn& gradient);
  // The steps of Round, for tests that interfere.
  std::vector<EncodedFrame> EncodeAll(const GradientFn& gradient);
  RoundResult Close(std::vector<EncodedFrame> frames, UpdateFrame update);

  // Rounds with the same gradient function until values are sent: round 0, or one that prepares.
  void Calibrate(const GradientFn& gradient);

  const Codec& codec() const { return *codec_; }
  const BucketLayout& layout() const { return *layout_slice_; }
  const Job& job() const { return *job_; }
  kernels::Backend& backend() { return *backend_; }
  const RoundPlan& plan() const { return plan_; }
  uint64_t round() const { return round_; }
  uint32_t workers() const { return options_.workers; }
  std::mt19937_64& random() { return random_; }
  std::vector<float>& pending(uint32_t worker) { return pending_[worker]; }
  // What was pending when the last round was encoded, this round's gradient included.
  const std::vector<float>& formed(uint32_t worker) const { return formed_[worker]; }
  // Of the update codec, on the shard; zeros where it keeps none.
  const std::vector<float>& update_residual() const { return update_residual_; }
  std::unique_ptr<Accumulator> OpenAccumulator() const;
  FrameIdentity Identity(uint64_t incarnation) const;

  // Sums over all workers and rounds, per element, in float64.
  const std::vector<double>& pushed() const { return pushed_; }
  const std::vector<double>& applied() const { return applied_; }
  // Largest |pushed - (applied + residuals)| over all elements, that of the update codec counted for every worker; 0
  // where nothing is lost and sums are exact.
  double LargestLoss() const;

 private:
  RoundResult OneRound(const GradientFn& gradient);
  std::vector<float*> RunPointers(uint32_t worker);

  ClusterOptions options_;
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  const BucketLayout* layout_slice_ = nullptr;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Codec> codec_;
  std::vector<std::unique_ptr<Encoder>> encoders_;
  std::vector<std::vector<float>> pending_;
  std::vector<std::vector<float>> formed_;
  std::vector<std::vector<float>> velocity_;  // of codecs that have one
  std::unique_ptr<UpdateCompressor> compressor_;
  std::vector<float> update_residual_;
  RoundPlan plan_;
  uint64_t round_ = 0;
  std::vector<double> pushed_;
  std::vector<double> applied_;
  std::mt19937_64 random_;
};

// The sum over workers that an update frame stands for, per element.
std::vector<double> SumsOf(const Update& update, const BucketLayout& layout);

// What of the update that an accumulator decoded itself differs from what its frame says; empty: nothing, or it did not
// decode it. The plan of the next round is not looked at: UpdateFrame has it. The accumulator is still there.
std::string DifferenceOfDecoded(const Cluster& cluster, const UpdateFrame& frame);

// Segments of whole frames, parsed; `chunks` keeps the bytes alive.
struct ParsedFrame {
  std::vector<wire::Chunk> chunks;
  std::vector<wire::Segment> segments;  // of all chunks, learning rates included
};
ParsedFrame ParseAll(const EncodedFrame& frame);

// Merges every segment of every frame in a random order (learning rates are skipped).
void MergeShuffled(const std::vector<EncodedFrame>& frames, std::mt19937_64& random, Accumulator* accumulator);

std::vector<uint8_t> Joined(const std::vector<Bytes>& chunks);

// Gradients. Multiples of 2^-12 below 4, so that sums of them are exact in float32 and float64.
GradientFn DyadicGradient(uint64_t seed, uint64_t elements, double nonzero_fraction, bool clustered);
GradientFn GaussianGradient(uint64_t seed, uint64_t elements);

}  // namespace gradwire::testing
