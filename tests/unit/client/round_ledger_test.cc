// Every rule of a worker's bookkeeping: what completes a slice, what is sent again, what returns to the residual.
#include "client/cpp/internal/round_ledger.h"

#include <optional>

#include "gtest/gtest.h"

namespace gradwire::client {
namespace {

using Entry = RoundLedger::Entry;
using AckEffect = RoundLedger::AckEffect;
using AnswerEffect = RoundLedger::AnswerEffect;

// Two buckets on two shards, update frames of all slices; slice 3 is (bucket 1, shard 1).
class RoundLedgerTest : public ::testing::Test {
 protected:
  RoundLedgerTest() { Make(); }
  void Make(v1::PullKind parameters = v1::PULL_UNSPECIFIED, bool updates = true) {
    ledger_.emplace(
        RoundLedger::Rules{slices_, std::vector<v1::PullKind>(4, updates ? v1::PULL_UPDATE : v1::PULL_UNSPECIFIED),
                           parameters},
        5);
    actions_ = {};
  }
  AckEffect Ack(Entry entry, v1::PushOutcome outcome, std::optional<bool> abstained = std::nullopt) {
    return ledger_->Acked(entry, outcome, abstained, &actions_);
  }
  AnswerEffect Answer(Entry entry) { return ledger_->Answered(entry, v1::PULL_UPDATE, &actions_); }
  void Sent(Entry entry) { ledger_->Sent(entry, &actions_); }
  void Complete(Entry entry) {
    Sent(entry);
    Ack(entry, v1::PUSH_INCLUDED);
    Answer(entry);
  }

  static BucketLayout Slice(uint32_t bucket, uint32_t shard) {
    BucketLayout slice;
    slice.bucket = slice.job_bucket = bucket;
    slice.shard = shard;
    return slice;
  }

  const std::vector<BucketLayout> slices_ = {Slice(0, 0), Slice(0, 1), Slice(1, 0), Slice(1, 1)};
  std::optional<RoundLedger> ledger_;
  RoundLedger::Actions actions_;
};

TEST_F(RoundLedgerTest, ASliceIsDecodedOnceItWasSentAcknowledgedAndAnsweredInAnyOrder) {
  const Entry entry{5, 3};
  for (int last = 0; last < 3; ++last) {
    Make();
    ledger_->Open();
    if (last != 0) Sent(entry);
    if (last != 1) Ack(entry, v1::PUSH_INCLUDED);
    if (last != 2) Answer(entry);
    EXPECT_TRUE(actions_.decode.empty());
    if (last == 0) Sent(entry);
    if (last == 1) Ack(entry, v1::PUSH_INCLUDED);
    if (last == 2) Answer(entry);
    EXPECT_EQ(actions_.decode, std::vector<Entry>{entry});
    EXPECT_TRUE(ledger_->included(entry));
    Complete(entry);
    EXPECT_EQ(actions_.decode.size(), 1u) << "repeats change nothing";
  }
}

TEST_F(RoundLedgerTest, ParametersAreAwaitedBesideOrInsteadOfUpdates) {
  const Entry entry{5, 0};
  Make(v1::PULL_PARAMS_BF16);
  ledger_->Open();
  EXPECT_EQ(ledger_->Wanted(entry), (std::vector<v1::PullKind>{v1::PULL_UPDATE, v1::PULL_PARAMS_BF16}));
  Complete(entry);
  EXPECT_TRUE(actions_.decode.empty());
  EXPECT_EQ(ledger_->Wanted(entry), std::vector<v1::PullKind>{v1::PULL_PARAMS_BF16});
  EXPECT_EQ(ledger_->Answered(entry, v1::PULL_PARAMS_F32, &actions_), AnswerEffect::kRepeated);
  EXPECT_EQ(ledger_->Answered(entry, v1::PULL_PARAMS_BF16, &actions_), AnswerEffect::kTaken);
  EXPECT_EQ(actions_.decode, std::vector<Entry>{entry});

  Make(v1::PULL_PARAMS_F32, /*updates=*/false);
  ledger_->Open();
  EXPECT_EQ(ledger_->Wanted(entry), std::vector<v1::PullKind>{v1::PULL_PARAMS_F32});
}

TEST_F(RoundLedgerTest, WhatWasNotIncludedReturnsToTheResidual) {
  ledger_->Open();
  const Entry late{5, 0};
  Sent(late);
  EXPECT_EQ(Ack(late, v1::PUSH_NOT_INCLUDED), AckEffect::kNotIncluded);
  EXPECT_FALSE(ledger_->included(late));
  const Entry repeat{5, 1};
  Sent(repeat);
  EXPECT_EQ(Ack(repeat, v1::PUSH_DUPLICATE), AckEffect::kIncluded) << "the shard merged it the first time";
  EXPECT_TRUE(ledger_->included(repeat));
}

TEST_F(RoundLedgerTest, ARefusedFrameIsReplacedByOneThatAbstains) {
  ledger_->Open();
  const Entry entry{5, 2};
  Sent(entry);
  EXPECT_EQ(Ack(entry, v1::PUSH_REFUSED), AckEffect::kRefused);
  EXPECT_EQ(actions_.abstain, std::vector<Entry>{entry});
  ASSERT_TRUE(ledger_->SendAgain(entry));
  ledger_->Abstains(entry);
  Sent(entry);
  EXPECT_EQ(Ack(entry, v1::PUSH_INCLUDED), AckEffect::kIncluded);
  EXPECT_FALSE(ledger_->included(entry)) << "an abstention brings nothing";
  Answer(entry);
  EXPECT_FALSE(ledger_->SendAgain(entry)) << "it has all it needs";
}

TEST_F(RoundLedgerTest, ADamagedRepeatOfAMergedFrameLeavesItMerged) {
  const Entry entry{5, 2};
  ledger_->Open();
  Sent(entry);  // merged, but the acknowledgement was lost; sent again, and damaged on the way
  EXPECT_EQ(Ack(entry, v1::PUSH_REFUSED), AckEffect::kRefused);
  ledger_->Abstains(entry);
  EXPECT_EQ(Ack(entry, v1::PUSH_DUPLICATE), AckEffect::kIncluded);
  Answer(entry);
  EXPECT_TRUE(ledger_->included(entry));
}

// Behind a break an encoder and what sends again may both send it.
TEST_F(RoundLedgerTest, AFrameThatCameTwiceAndWasRefusedOnceIsMerged) {
  const Entry entry{5, 2};
  for (const bool abstained_meanwhile : {false, true}) {
    Make();
    ledger_->Open();
    Sent(entry);
    EXPECT_EQ(Ack(entry, v1::PUSH_REFUSED, false), AckEffect::kRefused);
    if (abstained_meanwhile) {
      ASSERT_TRUE(ledger_->SendAgain(entry));
      ledger_->Abstains(entry);
      Sent(entry);
    }
    EXPECT_EQ(Ack(entry, v1::PUSH_INCLUDED, false), AckEffect::kIncluded);
    EXPECT_TRUE(ledger_->included(entry)) << "else it would be in the mean and, once more, in the residual";
  }
}

TEST_F(RoundLedgerTest, AFrameThatCameTwiceAndWasRefusedTwiceAbstainsOnce) {
  const Entry entry{5, 2};
  ledger_->Open();
  Sent(entry);
  EXPECT_EQ(Ack(entry, v1::PUSH_REFUSED, false), AckEffect::kRefused);
  EXPECT_EQ(Ack(entry, v1::PUSH_REFUSED, false), AckEffect::kIgnored);
  EXPECT_EQ(actions_.abstain, std::vector<Entry>{entry});
  ASSERT_TRUE(ledger_->SendAgain(entry));
  ledger_->Abstains(entry);
  Sent(entry);
  EXPECT_EQ(Ack(entry, v1::PUSH_INCLUDED, true), AckEffect::kIncluded);
  EXPECT_FALSE(ledger_->included(entry));
}

TEST_F(RoundLedgerTest, ARefusedAbstentionLosesTheRound) {
  ledger_->Open();
  ledger_->Abstains({5, 2});
  Sent({5, 2});
  EXPECT_EQ(Ack({5, 2}, v1::PUSH_REFUSED), AckEffect::kLost);
}

TEST_F(RoundLedgerTest, AfterABreakGoesAgainWhatIsNotCompleteOfThatShard) {
  ledger_->Open();
  Complete({5, 1});
  Sent({5, 3});
  Ack({5, 3}, v1::PUSH_INCLUDED);
  Sent({5, 2});
  EXPECT_EQ(ledger_->Unanswered(1), (std::vector<Entry>{{5, 3}}));
  EXPECT_EQ(ledger_->Unanswered(0), (std::vector<Entry>{{5, 2}})) << "slice 0 was not sent yet";
  ASSERT_TRUE(ledger_->SendAgain({5, 3}));
  EXPECT_FALSE(ledger_->included({5, 3})) << "judged anew";
  Answer({5, 3});
  Ack({5, 3}, v1::PUSH_DUPLICATE);
  EXPECT_EQ(actions_.decode.size(), 1u) << "its bytes are in use until it was sent";
  Sent({5, 3});
  EXPECT_EQ(actions_.decode.back(), (Entry{5, 3}));
}

TEST_F(RoundLedgerTest, SeveralRoundsMayBeOpenAndCloseInOrder) {
  EXPECT_FALSE(ledger_->open());
  EXPECT_EQ(ledger_->round(), 5u);
  ledger_->Open();
  ledger_->Open();
  EXPECT_TRUE(ledger_->IsOpen(6));
  EXPECT_FALSE(ledger_->IsOpen(7));
  Sent({6, 0});
  Sent({5, 0});
  EXPECT_EQ(ledger_->Unanswered(0), (std::vector<Entry>{{5, 0}, {6, 0}})) << "oldest first";
  for (uint32_t slice = 0; slice < 4; ++slice) {
    Complete({5, slice});
    EXPECT_FALSE(ledger_->AllSettled(5));
    ledger_->Settled({5, slice});
  }
  EXPECT_TRUE(ledger_->AllSettled(5));
  EXPECT_FALSE(ledger_->BucketSettled(0)) << "round 6";
  ledger_->Close();
  EXPECT_EQ(ledger_->round(), 6u);
  EXPECT_EQ(ledger_->Unanswered(0), (std::vector<Entry>{{6, 0}}));
  EXPECT_EQ(ledger_->settled(6), 0u);
}

TEST_F(RoundLedgerTest, UpdatesOfASliceAreAppliedInOrderAndNotBesideItsEncoder) {
  ledger_->Open();
  ledger_->Open();
  Complete({6, 0});
  EXPECT_FALSE(ledger_->MayApply({6, 0})) << "round 5 is not settled";
  Sent({5, 0});
  EXPECT_TRUE(ledger_->MayApply({5, 0}));
  ledger_->Settled({5, 0});
  EXPECT_TRUE(ledger_->MayApply({6, 0}));
  Sent({5, 1});
  EXPECT_FALSE(ledger_->MayApply({5, 1})) << "the values of round 6 are being encoded";
  Sent({6, 1});
  EXPECT_TRUE(ledger_->MayApply({5, 1}));
  EXPECT_FALSE(ledger_->AllSent(6));
  Sent({6, 2});
  Sent({6, 3});
  EXPECT_TRUE(ledger_->AllSent(6));
  EXPECT_TRUE(ledger_->AllSent(4)) << "it is over";
}

TEST_F(RoundLedgerTest, TheVersionIsThatOfTheSettledRounds) {
  for (int i = 0; i < 3; ++i) ledger_->Open();
  EXPECT_EQ(ledger_->next(), 8u);
  for (const uint64_t round : {5u, 7u}) {
    for (uint32_t slice = 0; slice < 4; ++slice) {
      Complete({round, slice});
      ledger_->Settled({round, slice});
    }
  }
  EXPECT_EQ(ledger_->version(), 6u);
  EXPECT_FALSE(ledger_->AllSettled());
  for (uint32_t slice = 0; slice < 4; ++slice) {
    Complete({6, slice});
    ledger_->Settled({6, slice});
  }
  EXPECT_EQ(ledger_->version(), 8u);
  EXPECT_TRUE(ledger_->AllSettled());
}

TEST_F(RoundLedgerTest, ABucketIsNamedForEveryVersionThatWasSeen) {
  for (int i = 0; i < 3; ++i) ledger_->Open();
  Answer({5, 0});
  Answer({6, 0});
  Answer({7, 2});  // there can be no such version without those before it
  Answer({6, 1});
  EXPECT_EQ(ledger_->SeenBuckets(0), (std::vector<uint32_t>{0, 0, 1, 1, 1}));
  EXPECT_EQ(ledger_->SeenBuckets(1), (std::vector<uint32_t>{0, 0}));
}

TEST_F(RoundLedgerTest, WhatIsGoneIsRememberedUntilTheWorkerHasCaughtUp) {
  ledger_->Open();
  ledger_->Open();
  for (uint32_t slice = 0; slice < 4; ++slice) {
    Sent({5, slice});
    Ack({5, slice}, v1::PUSH_NOT_INCLUDED);
    ledger_->Gone({5, slice}, v1::PULL_UPDATE, &actions_);
    ledger_->Settled({5, slice});
  }
  ledger_->Close();
  EXPECT_TRUE(ledger_->AnyGone());
  EXPECT_TRUE(ledger_->Behind());
  ledger_->MoveTo(9);
  EXPECT_FALSE(ledger_->Behind());
}

TEST_F(RoundLedgerTest, WhatBelongsToNoOpenRoundChangesNothing) {
  EXPECT_EQ(Ack({5, 0}, v1::PUSH_INCLUDED), AckEffect::kIgnored);
  EXPECT_EQ(Answer({5, 0}), AnswerEffect::kUnexpected);
  ledger_->Open();
  EXPECT_EQ(Ack({4, 0}, v1::PUSH_INCLUDED), AckEffect::kIgnored);
  EXPECT_EQ(Ack({5, 4}, v1::PUSH_INCLUDED), AckEffect::kIgnored) << "there is no slice 4";
  EXPECT_EQ(Answer({6, 0}), AnswerEffect::kUnexpected);
  EXPECT_FALSE(ledger_->SendAgain({4, 0}));
  EXPECT_FALSE(ledger_->BucketAcked(0));
  Complete({5, 0});
  Complete({5, 1});
  EXPECT_TRUE(ledger_->BucketAcked(0));
  EXPECT_FALSE(ledger_->BucketAcked(1));
}

TEST_F(RoundLedgerTest, WhereParametersAreGoneTheUpdateSaysWhetherTheRoundWasSkipped) {
  const Entry entry{5, 3};
  for (const bool kept : {true, false}) {
    Make();
    ledger_.emplace(RoundLedger::Rules{slices_, std::vector<v1::PullKind>(4, v1::PULL_UNSPECIFIED), v1::PULL_PARAMS_F32,
                                       /*skips=*/true},
                    5);
    ledger_->Open();
    Sent(entry);
    Ack(entry, v1::PUSH_INCLUDED);
    EXPECT_EQ(ledger_->Gone(entry, v1::PULL_PARAMS_F32, &actions_), AnswerEffect::kTaken);
    EXPECT_EQ(actions_.ask, std::vector<Entry>{entry});
    EXPECT_TRUE(actions_.decode.empty());
    EXPECT_EQ(ledger_->Wanted(entry), std::vector<v1::PullKind>{v1::PULL_UPDATE}) << "after a break as well";
    kept ? Answer(entry) : ledger_->Gone(entry, v1::PULL_UPDATE, &actions_);
    EXPECT_EQ(actions_.decode, std::vector<Entry>{entry});
    EXPECT_EQ(actions_.ask.size(), 1u);
    EXPECT_EQ(ledger_->update_gone(entry), !kept);
  }
}

TEST_F(RoundLedgerTest, WhatIsGoneIsSettledWithoutItAndSaysThatTheWorkerIsBehind) {
  ledger_->Open();
  const Entry entry{5, 1};
  Sent(entry);
  EXPECT_EQ(Ack(entry, v1::PUSH_NOT_INCLUDED), AckEffect::kNotIncluded);
  EXPECT_FALSE(ledger_->Behind());
  EXPECT_EQ(ledger_->Gone(entry, v1::PULL_UPDATE, &actions_), AnswerEffect::kTaken);
  EXPECT_EQ(actions_.decode, std::vector<Entry>{entry});
  EXPECT_TRUE(ledger_->update_gone(entry));
  EXPECT_TRUE(ledger_->Behind());
  EXPECT_EQ(ledger_->Gone(entry, v1::PULL_UPDATE, &actions_), AnswerEffect::kRepeated);
  ledger_->MoveTo(9);
  EXPECT_FALSE(ledger_->open());
  EXPECT_EQ(ledger_->round(), 9u);
  ledger_->Open();
  EXPECT_FALSE(ledger_->Behind());
}

TEST_F(RoundLedgerTest, AWorkerIsBehindWhereTheNextRoundIsOverToo) {
  ledger_->Open();
  ledger_->Heard(6);
  EXPECT_FALSE(ledger_->Behind());
  ledger_->Heard(7);
  ledger_->Heard(6);
  EXPECT_TRUE(ledger_->Behind());
  ledger_->MoveTo(7);
  ledger_->Open();
  EXPECT_FALSE(ledger_->Behind());
  ledger_->Dropped();
  EXPECT_TRUE(ledger_->Behind());
}

// A slice whose means are not wanted asks for the plan, also where parameters would have been gone.
TEST_F(RoundLedgerTest, AsksForPlansWhereNothingElseIsWanted) {
  RoundLedger ledger({slices_, {v1::PULL_UPDATE, v1::PULL_UPDATE, v1::PULL_PLAN, v1::PULL_PLAN}}, 1);
  ledger.Open();
  RoundLedger::Actions actions;
  for (uint32_t slice = 0; slice < 4; ++slice) {
    const RoundLedger::Entry entry{1, slice};
    const v1::PullKind kind = slice < 2 ? v1::PULL_UPDATE : v1::PULL_PLAN;
    EXPECT_EQ(ledger.Wanted(entry), std::vector<v1::PullKind>{kind});
    ledger.Sent(entry, &actions);
    EXPECT_EQ(ledger.Acked(entry, v1::PUSH_INCLUDED, false, &actions), RoundLedger::AckEffect::kIncluded);
    EXPECT_EQ(actions.decode.size(), slice);
    EXPECT_EQ(ledger.Answered(entry, kind, &actions), RoundLedger::AnswerEffect::kTaken);
    EXPECT_EQ(ledger.Answered(entry, kind, &actions), RoundLedger::AnswerEffect::kRepeated);
    EXPECT_EQ(actions.decode.size(), slice + 1);
  }
}

}  // namespace
}  // namespace gradwire::client
