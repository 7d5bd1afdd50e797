// See codec_harness.h.
#include "tests/conformance/codec/codec_harness.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "common/base/hash.h"
#include "common/codec/select/select.h"
#include "common/job/round_mode.h"
#include "common/job/update_codec.h"
#include "kernels/cpu/simd/simd_backend.h"
#include "tests/lib/must.h"

namespace gradwire::testing {

CodecTraits TraitsOf(const std::string& codec) {
  const auto is = [&codec](std::string_view name) { return codec.starts_with(name); };
  CodecTraits traits;
  const bool stochastic = is("qsgd") || is("linear") || is("natural") || codec.ends_with("=stochastic");
  const bool rounds = is("zen") && codec.find("values=") != std::string::npos;
  traits.keeps_rest = !(is("signsgd") || is("signum") || is("terngrad") || stochastic || rounds);
  traits.unbiased = stochastic || codec == "terngrad";
  const bool scaled = is("onebit") || is("efsignsgd") || is("dgc") || codec.find("=int") != std::string::npos ||
                      codec.find("=2bit") != std::string::npos;
  const bool homomorphic = is("uniform") || is("thc");
  traits.rounding = is("powersgd") ? 1e-4 : homomorphic ? 5e-5 : scaled ? 1e-5 : 0;
  if (is("fp16")) traits.run_bits = [](uint64_t n) { return 16 * n; };
  if (is("onebit")) traits.run_bits = [](uint64_t n) { return 64 + n; };
  if (is("signsgd") || is("signum")) traits.run_bits = [](uint64_t n) { return n; };
  if (is("efsignsgd")) traits.run_bits = [](uint64_t n) { return 32 + n; };
  if (is("terngrad")) traits.run_bits = [](uint64_t n) { return 32 + (n + 4) / 5 * 8; };
  if (const size_t at = codec.find(":bits="); at != std::string::npos) {
    const uint64_t bits = static_cast<uint64_t>(codec[at + 6] - '0');
    traits.run_bits = [bits, transformed = is("thc"), scale = homomorphic ? 0u : 32u](uint64_t n) {
      return scale + bits * (transformed ? std::bit_ceil(n) : n);
    };
  }
  traits.sends_ranges = is("dense:fixed") || is("tagc") || homomorphic;
  traits.exact_means = is("dense:fixed") || is("tagc");
  return traits;
}

std::vector<std::string> AllCodecs() {
  return {"dense:fp32",
          "dense:bf16",
          "dense:fixed32",
          "dense:fixed16",
          "tagc:density=0.02,cells=8",
          "tagc:density=0.02,cells=8,form=sketch",
          "tagc:density=0.02,cells=16",
          "tagc:density=0.02,cells=16,form=sketch",
          "tagc:density=0.02,cells=32",
          "tagc:density=0.02,cells=32,form=sketch",
          "tagc:density=0.02",
          "tagc:density=0.02,bits=2",
          "tagc:density=0.02,bits=3,form=sketch",
          "fp16",
          "onebit",
          "signsgd",
          "signum:momentum=0.9",
          "efsignsgd",
          "terngrad",
          "terngrad:clip=2.5",
          "qsgd:bits=4",
          "linear:bits=3,norm=l2",
          "linear:bits=8",
          "natural:bits=4",
          "natural:bits=3,norm=l2",
          "topk:density=0.02",
          "topk:density=0.02,values=fp16",
          "topk:density=0.02,values=bf16",
          "topk:density=0.02,values=int8",
          "topk:density=0.02,values=int6",
          "topk:density=0.02,values=int4",
          "topk:density=0.02,values=2bit",
          "threshold:value=0.01",
          "randomk:density=0.02,values=bf16",
          "dgc:density=0.02,momentum=0.5",
          "dgc:density=0.02,values=fp16,momentum=0.5,nesterov=true,clip=100",
          "uniform:bits=4",
          "uniform:bits=8",
          "uniform:bits=3,rounding=stochastic",
          "thc:bits=4",
          "thc:bits=2,granularity=20,p=0.1",
          "zen",
          "zen:index=auto",
          "zen:index=coo,values=fp16",
          "zen:index=bitmap,values=bf16",
          "adaptive",
          "powersgd:rank=1",
          "powersgd:rank=4"};
}

std::vector<std::string> CodecsWith(const std::function<bool(const CodecTraits&)>& promise) {
  std::vector<std::string> codecs = AllCodecs();
  std::erase_if(codecs, [&](const std::string& codec) { return !promise(TraitsOf(codec)); });
  return codecs;
}

std::string NameOf(const std::string& codec, const std::string& backend) {
  std::string name = codec + "_" + backend;
  for (char& c : name) {
    if (!isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

namespace {

using testing_support::Must;

constexpr float kLearningRate = 0.25f;

v1::JobSpec SpecOf(const ClusterOptions& options) {
  v1::JobSpec spec;
  spec.set_name("conformance");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.set_codec(options.codec);
  spec.set_update_codec(options.update_codec);
  spec.set_max_workers(std::max(options.max_workers, options.workers));
  spec.set_bucket_bytes(1u << 30);
  spec.set_run_elements(options.run_elements);
  spec.set_seed(options.seed);
  auto* tensor = spec.add_tensors();
  tensor->set_name("w");
  for (const uint64_t n : SquarestShape(std::max<uint64_t>(1, options.elements))) tensor->add_shape(n);
  return spec;
}

}  // namespace

std::vector<uint64_t> SquarestShape(uint64_t elements) {
  uint64_t rows = static_cast<uint64_t>(std::sqrt(static_cast<double>(elements)));
  while (elements % rows != 0) --rows;
  return rows == 1 ? std::vector<uint64_t>{elements} : std::vector<uint64_t>{rows, elements / rows};
}

std::vector<std::string> Backends() {
  std::vector<std::string> names = {"reference"};
  for (const std::string& target : kernels::SimdTargets()) names.push_back("cpu:" + target);
  return names;
}

Cluster::Cluster(const ClusterOptions& options) : options_(options), random_(options.seed) {
  job_ = std::make_unique<Job>(Must(Job::Make(SpecOf(options))));
  // One element on two shards leaves one of them an empty share.
  layout_ = std::make_unique<Layout>(Must(Layout::Make(*job_, options.elements == 0 ? 2 : 1)));
  layout_slice_ = &layout_->at(0, 0);
  if (layout_slice_->elements != options.elements) layout_slice_ = &layout_->at(0, 1);
  backend_ = Must(kernels::MakeBackend(options.backend));
  codec_ = Must(MakeCodec({job_.get(), layout_slice_, backend_.get()}));
  for (uint32_t w = 0; w < options.workers; ++w) encoders_.push_back(codec_->NewEncoder());
  pending_.assign(options.workers, std::vector<float>(options.elements));
  formed_ = pending_;
  if (codec_->velocity()) velocity_ = pending_;
  compressor_ = Must(UpdateCompressor::Make({job_.get(), layout_slice_, backend_.get()}));
  update_residual_.assign(options.elements, 0.0f);
  pushed_.assign(options.elements, 0);
  applied_.assign(options.elements, 0);
  plan_ = codec_->InitialPlan();
}

FrameIdentity Cluster::Identity(uint64_t incarnation) const {
  return {static_cast<uint16_t>(layout_slice_->shard),
          layout_slice_->bucket,
          round_,
          incarnation,
          {&kLearningRate, 1},
          incarnation};
}

std::unique_ptr<Accumulator> Cluster::OpenAccumulator() const {
  std::unique_ptr<Accumulator> accumulator = codec_->NewAccumulator();
  accumulator->Open(round_, plan_);
  return accumulator;
}

std::vector<float*> Cluster::RunPointers(uint32_t worker) {
  std::vector<float*> out;
  for (size_t i = 0; i < layout().runs.size(); ++i) out.push_back(pending_[worker].data() + layout().run_begin[i]);
  return out;
}

std::vector<EncodedFrame> Cluster::EncodeAll(const GradientFn& gradient) {
  std::vector<EncodedFrame> frames;
  for (uint32_t w = 0; w < options_.workers; ++w) {
    std::vector<float>& pending = pending_[w];
    const bool carries = CarriesValues(*job_, round_);
    if (carries) {  // else the client pushes the same gradient again in the next round
      std::vector<float> g(options_.elements);
      gradient(w, round_, &g);
      if (const std::optional<VelocityRule> rule = codec_->velocity()) {
        formed_[w] = pending;
        AddVelocityToPending(g, *rule, velocity_[w], pending);
        for (size_t i = 0; i < g.size(); ++i)
          pushed_[i] += static_cast<double>(pending[i]) - static_cast<double>(formed_[w][i]);
      } else {
        for (size_t i = 0; i < g.size(); ++i) pushed_[i] += static_cast<double>(g[i]);
        AddToPending(g, pending, *backend_);
      }
      formed_[w] = pending;
    }
    std::vector<float> shown = pending;
    if (!carries) {
      std::vector<float> g(options_.elements);
      gradient(w, round_ + 1, &g);
      AddToPending(g, shown, *backend_);
    }
    std::vector<float>& memory = carries ? pending : shown;
    const Selection selection = SelectThreshold(*codec_, round_, memory, *backend_);
    std::vector<RunInput> runs;
    for (size_t i = 0; i < layout().runs.size(); ++i) {
      float* at = memory.data() + layout().run_begin[i];
      runs.push_back({at, at, selection});
      if (!velocity_.empty()) runs.back().velocity = velocity_[w].data() + layout().run_begin[i];
    }
    frames.push_back(Must(encoders_[w]->Encode(Identity(1000 + w), plan_, runs)));
    if (carries && !codec_->uses_residual()) std::fill(pending.begin(), pending.end(), 0.0f);
  }
  return frames;
}

RoundResult Cluster::Round(const GradientFn& gradient) {
  RoundResult result = OneRound(gradient);
  if (round_ > 1) Calibrate(gradient);
  return result;
}

RoundResult Cluster::OneRound(const GradientFn& gradient) {
  std::vector<EncodedFrame> frames = EncodeAll(gradient);
  std::unique_ptr<Accumulator> accumulator = OpenAccumulator();
  for (const EncodedFrame& frame : frames) {
    const ParsedFrame parsed = ParseAll(frame);
    std::vector<wire::SegmentHeader> headers(parsed.segments.begin(), parsed.segments.end());
    Must(codec_->CheckComplete(round_, plan_, headers));
  }
  MergeShuffled(frames, random_, accumulator.get());
  UpdateFrame update = Must(accumulator->Finish(Identity(0), options_.workers));
  if (compressor_ != nullptr) {
    const bool keeps = KeepsUpdateResidual(*job_, layout().codec);
    ResidualChange change;
    Must(compressor_->Compress(plan_, keeps ? update_residual_.data() : nullptr, &change, &update));
    if (keeps) change.ApplyTo(update_residual_.data());
  }
  return Close(std::move(frames), std::move(update));
}

RoundResult Cluster::Close(std::vector<EncodedFrame> frames, UpdateFrame update_frame) {
  RoundResult result;
  result.frames = std::move(frames);
  result.update_frame = std::move(update_frame);
  result.update = Must(DecodeUpdate(result.update_frame.chunks, *job_, layout(), plan_));
  const Update& u = result.update;
  result.applied = SumsOf(u, layout());
  for (size_t i = 0; i < applied_.size(); ++i) applied_[i] += result.applied[i];
  if (!u.deferred.empty()) {
    for (uint32_t w = 0; w < options_.workers; ++w) {
      Must(codec_->Return(result.frames[w], &u.deferred, RunPointers(w)));
    }
  }
  plan_ = u.next;
  ++round_;
  return result;
}

void Cluster::Calibrate(const GradientFn& gradient) {
  while (!CarriesValues(*job_, round_)) OneRound(gradient);
}

double Cluster::LargestLoss() const {
  double largest = 0;
  for (size_t i = 0; i < pushed_.size(); ++i) {
    double kept = applied_[i];
    for (const auto& pending : pending_) kept += static_cast<double>(pending[i]);
    kept += static_cast<double>(update_residual_[i]) * options_.workers;
    largest = std::max(largest, std::abs(kept - pushed_[i]));
  }
  return largest;
}

namespace {

template <typename T>
std::vector<T> DenseOf(const Update& update, uint64_t elements) {
  std::vector<T> values(elements);
  update.CopyDense(0, elements, values.data());
  return values;
}

}  // namespace

std::string DifferenceOfDecoded(const Cluster& cluster, const UpdateFrame& frame) {
  if (frame.decoded == nullptr) return "";
  const Update& made = *frame.decoded;
  const Update read = Must(DecodeUpdate(frame.chunks, cluster.job(), cluster.layout(), cluster.plan()));
  if (made.round != read.round) return "round";
  if (made.contributors != read.contributors) return "contributors";
  if (made.skipped != read.skipped || made.replaces != read.replaces) return "kind";
  if (made.nonfinite_rounds != read.nonfinite_rounds) return "nonfinite_rounds";
  if (made.learning_rates != read.learning_rates) return "learning_rates";
  if (made.exponents != read.exponents) return "exponents";
  if (made.norms != read.norms || made.mean_square != read.mean_square) return "norms";
  if (made.deferred != read.deferred) return "deferred";
  const uint64_t elements = cluster.layout().elements;
  if (elements == 0) return "";
  if (made.body != read.body) return "body";
  if (made.positions != read.positions || made.integers != read.integers || made.values != read.values) return "pairs";
  bool same = true;
  if (made.body == Update::Body::kDenseInt) same = DenseOf<int32_t>(made, elements) == DenseOf<int32_t>(read, elements);
  if (made.body == Update::Body::kDenseFloat) same = DenseOf<float>(made, elements) == DenseOf<float>(read, elements);
  return same ? "" : "elements";
}

std::vector<double> SumsOf(const Update& u, const BucketLayout& layout) {
  std::vector<double> sums(layout.elements, 0);
  const double contributors = static_cast<double>(u.contributors);
  if (u.body == Update::Body::kDenseInt) {
    std::vector<int32_t> integers(layout.elements);
    u.CopyDense(0, integers.size(), integers.data());
    for (size_t r = 0; r < layout.runs.size(); ++r) {
      for (uint64_t i = layout.run_begin[r]; i < layout.run_begin[r + 1]; ++i) {
        sums[i] = std::ldexp(static_cast<double>(integers[i]), u.exponents[r]);
      }
    }
  }
  for (size_t k = 0, run = 0; k < u.integers.size(); ++k) {
    while (u.positions[k] >= layout.run_begin[run + 1]) ++run;
    sums[u.positions[k]] = std::ldexp(static_cast<double>(u.integers[k]), u.exponents[run]);
  }
  for (size_t k = 0; k < u.values.size(); ++k) sums[u.positions[k]] = static_cast<double>(u.values[k]) * contributors;
  std::vector<float> means(u.body == Update::Body::kDenseFloat ? layout.elements : 0);
  if (!means.empty()) u.CopyDense(0, means.size(), means.data());
  for (size_t i = 0; i < means.size(); ++i) sums[i] = static_cast<double>(means[i]) * contributors;
  return sums;
}

ParsedFrame ParseAll(const EncodedFrame& frame) {
  ParsedFrame out;
  out.chunks = Must(wire::ParseFrame(frame.chunks));
  for (const wire::Chunk& chunk : out.chunks) {
    out.segments.insert(out.segments.end(), chunk.segments.begin(), chunk.segments.end());
  }
  return out;
}

void MergeShuffled(const std::vector<EncodedFrame>& frames, std::mt19937_64& random, Accumulator* accumulator) {
  std::vector<ParsedFrame> parsed;
  std::vector<wire::Segment> all;
  for (const EncodedFrame& frame : frames) {
    parsed.push_back(ParseAll(frame));
    for (const wire::Segment& s : parsed.back().segments) {
      if (s.type != wire::SegmentType::kLearningRates) all.push_back(s);
    }
  }
  std::shuffle(all.begin(), all.end(), random);
  for (const wire::Segment& s : all) Must(accumulator->Add(s));
}

std::vector<uint8_t> Joined(const std::vector<Bytes>& chunks) {
  std::vector<uint8_t> out;
  for (const Bytes& b : chunks) out.insert(out.end(), b.data(), b.data() + b.size());
  return out;
}

GradientFn DyadicGradient(uint64_t seed, uint64_t elements, double nonzero_fraction, bool clustered) {
  return [=](uint32_t worker, uint64_t round, std::vector<float>* out) {
    const uint64_t key = HashCombine(HashCombine(seed, worker), round);
    const uint64_t keep_below = static_cast<uint64_t>(nonzero_fraction * 4294967296.0);
    // Clustered: all non-zeros lie in one window, a different one each round.
    const uint64_t window =
        std::max<uint64_t>(1, static_cast<uint64_t>(static_cast<double>(elements) * nonzero_fraction));
    const uint64_t start = elements == 0 ? 0 : HashCombine(seed, round) % elements;
    for (uint64_t i = 0; i < elements; ++i) {
      const uint64_t h = HashCombine(key, i);
      const bool there = clustered ? (i + elements - start) % elements < window : (h >> 32) < keep_below;
      const int integer = static_cast<int>(h & 0x7FFF) - 0x4000;
      (*out)[i] = there ? static_cast<float>(integer) * 0x1p-12f : 0.0f;
    }
  };
}

GradientFn GaussianGradient(uint64_t seed, uint64_t elements) {
  return [=](uint32_t worker, uint64_t round, std::vector<float>* out) {
    std::mt19937_64 random(HashCombine(HashCombine(seed, worker), round));
    std::normal_distribution<float> normal(0, 0.01f);
    for (uint64_t i = 0; i < elements; ++i) (*out)[i] = normal(random);
  };
}

}  // namespace gradwire::testing
