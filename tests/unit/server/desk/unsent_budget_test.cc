#include "server/desk/unsent_budget.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "common/base/bytes.h"

namespace gradwire {
namespace {

TEST(UnsentBudget, AnAnswerCountsUntilItsLastPieceIsGone) {
  const auto budget = std::make_shared<UnsentBudget>(100);
  auto answer = std::make_shared<const std::vector<uint8_t>>(80);
  const std::weak_ptr<const std::vector<uint8_t>> alive = answer;
  std::vector<Bytes> pieces;
  {
    const auto counted = UnsentBudget::Count(budget, answer, answer->size());
    pieces = {Bytes(counted, answer->data(), 70), Bytes(counted, answer->data() + 70, 10)};
  }
  answer.reset();
  EXPECT_TRUE(budget->CheckRoom(20).ok());
  pieces.erase(pieces.begin());  // the large one
  EXPECT_EQ(budget->bytes(), 80u) << "what is left holds all of it";
  EXPECT_FALSE(alive.expired());
  EXPECT_FALSE(budget->CheckRoom(21).ok());
  pieces.clear();
  EXPECT_EQ(budget->bytes(), 0u);
  EXPECT_TRUE(alive.expired());
}

}  // namespace
}  // namespace gradwire
