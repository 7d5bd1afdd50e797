// See powersgd_codec.h.
#include "common/codec/powersgd/powersgd_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/reductions.h"
#include "common/codec/bits/salts.h"
#include "common/codec/dense/dense_shape.h"
#include "common/codec/frame/coverage.h"
#include "common/codec/frame/frame_header.h"
#include "common/codec/frame/run_pieces.h"
#include "common/codec/grid/grid_limit.h"
#include "common/codec/plan/factor_segments.h"
#include "common/codec/powersgd/arithmetic.h"
#include "common/codec/powersgd/factor_frames.h"
#include "common/codec/powersgd/matrices.h"

namespace gradwire::powersgd {
namespace {

using kernels::Sign;
using wire::FrameWriter;
using wire::Segment;
using wire::SegmentHeader;
using wire::SegmentType;

// Immutable; shared by encoders, accumulators and codec.
struct Shape {
  CodecContext context;
  std::vector<Matrix> matrices;
  uint64_t SizeOfRound(uint64_t round) const { return SizeOf(matrices, FactorSentIn(round)); }
  const BucketLayout& layout() const { return *context.layout; }
};

// The rows of a matrix that lies in runs with memory of their own.
class Rows {
 public:
  Rows(const BucketLayout& layout, const Matrix& matrix) : layout_(layout), matrix_(matrix), row_(matrix.cols) {}

  // Row i, valid until the next call. memory(run): of run 0, 1, ...
  template <typename Memory>
  const float* Get(uint64_t i, Memory memory) {
    const float* whole = nullptr;
    ForEachPiece(i, [&](size_t run, uint64_t offset, uint64_t n, uint64_t at) {
      const float* const piece = memory(run) + offset;
      if (n == matrix_.cols) whole = piece;
      if (whole == nullptr) std::copy_n(piece, n, row_.data() + at);
    });
    return whole != nullptr ? whole : row_.data();
  }

  // Calls fn(run, offset in it, elements, column) for the pieces of row i.
  template <typename Fn>
  void ForEachPiece(uint64_t i, Fn fn) const {
    const uint64_t begin = matrix_.position + i * matrix_.cols;
    ForEachRunPiece(layout_, begin, matrix_.cols, [&](size_t run, uint64_t offset, uint64_t n, uint64_t position) {
      fn(run, offset, n, position - begin);
    });
  }

 private:
  const BucketLayout& layout_;
  const Matrix& matrix_;
  std::vector<float> row_;
};

// memory(run)[...] += sign * P Q^T.
template <typename Memory>
void AddProduct(const BucketLayout& layout, const Matrix& m, const float* p, const float* q, Sign sign, Memory memory) {
  const Rows rows(layout, m);
  std::vector<float> scales(m.rank);
  std::vector<float> product(m.cols);
  for (uint64_t i = 0; i < m.rows; ++i) {
    for (uint32_t k = 0; k < m.rank; ++k) scales[k] = p[k * m.rows + i];
    Combine(scales.data(), m.rank, q, m.cols, m.cols, product.data());
    rows.ForEachPiece(i, [&](size_t run, uint64_t offset, uint64_t n, uint64_t column) {
      AddScaled(product.data() + column, sign == Sign::kAdd ? 1.0f : -1.0f, n, memory(run) + offset);
    });
  }
}

// How an error names a number of a tensor's factor.
std::string FactorValue(uint64_t index) { return absl::StrFormat("value %d of a factor of its gradient", index); }

class PowerSgdEncoder final : public Encoder {
 public:
  explicit PowerSgdEncoder(std::shared_ptr<const Shape> shape) : shape_(std::move(shape)) {}

  absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan,
                                      std::span<const RunInput> runs) override {
    const Factor sent = FactorSentIn(id.round);
    const Factor planned = FactorPlannedAt(id.round);
    if (plan.factors.size() != SizeOf(shape_->matrices, planned)) {
      return absl::FailedPreconditionError(absl::StrFormat("round %d is encoded by %d factor values; the plan has %d",
                                                           id.round, SizeOf(shape_->matrices, planned),
                                                           plan.factors.size()));
    }
    std::vector<float> values(SizeOf(shape_->matrices, sent));
    const float* from = plan.factors.data();
    float* to = values.data();
    for (const Matrix& m : shape_->matrices) {
      if (sent == Factor::kP) {
        MultiplyByQ(id.round, m, from, runs, to);
      } else {
        MultiplyByP(m, from, runs, to);
      }
      Cut(sent, to, SizeOf(m, sent));
      GW_RETURN_IF_ERROR(CheckGrid(m, to, SizeOf(m, sent)));
      from += SizeOf(m, planned);
      to += SizeOf(m, sent);
    }
    if (sent == Factor::kQ) {
      const float* p = plan.factors.data();
      const float* q = values.data();
      for (const Matrix& m : shape_->matrices) {
        AddProduct(shape_->layout(), m, p, q, Sign::kSubtract, [&](size_t run) { return runs[run].pending; });
        p += SizeOf(m, Factor::kP);
        q += SizeOf(m, Factor::kQ);
      }
    }
    wire::FrameWriter writer = BeginPush(id, shape_->layout(), plan);
    AddFactors(values, &writer);
    return FinishEncoded(&writer, plan);
  }

 private:
  // P = M Q. Orthonormal columns of P depend on what the columns of Q span, not on their lengths: with length 1 the
  // sums are of the gradient's size, for which the grid was made.
  void MultiplyByQ(uint64_t round, const Matrix& m, const float* planned, std::span<const RunInput> runs, float* p) {
    std::vector<float> q(planned, planned + SizeOf(m, Factor::kQ));
    NormalizeColumns(q.data(), m.cols, m.rank, SharedSalt(*shape_->context.job, Run{m.tensor, 0, 0}, round));
    Rows rows(shape_->layout(), m);
    for (uint64_t i = 0; i < m.rows; ++i) {
      const float* const row = rows.Get(i, [&](size_t run) { return runs[run].pending; });
      for (uint32_t k = 0; k < m.rank; ++k) p[k * m.rows + i] = Dot(row, q.data() + k * m.cols, m.cols);
    }
  }

  // Q = M^T P.
  void MultiplyByP(const Matrix& m, const float* p, std::span<const RunInput> runs, float* q) {
    Rows rows(shape_->layout(), m);
    for (uint64_t i = 0; i < m.rows; ++i) {
      const float* const row = rows.Get(i, [&](size_t run) { return runs[run].pending; });
      for (uint32_t k = 0; k < m.rank; ++k) AddScaled(row, p[k * m.rows + i], m.cols, q + k * m.cols);
    }
  }

  // Of P only the directions matter, which a smaller scale leaves; what is cut from Q stays in the residual.
  void Cut(Factor sent, float* values, uint64_t n) const {
    const float largest = LargestMagnitude(values, n);
    const SentLimit limit = SentLimitOf(shape_->context, kAllDigits);
    if (largest < limit.from || !std::isfinite(largest)) return;
    const float scale = limit.to / largest;
    for (uint64_t i = 0; i < n; ++i) values[i] = sent == Factor::kP ? values[i] * scale : limit.Cut(values[i]);
  }

  absl::Status CheckGrid(const Matrix& m, const float* values, uint64_t n) const {
    const Job& job = *shape_->context.job;
    const int64_t bad = shape_->context.backend->FindOutOfGrid(reinterpret_cast<const uint8_t*>(values), sizeof(float),
                                                               n, GridLimitBits(job), nullptr);
    return bad < 0 ? absl::OkStatus() : OutOfGrid(job, m.tensor, FactorValue(static_cast<uint64_t>(bad)), values[bad]);
  }

  const std::shared_ptr<const Shape> shape_;
};

// Sums of factors, on the grid of dense:fp32.
class PowerSgdAccumulator final : public Accumulator {
 public:
  explicit PowerSgdAccumulator(std::shared_ptr<const Shape> shape)
      : shape_(std::move(shape)), limit_bits_(GridLimitBits(*shape_->context.job)) {
    sums_.reserve(Size(*shape_));
  }
  static size_t Size(const Shape& shape) {
    return std::max(SizeOf(shape.matrices, Factor::kP), SizeOf(shape.matrices, Factor::kQ));
  }

  void Open(uint64_t round, const RoundPlan&) override {
    round_ = round;
    sums_.assign(shape_->SizeOfRound(round), 0);
  }

  absl::Status Add(const Segment& s) override {
    GW_RETURN_IF_ERROR(CheckFactors(s, sums_.size()));
    const int64_t bad = backend().FindOutOfGrid(s.data, sizeof(float), s.count, limit_bits_, nullptr);
    if (bad >= 0) return OutOfGridAt(s, static_cast<uint64_t>(bad));
    backend().AddFloats(sums_.data() + s.begin, s.data, sizeof(float), s.count, Sign::kAdd, nullptr);
    return absl::OkStatus();
  }

  void Remove(const Segment& s) override {
    backend().AddFloats(sums_.data() + s.begin, s.data, sizeof(float), s.count, Sign::kSubtract, nullptr);
  }

  absl::StatusOr<UpdateFrame> Finish(const FrameIdentity& id, uint32_t contributors) override {
    wire::FrameWriter writer = BeginUpdateFrame(id, shape_->layout(), contributors);
    UpdateFrame update;
    update.next.factors.resize(sums_.size());
    if (contributors != 0) {
      const Factor sent = FactorSentIn(round_);
      float* mean = update.next.factors.data();
      backend().GridToMean(sums_.data(), sums_.size(), contributors, mean, nullptr);
      for (const Matrix& m : shape_->matrices) {
        if (sent == Factor::kP) Orthonormalize(mean, m.rows, m.rank);
        mean += SizeOf(m, sent);
      }
      if (sent == Factor::kQ) update.stats.elements = shape_->layout().elements;
      AddFactors(update.next.factors, &writer);
    }
    update.chunks = writer.Finish();
    return update;
  }

  size_t memory_bytes() const override { return Size(*shape_) * sizeof(int64_t); }

 private:
  kernels::Backend& backend() const { return *shape_->context.backend; }

  absl::Status OutOfGridAt(const Segment& s, uint64_t index) const {
    float value;
    std::memcpy(&value, s.data + sizeof(float) * index, sizeof(value));
    uint64_t at = s.begin + index;
    const Matrix* m = shape_->matrices.data();
    for (const Factor sent = FactorSentIn(round_); at >= SizeOf(*m, sent); ++m) at -= SizeOf(*m, sent);
    return OutOfGrid(*shape_->context.job, m->tensor, FactorValue(at), value);
  }

  const std::shared_ptr<const Shape> shape_;
  const uint32_t limit_bits_;
  std::vector<int64_t> sums_;
  uint64_t round_ = 0;
};

class PowerSgdCodec final : public Codec {
 public:
  explicit PowerSgdCodec(Shape shape) : shape_(std::make_shared<const Shape>(std::move(shape))) {}

  bool uses_residual() const override { return true; }
  bool sparse() const override { return false; }
  double Density(uint64_t) const override { return 1; }
  uint32_t gradient_limit_bits() const override { return GridLimitBits(*shape_->context.job); }
  // All 0: drawn in round 0.
  RoundPlan InitialPlan() const override {
    RoundPlan plan;
    plan.factors.resize(SizeOf(shape_->matrices, FactorPlannedAt(0)));
    return plan;
  }
  std::unique_ptr<Encoder> NewEncoder() const override { return std::make_unique<PowerSgdEncoder>(shape_); }
  std::unique_ptr<Accumulator> NewAccumulator() const override { return std::make_unique<PowerSgdAccumulator>(shape_); }
  size_t accumulator_bytes() const override { return PowerSgdAccumulator::Size(*shape_) * sizeof(int64_t); }

  absl::Status CheckComplete(uint64_t round, const RoundPlan&, std::span<const SegmentHeader> segments) const override {
    return CheckBlocks(shape_->layout(), round, SegmentType::kFactors, shape_->SizeOfRound(round), segments);
  }

  absl::Status Return(const EncodedFrame& frame, const std::vector<uint32_t>* positions,
                      std::span<float* const> residual) const override {
    if (positions != nullptr) return absl::OkStatus();  // nothing is deferred
    GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> chunks, wire::ParseFrame(frame.chunks));
    const uint64_t round = chunks[0].header.round;
    if (FactorSentIn(round) == Factor::kP) return absl::OkStatus();  // it took nothing
    std::vector<float> values;
    for (const wire::Chunk& chunk : chunks) {
      for (const Segment& s : chunk.segments) {
        if (s.type == SegmentType::kFactors) GW_RETURN_IF_ERROR(ReadFactors(s, shape_->SizeOfRound(round), &values));
      }
    }
    const float* p = frame.plan.factors.data();
    const float* q = values.data();
    for (const Matrix& m : shape_->matrices) {
      AddProduct(shape_->layout(), m, p, q, Sign::kAdd, [&](size_t run) { return residual[run]; });
      p += SizeOf(m, Factor::kP);
      q += SizeOf(m, Factor::kQ);
    }
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<const Shape> shape_;
};

}  // namespace

std::unique_ptr<Codec> MakePowerSgdCodec(const CodecContext& context) {
  return std::make_unique<PowerSgdCodec>(Shape{context, MatricesOf(*context.job, *context.layout)});
}

}  // namespace gradwire::powersgd
