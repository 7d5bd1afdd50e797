// Networks that flip bits, anywhere in what is sent either way: nobody takes a damaged byte for a good one, nobody
// waits for what cannot come, and the job has the bits that it has without.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string_view>

#include "common/wire/frame.h"
#include "tests/integration/client/cluster.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::testing {
namespace {

using testing_support::TcpProxy;

constexpr int kWorkers = 2;
constexpr int kRounds = 24;

struct Case {
  std::string scheme;
  size_t gap_bytes;  // between flips, in the mean
};

class Damage : public ::testing::TestWithParam<Case> {
 protected:
  static v1::JobSpec Spec(const std::string& name) {
    v1::JobSpec spec = MakeSpec(name, "dense:values=fixed32", v1::OPTIMIZER_ADAMW, kWorkers);
    spec.set_lease_ms(60'000);  // no round closes without a worker
    return spec;
  }
  // The digest after kRounds, of both workers.
  static std::string Train(const std::string& name, const std::vector<std::string>& servers) {
    std::vector<std::string> digests(kWorkers);
    InParallel(kWorkers, [&](int w) {
      Worker worker(Spec(name), w);
      SessionOptions options = worker.Options(servers);
      options.timeouts.round_ms = options.timeouts.start_ms = 300'000;
      options.timeouts.connect_ms = options.timeouts.reconnect_ms = 120'000;
      const absl::Status joined = worker.JoinWith(std::move(options));
      ASSERT_TRUE(joined.ok()) << joined;
      for (uint64_t step = 0; step < kRounds; ++step) {
        worker.Fill(step);
        const absl::Status stepped = worker.Step(0.01f);
        ASSERT_TRUE(stepped.ok()) << "step " << step << ": " << stepped;
      }
      digests[w] = worker.session().Digest();
    });
    EXPECT_EQ(digests[0], digests[1]);
    return digests[0];
  }
};

TEST_P(Damage, ChangesNoBitOfTheJob) {
  Cluster cluster(1, GetParam().scheme);
  const std::string expected = Train("calm", cluster.addresses());
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    TcpProxy proxy(cluster.addresses()[0]);
    proxy.FlipBits(GetParam().gap_bytes, seed);
    EXPECT_EQ(Train(absl::StrCat("damaged-", seed), {proxy.address()}), expected) << "seed " << seed;
    EXPECT_GE(proxy.flips(), 4u) << "the test tests nothing";
  }
}

INSTANTIATE_TEST_SUITE_P(All, Damage, ::testing::Values(Case{"tcp", 400'000}, Case{"grpc", 600'000}),
                         [](const auto& info) { return info.param.scheme; });

// Flips a bit behind the header of every frame that is pushed for one bucket, wherever the pieces begin and end.
class FrameDamager {
 public:
  explicit FrameDamager(uint32_t bucket) : bucket_(bucket) {}

  void Change(uint64_t flow, bool to_server, char* bytes, size_t count) {
    if (!to_server) return;
    Flow& of = flows_[flow];
    std::string seen = of.last + std::string(bytes, count);
    const size_t before = of.last.size();
    if (of.due) Flip(bytes);
    of.due = false;
    // Of those whose last byte is new.
    for (size_t end = std::max(before + 1, wire::kHeaderBytes); end <= seen.size(); ++end) {
      if (!IsOurs(std::string_view(seen).substr(end - wire::kHeaderBytes, wire::kHeaderBytes))) continue;
      if (end < seen.size()) {
        Flip(bytes + (end - before));
      } else {
        of.due = true;
      }
    }
    of.last = seen.substr(seen.size() - std::min(seen.size(), wire::kHeaderBytes - 1));
  }
  int damaged() const { return damaged_; }

 private:
  struct Flow {
    std::string last;  // bytes, fewer than a header has
    bool due = false;  // the next byte is to be damaged
  };

  bool IsOurs(std::string_view header) const {
    uint32_t bucket = 0;
    std::memcpy(&bucket, header.data() + 8, sizeof(bucket));
    return header.starts_with("GWF1") && header[5] == static_cast<char>(wire::FrameKind::kPush) && bucket == bucket_;
  }
  void Flip(char* byte) {
    *byte = static_cast<char>(*byte ^ 1);
    ++damaged_;
  }

  const uint32_t bucket_;
  std::map<uint64_t, Flow> flows_;
  std::atomic<int> damaged_ = 0;
};

TEST(DamageEachTime, EndsSoonAndSaysWhy) {
  Cluster cluster(1, "tcp");
  TcpProxy proxy(cluster.addresses()[0]);
  v1::JobSpec spec = MakeSpec("spoilt", "dense:values=fixed32", v1::OPTIMIZER_ADAMW, 1);
  spec.set_lease_ms(60'000);
  Worker worker(spec, 0);
  SessionOptions options = worker.Options({proxy.address()});
  options.timeouts.round_ms = options.timeouts.reconnect_ms = 300'000;
  ASSERT_EQ(worker.JoinWith(std::move(options)), absl::OkStatus());
  worker.Fill(0);
  ASSERT_EQ(worker.Step(0.01f), absl::OkStatus());
  const auto damager = std::make_shared<FrameDamager>(1);
  proxy.PassThrough([damager](auto... piece) { damager->Change(piece...); });
  worker.Fill(1);
  const auto began = std::chrono::steady_clock::now();
  const absl::Status stepped = worker.Step(0.01f);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(60)) << "of a round timeout of 300 s";
  EXPECT_FALSE(stepped.ok());
  EXPECT_THAT(std::string(stepped.message()), ::testing::HasSubstr("times in a row, each on a new connection"));
  EXPECT_GE(damager->damaged(), 3) << "it was not given up at the first time";
}

}  // namespace
}  // namespace gradwire::testing
