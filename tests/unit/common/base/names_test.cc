// What strangers call themselves, and how it is shown.
#include "common/base/names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gradwire {
namespace {

using testing::HasSubstr;

TEST(Names, OfJobsAndWorkersAreNamesOfFiles) {
  EXPECT_TRUE(IsName("lm-7.large_2"));
  EXPECT_TRUE(IsName(std::string(128, 'a')));
  for (const char* wrong : {"", "a b", "a/b", "a\nb", "\xc3\xa4", "a\x7f"}) EXPECT_FALSE(IsName(wrong)) << wrong;
  EXPECT_FALSE(IsName(std::string(129, 'a')));
}

TEST(Names, OfServersAreOneWord) {
  EXPECT_TRUE(IsServerName("host-a,grpc://0.0.0.0:7070,unix:///run/g.sock"));
  EXPECT_TRUE(IsServerName(std::string(512, 'a')));
  for (const std::string& wrong : {std::string(), std::string(513, 'a'), std::string("a b"), std::string("a\nb"),
                                   std::string("a\x1b[2J"), std::string("\xc3\xa4"), std::string("a\0b", 3)}) {
    EXPECT_FALSE(IsServerName(wrong)) << wrong;
  }
  EXPECT_EQ(CheckServerName("its name", "a"), absl::OkStatus());
  EXPECT_THAT(std::string(CheckServerName("its name", "a\nb").message()), HasSubstr("its name is 'a\\nb' (3 bytes)"));
}

TEST(Names, PlainTextIsUtf8ThatIsShownAsItIs) {
  EXPECT_TRUE(IsPlainText("transformer.h.0.attn"));
  EXPECT_TRUE(IsPlainText("\xc3\xa4 \xe6\x97\xa5 \xf0\x9f\x99\x82"));
  EXPECT_TRUE(IsPlainText(""));
  for (const char* wrong :
       {"a\nb", "\x1b[31m", "\x7f", "\xc2\x85" /* next line */, "\xe2\x80\xa8" /* line separator */,
        "\xe2\x80\xae" /* right to left */, "\xe2\x81\xa6" /* isolate */, "\xef\xbb\xbf" /* byte order mark */,
        "\x80" /* no lead */, "\xc3" /* cut */, "\xc0\x8a" /* too long a form of \n */, "\xed\xa0\x80" /* surrogate */,
        "\xf5\x80\x80\x80" /* beyond Unicode */}) {
    EXPECT_FALSE(IsPlainText(wrong)) << Printable(wrong);
  }
}

TEST(Names, PrintableEscapesTheRestAndCuts) {
  EXPECT_EQ(Printable("a\xc3\xa4"), "a\xc3\xa4");
  EXPECT_EQ(Printable("a\nb\tc\r\x1b[2J\x7f\xff"), "a\\nb\\tc\\r\\x1b[2J\\x7f\\xff");
  EXPECT_EQ(Printable("\xe2\x80\xae"), "\\xe2\\x80\\xae");
  EXPECT_EQ(Printable(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(Printable("abcdef", 3), "abc...");
  EXPECT_EQ(Printable("ab\n", 3), "ab...") << "an escape is not cut";
  EXPECT_EQ(Printable("abc", 3), "abc");
  EXPECT_LE(Printable(std::string(1 << 20, '\n')).size(), kMaxShownBytes + 3);
}

}  // namespace
}  // namespace gradwire
