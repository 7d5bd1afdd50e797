// What only a Lease of Kubernetes has: clocks that differ, an API server that refuses, is overloaded or lies, and an
// object that belongs to others too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "server/lease/lease.h"
#include "tests/lib/kube_server.h"
#include "tests/lib/manual_clock.h"

namespace gradwire {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::KubeServer;
using testing_support::ManualClock;
using testing_support::TestCertificate;

constexpr int64_t kKubernetesTtlMs = 3000;
constexpr TimeNs kTtl = kKubernetesTtlMs * 1'000'000;

std::string NewFolder() {
  static int count = 0;
  const std::string folder = absl::StrCat(testing::TempDir(), "/kubernetes-lease-", getpid(), "-", ++count);
  std::filesystem::create_directories(folder);
  return folder;
}

class KubernetesLeaseTest : public testing::Test {
 protected:
  KubernetesLeaseTest() : folder_(NewFolder()), certificate_(folder_), server_(certificate_, "first") {
    WriteToken("first");
  }
  ~KubernetesLeaseTest() override { std::filesystem::remove_all(folder_); }

  void WriteToken(const std::string& token) { std::ofstream(folder_ + "/token") << token; }
  std::string Address(const std::string& space = "default", const std::string& host = "127.0.0.1",
                      const std::string& ca = "") const {
    return absl::StrCat("kubernetes://", space, "/lease?server=https://", host, ":", server_.port(),
                        "&token-file=", folder_, "/token&ca-file=", ca.empty() ? certificate_.certificate_file() : ca);
  }
  std::unique_ptr<Lease> Make(const std::string& holder, const std::string& address) {
    auto lease = MakeLease(address, {holder, kKubernetesTtlMs}, &clock_);
    EXPECT_EQ(lease.status(), absl::OkStatus());
    return *std::move(lease);
  }
  std::unique_ptr<Lease> Make(const std::string& holder) { return Make(holder, Address()); }
  static bool Holds(Lease& lease) {
    const absl::StatusOr<Lease::State> state = lease.Hold();
    EXPECT_EQ(state.status(), absl::OkStatus());
    return state.ok() && state->held;
  }
  // What Hold says.
  static std::string Said(Lease& lease, absl::StatusCode code) {
    const absl::Status status = lease.Hold().status();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  }

  ManualClock clock_{1'000'000'000};
  const std::string folder_;
  const TestCertificate certificate_;
  KubeServer server_;
};

TEST_F(KubernetesLeaseTest, ObjectIsAsKubernetesWritesThem) {
  const auto one = Make("one");
  ASSERT_TRUE(Holds(*one));
  ASSERT_EQ(one->Announce(5), absl::OkStatus());
  const json object = server_.Get("lease");
  EXPECT_EQ(object["apiVersion"], "coordination.k8s.io/v1");
  EXPECT_THAT(object["spec"]["holderIdentity"].get<std::string>(), testing::MatchesRegex("one_[0-9a-f]{16}"));
  EXPECT_EQ(object["spec"]["leaseDurationSeconds"], 3);
  EXPECT_EQ(object["spec"]["leaseTransitions"], 0);
  EXPECT_THAT(object["spec"]["renewTime"].get<std::string>(), testing::MatchesRegex("20..-..-..T..:..:..[.]......Z"));
  EXPECT_EQ(object["metadata"]["annotations"]["gradwire.io/epoch"], "5");
  EXPECT_EQ(object["metadata"]["annotations"]["gradwire.io/primary"], "one");
  one->Release();
  EXPECT_EQ(server_.Get("lease")["spec"]["holderIdentity"], "");
  const auto two = Make("two");
  ASSERT_TRUE(Holds(*two));
  EXPECT_EQ(server_.Get("lease")["spec"]["leaseTransitions"], 1);
}

TEST_F(KubernetesLeaseTest, ClocksOfOthersAreNotBelieved) {
  for (const char* renewed : {"1970-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z", "yesterday"}) {
    const auto one = Make("one");
    ASSERT_TRUE(Holds(*one));
    const auto two = Make("two");
    server_.Edit("lease", {{"spec", {{"renewTime", renewed}}}});
    EXPECT_FALSE(Holds(*two)) << renewed;
    clock_.now += kTtl;
    EXPECT_FALSE(Holds(*two)) << renewed;
    server_.Edit("lease", {{"metadata", {{"labels", {{"any", renewed}}}}}});
    clock_.now += kTtl;
    EXPECT_FALSE(Holds(*two)) << "it has changed meanwhile";
    clock_.now += kTtl - 1;
    EXPECT_FALSE(Holds(*two));
    clock_.now += 2;
    EXPECT_TRUE(Holds(*two)) << renewed;
  }
}

TEST_F(KubernetesLeaseTest, LongerLeaseOfAnotherIsWaitedFor) {
  const auto one = Make("one");
  ASSERT_TRUE(Holds(*one));
  server_.Edit("lease", {{"spec", {{"leaseDurationSeconds", 60}}}});
  const auto two = Make("two");
  EXPECT_FALSE(Holds(*two));
  clock_.now += 10 * kTtl;
  EXPECT_FALSE(Holds(*two));
  clock_.now += 10 * kTtl + 1;
  EXPECT_TRUE(Holds(*two));
}

TEST_F(KubernetesLeaseTest, RemovedObjectOfAnotherIsNotTakenAtOnce) {
  const auto one = Make("one");
  ASSERT_TRUE(Holds(*one));
  ASSERT_EQ(one->Announce(9), absl::OkStatus());
  const auto two = Make("two");
  EXPECT_FALSE(Holds(*two));
  clock_.now += kTtl - 1;
  server_.Remove("lease");
  EXPECT_FALSE(Holds(*two)) << "it may have been renewed just before";
  EXPECT_EQ(one->Announce(10).code(), absl::StatusCode::kAborted);
  clock_.now += kTtl + 1;
  const absl::StatusOr<Lease::State> state = two->Hold();
  ASSERT_EQ(state.status(), absl::OkStatus());
  EXPECT_TRUE(state->held);
  EXPECT_EQ(state->last_epoch, 9u) << "what was known of it is written again";
  EXPECT_EQ(state->last_primary, "one");
  EXPECT_FALSE(Holds(*one));
}

TEST_F(KubernetesLeaseTest, WhatOthersWroteIntoItStays) {
  const auto one = Make("one");
  ASSERT_TRUE(Holds(*one));
  const json theirs = {{"metadata", {{"labels", {{"team", "a"}}}, {"annotations", {{"note", "b"}}}}},
                       {"spec", {{"strategy", "OldestEmulationVersion"}}}};
  server_.Edit("lease", theirs);
  ASSERT_TRUE(Holds(*one));
  ASSERT_EQ(one->Announce(3), absl::OkStatus());
  one->Release();
  json now = server_.Get("lease");
  const json before = now;
  now.merge_patch(theirs);
  EXPECT_EQ(now, before);
}

TEST_F(KubernetesLeaseTest, WriterInBetweenIsReadAgain) {
  const auto one = Make("one");
  ASSERT_TRUE(Holds(*one));
  const KubeServer::Reply conflict{409, {{"kind", "Status"}, {"reason", "Conflict"}, {"message", "modified"}}};
  server_.Next("PUT", conflict);
  EXPECT_TRUE(Holds(*one));
  server_.Next("PUT", conflict);
  EXPECT_EQ(one->Announce(4), absl::OkStatus());
  for (int i = 0; i < 3; ++i) server_.Next("PUT", conflict);
  EXPECT_FALSE(one->Hold().ok());
  for (int i = 0; i < 3; ++i) server_.Next("PUT", conflict);
  const absl::Status announced = one->Announce(5);
  EXPECT_FALSE(announced.ok());
  EXPECT_NE(announced.code(), absl::StatusCode::kAborted) << "it is held all the same";
}

TEST_F(KubernetesLeaseTest, AnswerThatGotLostCostsNothing) {
  const auto one = Make("one");
  server_.Next("POST", {.lost = true});
  EXPECT_FALSE(one->Hold().ok());
  const auto two = Make("two");
  EXPECT_FALSE(Holds(*two)) << "the write had its effect";
  EXPECT_TRUE(Holds(*one));
  server_.Next("PUT", {.lost = true});
  EXPECT_FALSE(one->Announce(8).ok());
  EXPECT_EQ(one->Announce(8), absl::OkStatus());
  server_.Next("PUT", {.lost = true});
  EXPECT_FALSE(one->Hold().ok());
  one->Release();
  EXPECT_TRUE(Holds(*two));
}

TEST_F(KubernetesLeaseTest, TokenIsReadAgain) {
  const auto one = Make("one");
  ASSERT_TRUE(Holds(*one));
  server_.SetToken("second");
  EXPECT_THAT(Said(*one, absl::StatusCode::kUnauthenticated), HasSubstr(folder_ + "/token"));
  WriteToken("  second\n");
  EXPECT_TRUE(Holds(*one));
  for (const char* wrong : {"", "\n", "two words", "line\r\nHost: other"}) {
    WriteToken(wrong);
    EXPECT_THAT(Said(*one, absl::StatusCode::kFailedPrecondition), HasSubstr("holds no token"));
  }
  std::filesystem::remove(folder_ + "/token");
  EXPECT_THAT(Said(*one, absl::StatusCode::kFailedPrecondition), HasSubstr("holds no token"));
}

TEST_F(KubernetesLeaseTest, RefusalsSayWhatToDo) {
  const auto one = Make("one");
  server_.SetForbidden(true);
  EXPECT_THAT(Said(*one, absl::StatusCode::kPermissionDenied), HasSubstr("deploy/kubernetes/lease.yaml"));
  server_.SetForbidden(false);
  const auto lost = Make("one", Address("nowhere"));
  EXPECT_THAT(Said(*lost, absl::StatusCode::kNotFound), HasSubstr("is there such a namespace?"));
  for (const unsigned status : {500u, 502u, 503u, 504u, 301u, 422u}) {
    server_.Next("GET", {status, {{"message", "of its own"}}});
    EXPECT_THAT(Said(*one, absl::StatusCode::kUnavailable), HasSubstr("of its own")) << status;
  }
  EXPECT_TRUE(Holds(*one));
}

TEST_F(KubernetesLeaseTest, OverloadedServerIsLeftAlone) {
  const auto one = Make("one");
  ASSERT_TRUE(Holds(*one));
  server_.Next("GET", {429, {{"message", "too many"}}, {{"Retry-After", "1"}}});
  EXPECT_THAT(Said(*one, absl::StatusCode::kUnavailable), HasSubstr("too many"));
  const int requests = server_.requests();
  EXPECT_THAT(Said(*one, absl::StatusCode::kUnavailable), HasSubstr("wants no requests"));
  EXPECT_EQ(server_.requests(), requests);
  clock_.now += kTtl / 3;
  EXPECT_TRUE(Holds(*one));
  // A wait that would cost the lease is not believed.
  server_.Next("GET", {429, {{"message", "too many"}}, {{"Retry-After", "9223372036854775807"}}});
  EXPECT_FALSE(one->Hold().ok());
  clock_.now += kTtl / 3;
  EXPECT_TRUE(Holds(*one));
}

TEST_F(KubernetesLeaseTest, WhatCannotBeReadIsAnError) {
  const auto one = Make("one");
  ASSERT_TRUE(Holds(*one));
  std::vector<KubeServer::Reply> replies = {
      {.status = 200, .text = "<html>"},
      {.status = 200, .text = "null"},
      {.status = 200, .text = "[]"},
      {.status = 200, .text = "{\"kind\": \"Lease\"}"},
      {.status = 200, .text = std::string(200'000, '[')},
      {.status = 200, .text = std::string(1 << 20, ' ')},
      {.status = 200, .body = {{"kind", "Status"}}},
      {.text = "not HTTP at all\r\n\r\n", .raw = true},
      {.text = "HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{}", .raw = true},
      {.text = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n", .raw = true},
      {.text = "HTTP/1.1 200 OK\r\nX: " + std::string(64 << 10, 'x') + "\r\n\r\n{}", .raw = true},
      {.text = "HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}", .raw = true},
      {.text = std::string("\x16\x03\x01\0\0", 5), .raw = true},
  };
  for (const json& patch :
       {json{{"metadata", {{"resourceVersion", 7}}}}, json{{"metadata", "text"}},
        json{{"spec", {{"holderIdentity", 7}}}}, json{{"spec", {{"leaseDurationSeconds", -1}}}},
        json{{"spec", {{"leaseDurationSeconds", 1e300}}}}, json{{"spec", json::array()}},
        json{{"spec", {{"leaseTransitions", "many"}}}},
        json{{"metadata", {{"annotations", {{"gradwire.io/epoch", "5"}}}}}},
        json{{"metadata", {{"annotations", {{"gradwire.io/epoch", "x"}, {"gradwire.io/primary", "one"}}}}}}}) {
    json object = server_.Get("lease");
    object.merge_patch(patch);
    replies.push_back({200, object});
  }
  for (const KubeServer::Reply& reply : replies) {
    for (const char* method : {"GET", "PUT"}) {
      server_.Next(method, reply);
      const absl::Status status = one->Hold().status();
      EXPECT_FALSE(status.ok()) << method << " " << reply.text.substr(0, 60) << reply.body;
      EXPECT_LT(status.message().size(), 1000u);
    }
  }
  EXPECT_TRUE(Holds(*one));
}

TEST_F(KubernetesLeaseTest, SilenceIsADeadline) {
  const auto one = Make("one");
  ASSERT_TRUE(Holds(*one));
  for (const char* method : {"GET", "PUT"}) {
    server_.Next(method, {.silent = true});
    EXPECT_EQ(one->Hold().status().code(), absl::StatusCode::kDeadlineExceeded);
  }
  EXPECT_TRUE(Holds(*one));
}

TEST_F(KubernetesLeaseTest, OnlyTheServerThatWasMeantIsTrusted) {
  const TestCertificate other(NewFolder());
  const auto wrong_ca = Make("one", Address("default", "127.0.0.1", other.certificate_file()));
  EXPECT_THAT(Said(*wrong_ca, absl::StatusCode::kUnavailable), HasSubstr("is not trusted"));
  const auto wrong_name = Make("one", Address("default", "localhost"));
  EXPECT_THAT(Said(*wrong_name, absl::StatusCode::kUnavailable), HasSubstr("is not trusted"));
  const auto no_ca = Make("one", Address("default", "127.0.0.1", folder_ + "/none"));
  EXPECT_THAT(Said(*no_ca, absl::StatusCode::kFailedPrecondition), HasSubstr("/none"));
  EXPECT_EQ(server_.requests(), 0) << "the token was not shown to anybody";
  const std::string named = NewFolder();
  const TestCertificate by_name(named, "DNS:localhost");
  KubeServer server(by_name, "first");
  const auto right = Make("one", absl::StrCat("kubernetes://default/lease?server=https://localhost:", server.port(),
                                              "&token-file=", folder_, "/token&ca-file=", by_name.certificate_file()));
  EXPECT_TRUE(Holds(*right));
}

TEST_F(KubernetesLeaseTest, InsideAPodTheServerIsThatOfTheEnvironment) {
  const std::string files = absl::StrCat("?token-file=", folder_, "/token&ca-file=", certificate_.certificate_file());
  const std::string address = "kubernetes://default/lease" + files;
  EXPECT_THAT(std::string(CheckLeaseAddress(address).message()), HasSubstr("KUBERNETES_SERVICE_HOST is not set"));
  setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1", 1);
  setenv("KUBERNETES_SERVICE_PORT", absl::StrCat(server_.port()).c_str(), 1);
  EXPECT_TRUE(Holds(*Make("one", address)));
  setenv("KUBERNETES_SERVICE_HOST", "::1", 1);
  EXPECT_EQ(CheckLeaseAddress(address), absl::OkStatus());
  EXPECT_FALSE(CheckLeaseAddress("kubernetes:///lease" + files).ok()) << "the namespace is that of a pod";
  unsetenv("KUBERNETES_SERVICE_HOST");
  unsetenv("KUBERNETES_SERVICE_PORT");
}

TEST(KubernetesLeaseAddress, IsChecked) {
  const std::string good = "server=https://api:6443";
  EXPECT_EQ(CheckLeaseAddress("kubernetes://a-b/c.d-0?" + good), absl::OkStatus());
  for (const std::string& wrong : {std::string("kubernetes://"),
                                   std::string("kubernetes://a"),
                                   "kubernetes://a/?" + good,
                                   "kubernetes:///b?" + good,
                                   "kubernetes://A/b?" + good,
                                   "kubernetes://a/B?" + good,
                                   "kubernetes://a.b/c?" + good,
                                   "kubernetes://a/b/c?" + good,
                                   "kubernetes://a/b%2f?" + good,
                                   "kubernetes://a/-b?" + good,
                                   "kubernetes://a/" + std::string(254, 'b') + "?" + good,
                                   "kubernetes://" + std::string(64, 'a') + "/b?" + good,
                                   std::string("kubernetes://a/b?server=http://api:6443"),
                                   std::string("kubernetes://a/b?server=https://api"),
                                   std::string("kubernetes://a/b?server=https://api:0"),
                                   std::string("kubernetes://a/b?server=https://api:6443/x"),
                                   std::string("kubernetes://a/b?server="),
                                   "kubernetes://a/b?token-file=&" + good,
                                   "kubernetes://a/b?insecure=1&" + good,
                                   "kubernetes://a/b?x&" + good}) {
    EXPECT_EQ(CheckLeaseAddress(wrong).code(), absl::StatusCode::kInvalidArgument) << wrong;
  }
}

}  // namespace
}  // namespace gradwire
