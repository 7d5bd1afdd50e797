// Gradients that are given by their rows: what is sent of them, and what comes back, is to the byte that of the same
// gradients given whole, whatever becomes of their frames.
#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/internal/gradients.h"
#include "client/cpp/internal/round_input.h"
#include "client/cpp/internal/tensor_elements.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gradwire::client {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kShardsOfRows = 3;

struct RowsOf {
  std::vector<int64_t> rows;
  std::vector<float> values;
  RowGradient view() const { return {rows, values.data()}; }
  CheckedRows checked() const { return {rows, values.data()}; }
};

// Tables of rows of 6, 5 and 1 elements, whose buckets are cut across rows and have more than one of them.
class RowGradientsTest : public ::testing::Test {
 protected:
  void Prepare(const std::string& codec, v1::NonFinitePolicy policy = v1::NONFINITE_REFUSE,
               v1::PushKind push = v1::PUSH_GRADIENT) {
    v1::JobSpec spec;
    spec.set_name("unit");
    for (const std::pair<uint64_t, uint64_t> shape : {std::pair(200, 6), {40, 5}, {70, 1}}) {
      v1::TensorSpec* const tensor = spec.add_tensors();
      tensor->set_name(absl::StrCat("table", spec.tensors_size()));
      tensor->add_shape(shape.first);
      tensor->add_shape(shape.second);
    }
    spec.mutable_optimizer()->set_kind(push == v1::PUSH_STEP ? v1::OPTIMIZER_STEP : v1::OPTIMIZER_SGD);
    spec.set_push(push);
    if (push == v1::PUSH_DELTA) spec.mutable_step()->set_residual_decay(0.5f);
    spec.set_codec(codec);
    spec.set_nonfinite(policy);
    spec.set_run_elements(64);
    spec.set_bucket_bytes(4 * 448);
    absl::StatusOr<Job> job = Job::Make(spec);
    ASSERT_TRUE(job.ok()) << job.status();
    job_ = std::make_unique<Job>(*std::move(job));
    layout_ = std::make_unique<Layout>(*Layout::Make(*job_, kShardsOfRows));
    ASSERT_GT(layout_->bucket_count(), 2u);
    codecs_.clear();
    for (uint32_t b = 0; b < layout_->bucket_count(); ++b)
      for (uint32_t s = 0; s < kShardsOfRows; ++s)
        codecs_.push_back(*MakeCodec({job_.get(), &layout_->at(b, s), backend_.get()}));
    whole_ = NewStore();
    rows_ = NewStore();
  }
  std::unique_ptr<GradientStore> NewStore() {
    return std::make_unique<GradientStore>(job_.get(), std::vector<const Codec*>(3, codecs_[0].get()),
                                           MakeHostMemory(backend_.get()));
  }
  const BucketLayout& slice(uint32_t i) const { return layout_->at(i / kShardsOfRows, i % kShardsOfRows); }
  uint32_t slices() const { return layout_->bucket_count() * kShardsOfRows; }
  const Tensor& tensor(uint32_t t) const { return job_->tensors()[t]; }

  RowsOf RandomRows(uint32_t t, float scale) {
    RowsOf given;
    for (uint64_t row = 0; row < tensor(t).shape[0]; ++row) {
      if (random_() % 8 != 0) continue;
      given.rows.push_back(static_cast<int64_t>(row));
      for (uint64_t i = 0; i < tensor(t).shape[1]; ++i)
        given.values.push_back(random_() % 4 == 0 ? 0.0f : scale * (static_cast<float>(random_() % 2001) - 1000.0f));
    }
    return given;
  }
  EncodedFrame Encode(GradientStore& store, uint32_t i, uint64_t round) {
    FrameIdentity id;
    id.shard = static_cast<uint16_t>(i % kShardsOfRows);
    id.bucket = i / kShardsOfRows;
    id.round = round;
    id.learning_rates = rates_;
    auto frame = store.Encode(id, codecs_[i]->InitialPlan(), slice(i), store.EncoderOf(*codecs_[i]));
    EXPECT_TRUE(frame.ok()) << frame.status();
    return *std::move(frame);
  }
  // A round of both stores, whose frames are merged; they are the same.
  void SendAlike(uint64_t round) {
    std::vector<std::vector<float>> dense;
    for (uint32_t t = 0; t < 3; ++t) {
      const RowsOf given = RandomRows(t, 0.01f);
      dense.push_back(DenseOf(tensor(t), given.checked()));
      ASSERT_TRUE(whole_->Ingest(t, dense[t].data(), round).ok());
      ASSERT_TRUE(rows_->Ingest(t, given.view(), round).ok());
    }
    for (uint32_t i = 0; i < slices(); ++i) {
      ASSERT_EQ(BytesOf(Encode(*whole_, i, round)), BytesOf(Encode(*rows_, i, round))) << "round " << round;
      whole_->Encoded(slice(i));
      rows_->Encoded(slice(i));
    }
    whole_->EndRound();
    rows_->EndRound();
  }
  static std::vector<uint8_t> BytesOf(const EncodedFrame& frame) {
    std::vector<uint8_t> bytes;
    for (const Bytes& chunk : frame.chunks) bytes.insert(bytes.end(), chunk.span().begin(), chunk.span().end());
    return bytes;
  }
  std::vector<float> Waiting(const GradientStore& store, uint32_t t) const {
    const GradientStore::Kept kept = store.KeptOf(t);
    std::vector<float> values(kept.pending.values.begin(), kept.pending.values.end());
    values.resize(tensor(t).elements);
    return values;
  }

  const std::vector<float> rates_ = {0.1f};
  const std::unique_ptr<kernels::Backend> backend_ = *kernels::MakeBackend("cpu");
  std::mt19937 random_{7};
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::vector<std::unique_ptr<Codec>> codecs_;
  std::unique_ptr<GradientStore> whole_, rows_;
};

struct RowCase {
  v1::NonFinitePolicy policy;
  v1::PushKind push;
};

TEST_F(RowGradientsTest, SendAndGetBackWhatWholeGradientsDo) {
  for (const char* codec :
       {"zen", "zen:values=bf16", "zen:values=fp16", "adaptive", "dense:fp32", "topk:density=0.1"}) {
    for (const auto& [policy, push] :
         {RowCase{v1::NONFINITE_REFUSE, v1::PUSH_GRADIENT}, RowCase{v1::NONFINITE_SKIP, v1::PUSH_GRADIENT},
          RowCase{v1::NONFINITE_REFUSE, v1::PUSH_DELTA}}) {
      SCOPED_TRACE(absl::StrCat(codec, ", policy ", policy, ", push ", push));
      Prepare(codec, policy, push);
      // With what waits, the largest come beyond what a frame takes (2^18; binary16 ends at 65504).
      const float largest = std::string(codec) == "zen:values=fp16" ? 64.0f : 250.0f;
      std::vector<std::pair<uint32_t, std::pair<EncodedFrame, EncodedFrame>>> late;
      for (uint64_t round = 1; round <= 120; ++round) {
        const float scale = round % 3 == 0 ? largest : 0.01f;
        std::vector<RowsOf> given;
        std::vector<std::vector<float>> dense;
        for (uint32_t t = 0; t < 3; ++t) {
          given.push_back(RandomRows(t, scale));
          dense.push_back(DenseOf(tensor(t), given[t].checked()));
        }
        for (uint32_t t = 0; t < 3; ++t) {
          ASSERT_TRUE(whole_->Ingest(t, dense[t].data(), round).ok());
          // Now and then whole gradients come in between.
          const bool whole = random_() % 8 == 0;
          ASSERT_TRUE(
              rows_->Ingest(t, whole ? GivenGradient(dense[t].data()) : GivenGradient(given[t].view()), round).ok());
          whole_->Select(t, round);
          rows_->Select(t, round);
        }
        std::vector<std::pair<EncodedFrame, EncodedFrame>> frames(slices());
        std::vector<bool> encoded(slices());
        for (uint32_t i = 0; i < slices(); ++i) {
          if (random_() % 10 == 0) {
            whole_->Keep(slice(i));
            rows_->Keep(slice(i));
            continue;
          }
          encoded[i] = true;
          frames[i] = {Encode(*whole_, i, round), Encode(*rows_, i, round)};
          ASSERT_EQ(BytesOf(frames[i].first), BytesOf(frames[i].second)) << "round " << round << ", slice " << i;
          whole_->Encoded(slice(i));
          rows_->Encoded(slice(i));
        }
        const auto give_back = [&](uint32_t i, const std::pair<EncodedFrame, EncodedFrame>& frame) {
          ASSERT_TRUE(whole_->Returned(slice(i), *codecs_[i], frame.first).ok());
          ASSERT_TRUE(rows_->Returned(slice(i), *codecs_[i], frame.second).ok());
        };
        const bool skipped = policy == v1::NONFINITE_SKIP && random_() % 6 == 0;
        for (uint32_t i = 0; i < slices(); ++i) {
          if (skipped) {
            whole_->Undo(slice(i));
            rows_->Undo(slice(i));
          } else if (encoded[i] && random_() % 5 == 0) {
            give_back(i, frames[i]);
          } else if (encoded[i] && policy == v1::NONFINITE_REFUSE && random_() % 10 == 0) {
            late.emplace_back(i, std::move(frames[i]));  // as with bounded staleness
          }
        }
        whole_->EndRound();
        rows_->EndRound();
        for (uint32_t t = 0; t < 3; ++t) ASSERT_EQ(Waiting(*whole_, t), Waiting(*rows_, t)) << "round " << round;
        if (round % 2 == 0) {
          for (const auto& [i, frame] : late) give_back(i, frame);
          late.clear();
        }
      }
    }
  }
}

TEST_F(RowGradientsTest, ArePushedAsStepsToo) {
  Prepare("zen", v1::NONFINITE_REFUSE, v1::PUSH_STEP);
  for (uint64_t round = 1; round <= 5; ++round) SendAlike(round);
}

TEST_F(RowGradientsTest, AreOfTheSameBytesWhereACodecSendsAll) {
  Prepare("adaptive");
  std::vector<std::vector<float>> dense(3);
  for (uint32_t t = 0; t < 3; ++t) {
    RowsOf all;
    for (uint64_t row = 0; row < tensor(t).shape[0]; ++row) all.rows.push_back(static_cast<int64_t>(row));
    all.values.assign(tensor(t).elements, 0.25f);
    all.values[tensor(t).elements / 2] = -0.0f;
    dense[t] = all.values;
    ASSERT_TRUE(rows_->Ingest(t, all.view(), 1).ok());
    ASSERT_TRUE(whole_->Ingest(t, dense[t].data(), 1).ok());
  }
  for (uint32_t i = 0; i < slices(); ++i) ASSERT_EQ(BytesOf(Encode(*whole_, i, 1)), BytesOf(Encode(*rows_, i, 1)));
}

TEST_F(RowGradientsTest, FramesWithNothingOfATensorComeBackAsWell) {
  Prepare("zen:values=fp16");
  const std::vector<float> zeros(1200);
  for (uint64_t round = 1; round <= 3; ++round) {
    RowsOf given{{150}, std::vector<float>(6, round == 1 ? 0.0f : 70000.0f)};
    const std::vector<float> dense = DenseOf(tensor(0), given.checked());
    ASSERT_TRUE(rows_->Ingest(0, given.view(), round).ok());
    ASSERT_TRUE(whole_->Ingest(0, dense.data(), round).ok());
    for (uint32_t t = 1; t < 3; ++t) {
      ASSERT_TRUE(rows_->Ingest(t, RowGradient{}, round).ok());
      ASSERT_TRUE(whole_->Ingest(t, zeros.data(), round).ok());
    }
    if (round == 3) break;
    for (uint32_t i = 0; i < slices(); ++i) {
      const EncodedFrame whole = Encode(*whole_, i, round), rows = Encode(*rows_, i, round);
      ASSERT_EQ(BytesOf(whole), BytesOf(rows)) << "round " << round;
      whole_->Encoded(slice(i));
      rows_->Encoded(slice(i));
      ASSERT_TRUE(whole_->Returned(slice(i), *codecs_[i], whole).ok());
      ASSERT_TRUE(rows_->Returned(slice(i), *codecs_[i], rows).ok());
    }
    whole_->EndRound();
    rows_->EndRound();
    for (uint32_t t = 0; t < 3; ++t) ASSERT_EQ(Waiting(*whole_, t), Waiting(*rows_, t)) << "round " << round;
  }
}

TEST_F(RowGradientsTest, RowsThatAreOverwrittenInTheRoundAreRefused) {
  for (const char* codec : {"zen", "dense:fp32"}) {
    Prepare(codec);
    ReadyTensors ready(job_.get());
    RowsOf given{{3, 150}, std::vector<float>(12, 1.0f)};
    ASSERT_TRUE(ready.Note(0, given.view()).ok());
    given.rows = {205, 7};  // of the next batch, before the round has ended
    const absl::Status status = rows_->Ingest(0, given.view(), 1);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("row 205"));
    for (uint32_t i = 0; i < slices(); ++i) rows_->Keep(slice(i));
    rows_->EndRound();
    EXPECT_EQ(Waiting(*rows_, 0), std::vector<float>(1200)) << "nothing of it was taken in";
  }
}

TEST_F(RowGradientsTest, ARestoredCheckpointsResidualIsSentWithThem) {
  Prepare("zen");
  for (GradientStore* store : {whole_.get(), rows_.get()}) {
    const GradientStore::Memory memory = store->MemoryOf(0, true, 0);
    for (size_t i = 0; i < memory.pending.size(); i += 7) memory.pending[i] = static_cast<float>(i);
  }
  for (uint64_t round = 1; round <= 2; ++round) SendAlike(round);
}

TEST_F(RowGradientsTest, ThatAreNotFiniteAreRefusedByElement) {
  Prepare("zen");
  RowsOf given{{3, 150}, std::vector<float>(12, 1.0f)};
  given.values[7] = -std::numeric_limits<float>::infinity();
  ASSERT_TRUE(rows_->Ingest(0, given.view(), 1).code() == absl::StatusCode::kInvalidArgument);
  const std::string told(rows_->Taken(0).message());
  for (const char* part : {"'table1'", "index 901", "-inf", "round 1"}) EXPECT_THAT(told, HasSubstr(part));
  for (uint32_t i = 0; i < slices(); ++i) rows_->Keep(slice(i));
  rows_->EndRound();
  EXPECT_EQ(Waiting(*rows_, 0), std::vector<float>(1200)) << "nothing of it was taken in";
}

TEST_F(RowGradientsTest, ThatAreNotFiniteAreSanitized) {
  Prepare("zen", v1::NONFINITE_SANITIZE);
  RowsOf given{{3, 150}, std::vector<float>(12, 1.0f)};
  given.values[0] = std::numeric_limits<float>::quiet_NaN();
  given.values[11] = 262144.0f;
  RowsOf clean = given;
  clean.values[0] = clean.values[11] = 0;
  const std::vector<float> dense = DenseOf(tensor(0), clean.checked());
  const std::vector<float> nothing(200);
  ASSERT_TRUE(rows_->Ingest(0, given.view(), 1).ok());
  ASSERT_TRUE(whole_->Ingest(0, dense.data(), 1).ok());
  for (uint32_t t = 1; t < 3; ++t) {
    ASSERT_TRUE(rows_->Ingest(t, RowGradient{}, 1).ok());
    ASSERT_TRUE(whole_->Ingest(t, nothing.data(), 1).ok());
  }
  EXPECT_EQ(rows_->sanitized_elements(), 2u);
  for (uint32_t i = 0; i < slices(); ++i) ASSERT_EQ(BytesOf(Encode(*whole_, i, 1)), BytesOf(Encode(*rows_, i, 1)));
}

TEST_F(RowGradientsTest, RowsThatAreNoneAreRefused) {
  Prepare("zen");
  ReadyTensors ready(job_.get());
  const std::vector<float> values(30);
  const auto refused = [&](std::vector<int64_t> rows, const char* why) {
    const absl::Status status = ready.Note(0, RowGradient{rows, values.data()});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("table1"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  refused({-1}, "row -1");
  refused({200}, "rows 0 to 200, exclusive");
  refused({5, 4}, "row 4 of its gradient comes behind row 5");
  refused({5, 5}, "each of them once");
  const std::vector<int64_t> rows = {5};
  EXPECT_THAT(std::string(ready.Note(0, RowGradient{rows, nullptr}).message()), HasSubstr("null pointer"));
  EXPECT_FALSE(ready.Has(0));
  EXPECT_TRUE(ready.Note(0, RowGradient{}).ok()) << "no row at all is a gradient of zeros";
}

TEST(TensorElements, OfOneIndexAreAddedInTheirOrder) {
  const float large = 16777216.0f;  // to which 1 adds nothing
  const TensorElements sums = Summed({{7, large}, {2, 1}, {7, 1}, {7, -large}, {0, 5}, {2, 1}});
  ASSERT_EQ(sums.size(), 3u);
  EXPECT_EQ(sums[0].index, 0u);
  EXPECT_EQ(sums[1].value, 2.0f);
  EXPECT_EQ(sums[2].value, 0.0f);
}

TEST(TensorElements, AreFoundInTheRunsOfASlice) {
  // Runs of 4 elements, every third of a tensor of 120: what lies between belongs to other shards.
  BucketLayout layout;
  layout.run_begin = {0};
  for (uint64_t offset = 4; offset < 120; offset += 12) {
    layout.runs.push_back({0, 4, offset});
    layout.run_begin.push_back(layout.run_begin.back() + 4);
  }
  const std::vector<TensorRuns> tensors = TensorsIn(layout);
  ASSERT_EQ(tensors.size(), 1u);
  for (uint64_t step = 1; step < 60; ++step) {
    for (uint64_t first = 0; first < 20; ++first) {
      TensorElements elements;
      for (uint64_t index = first; index < 120; index += step) elements.push_back({index, 1});
      std::vector<uint64_t> expected, found;
      for (const TensorElement& element : elements)
        if (element.index % 12 / 4 == 1) expected.push_back(element.index);
      ForEachIn(elements, layout, tensors[0], [&](size_t i, size_t run, uint64_t position) {
        EXPECT_EQ(layout.runs[run].offset + position - layout.run_begin[run], elements[i].index);
        found.push_back(elements[i].index);
      });
      ASSERT_EQ(found, expected) << step << " " << first;
    }
  }
}

}  // namespace
}  // namespace gradwire::client
