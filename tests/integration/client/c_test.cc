// gradwire/c.h against shard servers: what a caller in C can do, and do wrong.
#include "gradwire/c.h"

#include <array>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/integration/client/cluster.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire::testing {
namespace {

using ::testing::HasSubstr;

constexpr char kJob[] =
    R"({"name": "c", "optimizer": {"kind": "OPTIMIZER_SGD"},
        "tensors": [{"name": "a", "shape": [3]}, {"name": "b", "shape": [2, 2]}]})";
constexpr float kRate = 0.5f;

class CTest : public ::testing::Test {
 protected:
  CTest() {
    for (const std::string& address : cluster_.addresses()) servers_.push_back(address.c_str());
    options_.servers = servers_.data();
    options_.server_count = servers_.size();
    options_.job = kJob;
    options_.worker = "worker-0";
    options_.tensors = tensors_.data();
    options_.tensor_count = tensors_.size();
  }
  ~CTest() override { gradwire_free(session_); }

  gradwire_code Join() { return gradwire_join(&options_, &session_); }
  gradwire_code Exchange(float gradient) {
    const std::vector<float> all(4, gradient);
    const std::array<const float*, 2> gradients = {all.data(), all.data()};
    return gradwire_exchange(session_, gradients.data(), gradients.size(), &kRate, 1);
  }
  void ExpectRefused(gradwire_code code, const std::string& said) {
    EXPECT_EQ(code, GRADWIRE_INVALID_ARGUMENT);
    EXPECT_THAT(gradwire_last_error(), HasSubstr(said));
  }

  Cluster cluster_{2, "inproc"};
  std::vector<const char*> servers_;
  std::array<float, 3> a_ = {1, 2, 3};
  std::array<float, 4> b_ = {4, 5, 6, 7};
  std::array<gradwire_tensor, 2> tensors_ = {{{a_.data(), a_.size()}, {b_.data(), b_.size()}}};
  gradwire_options options_ = gradwire_no_options();
  gradwire_session* session_ = nullptr;
};

TEST_F(CTest, TrainsInWholeRoundsAndInParts) {
  ASSERT_EQ(Join(), GRADWIRE_OK) << gradwire_last_error();
  EXPECT_EQ(gradwire_start_step(session_), 0u);
  ASSERT_EQ(Exchange(2), GRADWIRE_OK) << gradwire_last_error();
  EXPECT_EQ(a_, (std::array<float, 3>{0, 1, 2}));

  const std::vector<float> gradient(4, 4.0f);
  ASSERT_EQ(gradwire_begin_round(session_, &kRate, 1), GRADWIRE_OK);
  for (uint32_t tensor : {1u, 0u}) ASSERT_EQ(gradwire_tensor_ready(session_, tensor, gradient.data()), GRADWIRE_OK);
  ASSERT_EQ(gradwire_end_round(session_, -1), GRADWIRE_OK);
  EXPECT_EQ(b_, (std::array<float, 4>{1, 2, 3, 4}));
  ASSERT_EQ(gradwire_begin_round(session_, &kRate, 1), GRADWIRE_OK);
  const int64_t row = 1;
  ASSERT_EQ(gradwire_rows_ready(session_, 1, &row, 1, gradient.data()), GRADWIRE_OK) << gradwire_last_error();
  ASSERT_EQ(gradwire_rows_ready(session_, 0, nullptr, 0, nullptr), GRADWIRE_OK) << "no rows: zeros";
  ASSERT_EQ(gradwire_end_round(session_, -1), GRADWIRE_OK);
  EXPECT_EQ(b_, (std::array<float, 4>{1, 2, 1, 2}));
  ASSERT_EQ(gradwire_drain(session_, -1), GRADWIRE_OK);

  gradwire_stats stats = {};
  stats.struct_size = sizeof(stats);
  ASSERT_EQ(gradwire_get_stats(session_, &stats), GRADWIRE_OK);
  EXPECT_EQ(stats.steps, 3u);
  EXPECT_GT(stats.pushed_bytes, 2 * 7 * sizeof(float));
  const uint64_t version = gradwire_parameter_version(session_);
  EXPECT_GE(version, 2u);
  EXPECT_EQ(gradwire_leave(session_, 1), GRADWIRE_OK);
  EXPECT_EQ(Exchange(1), GRADWIRE_CANCELLED);
}

TEST_F(CTest, GoesOnFromItsCheckpoint) {
  const testing_support::TemporaryFolder folder("c-test");
  const std::string path = (std::filesystem::path(folder.path()) / "checkpoint").string();
  ASSERT_EQ(Join(), GRADWIRE_OK) << gradwire_last_error();
  ASSERT_EQ(Exchange(2), GRADWIRE_OK);
  ASSERT_EQ(gradwire_save(session_, path.c_str()), GRADWIRE_OK) << gradwire_last_error();
  gradwire_free(session_);
  a_ = {};
  options_.resume_from = path.c_str();
  ASSERT_EQ(Join(), GRADWIRE_OK) << gradwire_last_error();
  EXPECT_EQ(a_, (std::array<float, 3>{0, 1, 2}));
  EXPECT_EQ(gradwire_start_step(session_), 1u);
}

TEST_F(CTest, RefusesWhatIsMissingByItsName) {
  ExpectRefused(gradwire_join(nullptr, &session_), "options is null");
  ExpectRefused(gradwire_join(&options_, nullptr), "session is null");
  options_.job = nullptr;
  ExpectRefused(Join(), "options.job is null");
  options_.job = R"({"name": 1})";
  ExpectRefused(Join(), "options.job: ");
  options_.job = kJob;
  options_.worker = nullptr;
  ExpectRefused(Join(), "options.worker is null");
  options_.worker = "worker-0";
  options_.pull = 17;
  ExpectRefused(Join(), "options.pull is 17");
  options_.pull = GRADWIRE_PULL_UPDATE;
  servers_[1] = nullptr;
  ExpectRefused(Join(), "options.servers[1] is null");
  servers_[1] = cluster_.addresses()[1].c_str();
  options_.tensors = nullptr;
  ExpectRefused(Join(), "options.tensors is null, and 2");
  options_.tensors = tensors_.data();
  tensors_[1].data = nullptr;
  ExpectRefused(Join(), "options.tensors[1].data is null, and 4");
  tensors_[1].data = b_.data();
  tensors_[1].elements = 3;
  EXPECT_EQ(Join(), GRADWIRE_INVALID_ARGUMENT);
  EXPECT_EQ(session_, nullptr);
  tensors_[1].elements = 4;
  ASSERT_EQ(Join(), GRADWIRE_OK) << gradwire_last_error();
  ExpectRefused(gradwire_begin_round(nullptr, &kRate, 1), "session is null");
  ExpectRefused(gradwire_begin_round(session_, nullptr, 1), "learning_rates is null");
  const std::array<const float*, 2> gradients = {a_.data(), nullptr};
  ExpectRefused(gradwire_exchange(session_, gradients.data(), 2, &kRate, 1),
                "tensor 'b': the gradient is a null pointer");
  ExpectRefused(gradwire_save(session_, nullptr), "path is null");
  ASSERT_EQ(gradwire_begin_round(session_, &kRate, 1), GRADWIRE_OK);
  ExpectRefused(gradwire_tensor_ready(session_, 1, nullptr), "tensor 'b': the gradient is a null pointer");
  ExpectRefused(gradwire_rows_ready(session_, 1, nullptr, 1, b_.data()), "rows is null");
  const int64_t beyond = 2;
  ExpectRefused(gradwire_rows_ready(session_, 1, &beyond, 1, b_.data()), "tensor 'b': row 2");
  for (uint32_t tensor : {0u, 1u}) ASSERT_EQ(gradwire_tensor_ready(session_, tensor, b_.data()), GRADWIRE_OK);
  ASSERT_EQ(gradwire_end_round(session_, -1), GRADWIRE_OK);
  ASSERT_EQ(Exchange(2), GRADWIRE_OK) << "nothing of the above has left a trace: " << gradwire_last_error();
  EXPECT_EQ(gradwire_parameter_version(nullptr), 0u);
}

TEST_F(CTest, NamesTheTimeoutThatCannotBe) {
  options_.reconnect_ms = -1;
  ASSERT_NE(Join(), GRADWIRE_OK);
  EXPECT_NE(std::string(gradwire_last_error()).find("timeouts.reconnect_ms is -1"), std::string::npos);
}

TEST_F(CTest, TakesStructsOfACallerThatKnowsLessOfThem) {
  options_.struct_size = offsetof(gradwire_options, resume_from);
  options_.resume_from = "no such file, and not read";
  ASSERT_EQ(Join(), GRADWIRE_OK) << gradwire_last_error();
  gradwire_stats stats = {};
  stats.struct_size = offsetof(gradwire_stats, pulled_bytes);
  stats.pulled_bytes = 17;
  ASSERT_EQ(gradwire_get_stats(session_, &stats), GRADWIRE_OK);
  EXPECT_GT(stats.pushed_bytes, 0u) << "initial parameters";
  EXPECT_EQ(stats.pulled_bytes, 17u);
  EXPECT_EQ(stats.struct_size, offsetof(gradwire_stats, pulled_bytes));
  for (const size_t wrong : {size_t{0}, sizeof(stats) - 1}) {
    stats.struct_size = wrong;
    ExpectRefused(gradwire_get_stats(session_, &stats), absl::StrCat("stats.struct_size is ", wrong));
  }
}

TEST_F(CTest, RefusesWhatACallerOfALaterVersionSays) {
  struct {
    gradwire_options known;
    uint64_t later;
  } options = {.known = options_, .later = 1};
  options.known.struct_size = sizeof(options);
  EXPECT_EQ(gradwire_join(&options.known, &session_), GRADWIRE_UNIMPLEMENTED);
  EXPECT_THAT(gradwire_last_error(), HasSubstr("options has fields that this library"));
  options.later = 0;
  ASSERT_EQ(gradwire_join(&options.known, &session_), GRADWIRE_OK) << gradwire_last_error();
  struct {
    gradwire_stats known;
    uint64_t later;
  } stats = {.known = {}, .later = 1};
  stats.known.struct_size = sizeof(stats);
  ASSERT_EQ(gradwire_get_stats(session_, &stats.known), GRADWIRE_OK);
  EXPECT_EQ(stats.known.members, 1u);
  EXPECT_EQ(stats.later, 0u);
}

TEST_F(CTest, TellsThatNobodyListens) {
  const char* nowhere = "grpc://127.0.0.1:1";
  options_.servers = &nowhere;
  options_.server_count = 1;
  options_.connect_ms = 200;
  EXPECT_EQ(Join(), GRADWIRE_UNAVAILABLE);
  EXPECT_THAT(gradwire_last_error(), HasSubstr("127.0.0.1:1"));
}

}  // namespace
}  // namespace gradwire::testing
