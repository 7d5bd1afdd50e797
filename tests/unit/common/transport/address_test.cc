// Parsing of transport addresses.
#include "common/transport/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/transport/transport.h"

namespace gradwire::transport {
namespace {

using ::testing::HasSubstr;

TEST(Address, RoundTrips) {
  for (const char* text :
       {"grpc://localhost:7070", "grpc://0.0.0.0:0", "grpc://[::1]:65535", "inproc://shard-0",
        "unix:///run/gradwire.sock", "grpc://shard-0.gradwire.svc:1", "tcp://localhost:7070", "tcp://[::1]:1"}) {
    auto address = ParseAddress(text);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->ToString(), text);
  }
}

TEST(Address, SplitsItsParts) {
  auto address = ParseAddress("grpc://[fe80::1]:80");
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(address->scheme, Scheme::kGrpc);
  EXPECT_EQ(address->host, "fe80::1");
  EXPECT_EQ(address->port, 80);
  EXPECT_EQ(ParseAddress("tcp://h:9")->scheme, Scheme::kTcp);
  EXPECT_EQ(ParseAddress("unix:///a/b")->name, "/a/b");
}

TEST(Address, RefusesAndNamesTheSchemes) {
  for (const char* text : {"",
                           "localhost:7070",
                           "http://a:1",
                           "grpc://",
                           "grpc://host",
                           "grpc://:1",
                           "grpc://host:",
                           "grpc://host:65536",
                           "grpc://host:1x",
                           "grpc://host:-1",
                           "grpc://::1:80",
                           "grpc://[::1]",
                           "grpc://[::1",
                           "grpc://a/b:1",
                           "inproc://",
                           "unix://",
                           "tcp://",
                           "tcp://host",
                           "unix://relative",
                           "unix:/x"}) {
    auto address = ParseAddress(text);
    EXPECT_EQ(address.status().code(), absl::StatusCode::kInvalidArgument) << text;
    for (const char* scheme : {"grpc://", "tcp://", "unix://", "inproc://"})
      EXPECT_THAT(std::string(address.status().message()), HasSubstr(scheme)) << text;
  }
  EXPECT_FALSE(ParseAddress("unix:///" + std::string(107, 'x')).ok());
  EXPECT_TRUE(ParseAddress("unix:///" + std::string(106, 'x')).ok());
}

TEST(Address, RefusesWhatIsInNoHost) {
  for (const char* text : {"grpc://[[::1]:1", "grpc://[[a]:1", "grpc://a]:1", "grpc://a\tb:1", "grpc://a\x7f:1"}) {
    EXPECT_THAT(std::string(ParseAddress(text).status().message()), HasSubstr("a character of no host")) << text;
  }
  EXPECT_FALSE(ParseAddress(std::string_view("grpc://a\0:1", 11)).ok());
}

TEST(Address, PortZeroCannotBeDialled) {
  for (const char* text : {"grpc://localhost:0", "tcp://localhost:0"})
    EXPECT_EQ(Dial(text).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace gradwire::transport
