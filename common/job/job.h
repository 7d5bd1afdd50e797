// A job, validated: the JobSpec with every default filled in, roles derived, codecs chosen.
// The one place where a spec that came from a user or a peer is checked; everything behind it trusts a Job.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/job/codec_spec.h"
#include "common/job/compatibility.h"
#include "gradwire/v1/job.pb.h"

namespace gradwire {

struct Tensor {
  std::string name;
  std::vector<uint64_t> shape;
  uint64_t elements = 0;
  v1::Role role = v1::ROLE_OTHER;
  uint32_t group = 0;
  uint32_t codec = 0;  // index into Job::codecs
};

// Immutable after Make; thread-safe; cheap to move, copied rarely.
class Job {
 public:
  // Fills defaults and validates. Errors: InvalidArgument that names the field, the tensor, what was found and what
  // is allowed.
  static absl::StatusOr<Job> Make(const v1::JobSpec& spec);

  const v1::JobSpec& spec() const { return spec_; }  // with defaults filled in
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const std::vector<CodecSpec>& codecs() const { return codecs_; }
  // What the shard compresses the mean with, as many as codecs(); none: the update carries it as it is.
  const std::vector<std::optional<CodecSpec>>& update_codecs() const { return update_codecs_; }
  uint64_t elements() const { return elements_; }
  const FeatureSet& features() const { return features_; }  // its codecs' too
  // Whether it can have what is asked of it beside what its spec says: how it is pulled, where it lies, what is done
  // with it. Errors: those of CheckTogether, with the job's name.
  absl::Status CheckGoesWith(const FeatureSet& asked) const;
  // A tensor has a codec whose rounds come in pairs: round_mode.h.
  bool two_phase() const { return two_phase_; }
  // Tensors that have this codec travel in one bucket and lie on one shard, each as a whole.
  bool keeps_whole(uint32_t codec) const { return std::holds_alternative<PowerSgdSpec>(codecs_[codec]); }
  // Elements of a run of the tensors that have this codec: the spec's, or fewer where the codec wants that.
  uint32_t run_elements(uint32_t codec) const;
  // How many fill a bucket of this codec, over all shards: whole runs of the job. A tensor that is kept whole may be
  // longer.
  uint64_t bucket_elements(uint32_t codec) const;
  uint64_t digest() const { return digest_; }  // of the canonical spec: equal specs, equal digest
  bool keeps_parameters() const { return spec_.optimizer().kind() != v1::OPTIMIZER_NONE; }
  // Its versions are journaled: workers may go on after a server was restarted.
  bool durable() const { return spec_.has_durability(); }
  // Moments that the optimizer keeps per element: 0, 1 (momentum) or 2 (AdamW).
  int moments() const { return moments_; }

 private:
  v1::JobSpec spec_;
  std::vector<Tensor> tensors_;
  std::vector<CodecSpec> codecs_;
  std::vector<std::optional<CodecSpec>> update_codecs_;
  FeatureSet features_;
  uint64_t elements_ = 0;
  uint64_t digest_ = 0;
  int moments_ = 0;
  bool two_phase_ = false;
};

// The role that a tensor's name and shape suggest (GPT, BERT, ResNet and torch.nn naming).
v1::Role GuessRole(std::string_view name, const std::vector<uint64_t>& shape);

// Shell-like pattern: * any run of characters, ? one character.
bool GlobMatch(std::string_view pattern, std::string_view text);

}  // namespace gradwire
