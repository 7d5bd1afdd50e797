#include "common/base/failpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <set>
#include <string>

namespace gradwire::failpoint {
namespace {

using testing::HasSubstr;
using testing::KilledBySignal;

void ComeTwice() {
  GW_FAILPOINT("journal.sync.before");
  GW_FAILPOINT("journal.sync.after");
  GW_FAILPOINT("journal.sync.before");
}

// In a process of its own.
[[noreturn]] void RunArmed(const char* spec) {
  if (!Arm(spec).ok()) _exit(2);
  ComeTwice();
  _exit(0);
}

TEST(Failpoint, KillsTheProcessAtTheHitThatWasAskedFor) {
  EXPECT_EXIT(RunArmed("journal.sync.before"), KilledBySignal(SIGKILL), "");
  EXPECT_EXIT(RunArmed("journal.sync.before:2"), KilledBySignal(SIGKILL), "");
  EXPECT_EXIT(RunArmed("journal.sync.before:3"), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(RunArmed("journal.record.torn"), testing::ExitedWithCode(0), "");
}

TEST(Failpoint, DoesNothingWhereNoneIsArmed) { ComeTwice(); }

TEST(Failpoint, UnknownNamesAreRefusedWithTheKnownOnes) {
  EXPECT_THAT(std::string(Arm("journal.sink.before").message()),
              AllOf(HasSubstr("'journal.sink.before'"), HasSubstr("journal.sync.before, journal.sync.after")));
  EXPECT_THAT(std::string(Arm("journal.sync.before:").message()), HasSubstr("a number from 1 on"));
  EXPECT_FALSE(Arm("journal.sync.before:0").ok());
  EXPECT_TRUE(Arm("").ok()) << "the variable is not set";
  EXPECT_EQ(armed, kNone);
}

TEST(Failpoint, NamesAreUnique) {
  EXPECT_EQ(std::set<std::string_view>(std::begin(kNames), std::end(kNames)).size(), std::size(kNames));
}

}  // namespace
}  // namespace gradwire::failpoint
