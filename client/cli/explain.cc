// `gradwire codec explain`: a codec spec in words. See commands.h.
#include <algorithm>
#include <cmath>
#include <variant>

#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "common/base/status_macros.h"
#include "common/job/codec_spec.h"

namespace gradwire::cli {
namespace {

struct Explanation {
  std::string text;
  double push_bytes = 0;  // per step, of one worker, about
};

constexpr double kPeelingLoad = 0.74;  // non-zeros per cell that a sketch still decodes

Explanation Explain(const DenseSpec& spec, uint64_t elements) {
  const double n = static_cast<double>(elements);
  switch (spec.values) {
    case DenseSpec::Values::kFp32:
      return {"  values=fp32    every element as it is; no residual\n", 4 * n};
    case DenseSpec::Values::kBf16:
      return {"  values=bf16    every element rounded to bfloat16; the rest goes to the residual\n", 2 * n};
    case DenseSpec::Values::kFixed32:
      return {"  values=fixed32 32-bit integers with one exponent per run; the rest goes to the residual\n", 4 * n};
    case DenseSpec::Values::kFixed16:
      return {"  values=fixed16 16-bit integers with one exponent per run; the rest goes to the residual\n", 2 * n};
  }
  return {};
}

Explanation Explain(const TagcSpec& spec, uint64_t elements) {
  Explanation e;
  e.text += absl::StrFormat(
      "  density=%g  of each tensor, the largest %g %% of the elements are sent; the others wait in "
      "the residual\n",
      spec.density, 100 * spec.density);
  e.text +=
      spec.cell_bits == 0
          ? "  cells=auto    bits that an integer of the sums has, chosen by the job's max_workers so that it cannot "
            "overflow\n"
          : absl::StrFormat("  cells=%d      bits that an integer of the sums has; more workers need more\n",
                            spec.cell_bits);
  const bool sketch = spec.form == TagcSpec::Form::kSketch;
  e.text +=
      sketch ? "  form=sketch   an index and a sketch, which can be merged undecoded; it grows with the workers\n"
      : spec.form == TagcSpec::Form::kList
          ? "  form=list     positions and integers, as many bytes whatever the workers; shards take nothing else\n"
          : "  form=auto     positions and integers, as many bytes whatever the workers; shards take sketches, too\n";
  e.text += spec.warmup_rounds == 0
                ? "  warmup_rounds=0  the density is the same from the first round on\n"
                : absl::StrFormat("  warmup_rounds=%d  the density falls from %g to %g over so many rounds\n",
                                  spec.warmup_rounds, spec.warmup_density, spec.density);
  e.text += absl::StrFormat(
      "  slack=%g      cells of a sketch relative to what decoding needs; below 1, its elements are deferred a round\n",
      spec.slack);
  const double chosen = spec.density * static_cast<double>(elements);
  const double p = spec.density;
  const double entropy_bits =
      p >= 1 ? 0 : static_cast<double>(elements) * -(p * std::log2(p) + (1 - p) * std::log2(1 - p));
  const double cell_bits = spec.cell_bits == 0 ? 16 : spec.cell_bits;
  e.push_bytes = entropy_bits / 8 + chosen * (sketch ? spec.slack / kPeelingLoad : 1) * cell_bits / 8;
  return e;
}

Explanation Explain(const QuantizedSpec& spec, uint64_t elements) {
  using Scheme = QuantizedSpec::Scheme;
  constexpr double kRun = 4096;  // elements that share a scale, unless the job says otherwise
  const double n = static_cast<double>(elements);
  const double scales = std::ceil(n / kRun) * 4;
  const std::string norm = spec.norm == QuantizedSpec::Norm::kMax ? "largest magnitude" : "Euclidean norm";
  switch (spec.scheme) {
    case Scheme::kFp16:
      return {"  every element rounded to binary16; the rest goes to the residual\n", 2 * n};
    case Scheme::kOneBit:
      return {"  the sign of each element, and per run the mean of either sign; the rest goes to the residual\n",
              n / 8 + 2 * scales};
    case Scheme::kSignSgd:
      return {"  the sign of each element, and nothing else: the magnitude of a step is the learning rate\n", n / 8};
    case Scheme::kSigNum:
      return {absl::StrFormat("  momentum=%g  the sign of the momentum that each worker keeps of its gradients\n",
                              spec.momentum),
              n / 8};
    case Scheme::kEfSignSgd:
      return {"  the sign of each element times the mean magnitude of its run; the rest goes to the residual\n",
              n / 8 + scales};
    case Scheme::kTernGrad:
      return {spec.clip == 0
                  ? "  clip=0  each element becomes 0 or the largest magnitude of its run, by chance; unbiased\n"
                  : absl::StrFormat("  clip=%g  each element becomes 0 or the largest magnitude of its run, by "
                                    "chance, after clipping at so many standard deviations\n",
                                    spec.clip),
              n / 5 + scales};
    case Scheme::kQsgd:
    case Scheme::kLinear:
      return {absl::StrFormat(
                  "  bits=%d  each element becomes one of %d even levels of its run's %s, by chance; unbiased\n",
                  spec.bits, (1 << (spec.bits - 1)) - 1, norm),
              n * spec.bits / 8 + scales};
    case Scheme::kNatural:
      return {absl::StrFormat("  bits=%d  each element becomes one of %d powers of two below its run's %s, by chance; "
                              "unbiased\n",
                              spec.bits, (1 << (spec.bits - 1)) - 1, norm),
              n * spec.bits / 8 + scales};
  }
  return {};
}

Explanation Explain(const SparseSpec& spec, uint64_t elements) {
  Explanation e;
  const double n = static_cast<double>(elements);
  const bool all =
      spec.choice == SparseSpec::Choice::kNonZero || spec.choice == SparseSpec::Choice::kAdaptive;  // that are not 0
  const double p = all ? 0.01 : spec.density;
  double index_bits = p >= 1 ? 0 : n * -(p * std::log2(p) + (1 - p) * std::log2(1 - p));
  switch (spec.choice) {
    case SparseSpec::Choice::kTopK:
    case SparseSpec::Choice::kDgc:
      e.text = absl::StrFormat(
          "  density=%g  of each tensor, the largest %g %% of the elements; the others wait in the "
          "residual\n",
          p, 100 * p);
      if (spec.warmup_rounds != 0) {
        e.text += absl::StrFormat("  warmup_rounds=%d  the density falls from %g to %g over so many rounds\n",
                                  spec.warmup_rounds, spec.warmup_density, p);
      }
      if (spec.choice != SparseSpec::Choice::kDgc) break;
      e.text += absl::StrFormat(
          "  momentum=%g  of a velocity that each worker adds to its residual, and forgets where it was sent; the "
          "optimizer has none then\n",
          spec.momentum);
      e.text += spec.clip == 0 ? "  clip=0  gradients are taken in as they are\n"
                               : absl::StrFormat(
                                     "  clip=%g  a tensor's gradient is scaled where its norm is above so "
                                     "much divided by the square root of max_workers\n",
                                     spec.clip);
      break;
    case SparseSpec::Choice::kThreshold:
      e.text = absl::StrFormat(
          "  value=%g  elements of this magnitude and above; the others wait in the residual. How "
          "many that are depends on the gradients: bytes below are for 1 %% of them\n",
          spec.threshold);
      break;
    case SparseSpec::Choice::kRandomK:
      e.text = absl::StrFormat(
          "  density=%g  the same random %g %% of the elements from every worker: positions need no "
          "bytes; the others wait in the residual\n",
          p, 100 * p);
      index_bits = 0;
      break;
    case SparseSpec::Choice::kNonZero: {
      using Index = SparseSpec::Index;
      const char* const index = spec.index == Index::kSmallest      ? "index=smallest  coordinates, gaps or a bitmap"
                                : spec.index == Index::kAuto        ? "index=auto  32-bit coordinates or a bitmap"
                                : spec.index == Index::kCoordinates ? "index=coo   32-bit coordinates"
                                                                    : "index=bitmap  one bit per element";
      e.text = absl::StrFormat(
          "  every element that is not 0, for gradients that are sparse by nature (embeddings); no residual. How many "
          "that are depends on the gradients: bytes below are for 1 %% of them\n"
          "  %s, for pushes and updates\n"
          "  run=%d      elements that are dealt to a shard as one: fewer balance the shards better, and take more "
          "memory for the shard map\n",
          index, spec.run_elements);
      if (spec.index == Index::kAuto || spec.index == Index::kCoordinates) index_bits = 32 * n * p;
      if (spec.index == Index::kBitmap) index_bits = n;
      break;
    }
    case SparseSpec::Choice::kAdaptive:
      e.text = absl::StrFormat(
          "  every element that is not 0, without loss: as positions and values where that takes fewer bytes, else "
          "all elements as they are; the worker decides for its push and the shard for the update, in each round and "
          "bucket. Bytes below are for 1 %% of them; at most they are those of float32\n"
          "  run=%d      elements that are dealt to a shard as one: fewer balance the shards better, and take more "
          "memory for the shard map\n",
          spec.run_elements);
      break;
  }
  constexpr double kBits[] = {32, 16, 16, 8, 4};
  const double bits = kBits[static_cast<int>(spec.values)];
  e.text += absl::StrFormat("  values in %d bits each%s\n", static_cast<int>(bits),
                            bits == 32 ? ""
                            : spec.choice == SparseSpec::Choice::kNonZero
                                ? ", rounded to nearest"
                                : "; what rounding takes away waits in the residual");
  e.push_bytes = (index_bits + n * p * bits) / 8;
  return e;
}

Explanation Explain(const HomomorphicSpec& spec, uint64_t elements) {
  const double n = static_cast<double>(elements);
  const double bytes = n * spec.bits / 8 + std::ceil(n / 4096);  // and a range per run
  if (spec.scheme == HomomorphicSpec::Scheme::kThc) {
    return {absl::StrFormat("  bits=%d  each run is rotated at random, and each number becomes one of %d table values "
                            "from 0 to %d, by chance; the range leaves out %g %% of normal numbers; the rest goes to "
                            "the residual\n",
                            spec.bits, 1 << spec.bits, spec.granularity, 100 * spec.p),
            bytes};
  }
  const bool nearest = spec.rounding == HomomorphicSpec::Rounding::kNearest;
  return {absl::StrFormat("  bits=%d  each element becomes one of %d even levels of its run's range, %s\n", spec.bits,
                          (1 << spec.bits) - 1,
                          nearest ? "the nearest; the rest goes to the residual"
                                  : "by chance; unbiased, and what lies beyond the range goes to the residual"),
          bytes};
}

Explanation Explain(const PowerSgdSpec& spec, uint64_t elements) {
  const double side = std::sqrt(static_cast<double>(elements));
  return {
      absl::StrFormat("  rank=%d  a matrix travels as two factors of so many columns, summed over the workers in two "
                      "rounds, the second of which starts from the mean of the first; the rest goes to the residual. "
                      "Vectors, and matrices that it would not make smaller, travel as they are. A tensor lies on one "
                      "shard as a whole. Bytes below are for a square matrix\n",
                      spec.rank),
      4 * std::min(2 * side * spec.rank, static_cast<double>(elements))};
}

}  // namespace

absl::Status ExplainCodec(const std::string& text, uint64_t elements, bool json, std::ostream& out) {
  GW_ASSIGN_OR_RETURN(const CodecSpec spec, ParseCodecSpec(text));
  const Explanation e = std::visit([elements](const auto& s) { return Explain(s, elements); }, spec);
  const double dense_bytes = 4.0 * static_cast<double>(elements);
  if (json) {
    out << absl::StrFormat("{\"codec\":%s,\"elements\":%d,\"push_bytes_about\":%.0f,\"float32_bytes\":%.0f}\n",
                           Quoted(ToString(spec)), elements, e.push_bytes, dense_bytes);
    return absl::OkStatus();
  }
  out << ToString(spec) << "\n" << e.text;
  if (const auto* const tagc = std::get_if<TagcSpec>(&spec); tagc != nullptr) {
    out << (tagc->form == TagcSpec::Form::kSketch ? "  Workers' frames are merged without decoding them; what cannot "
                                                    "be decoded is deferred, never estimated.\n"
                                                  : "  Workers' lists are added as integers; nothing is deferred.\n");
  }
  if (std::holds_alternative<HomomorphicSpec>(spec)) {
    out << "  Workers agree on the range of each run a round ahead, so that frames are merged as integers.\n";
  }
  out << absl::StrFormat("  About %s per worker and step for %d elements (float32: %s, %.1f times as much).\n",
                         HumanBytes(e.push_bytes), elements, HumanBytes(dense_bytes),
                         e.push_bytes > 0 ? dense_bytes / e.push_bytes : 0.0);
  return absl::OkStatus();
}

}  // namespace gradwire::cli
