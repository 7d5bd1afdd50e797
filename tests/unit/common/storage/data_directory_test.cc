// EPOCH, ROLE and LINEAGE: what may be written is what can be read, and what cannot be read says what to do. Jobs that
// are removed are gone.
#include "common/storage/data_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/names.h"
#include "common/storage/files.h"
#include "tests/lib/fake_disk.h"

namespace gradwire {
namespace {

using testing::HasSubstr;

class DataDirectoryTest : public testing::Test {
 protected:
  DataDirectoryTest() { EXPECT_TRUE(disk_.CreateDirectory("/").ok()); }

  absl::StatusOr<std::unique_ptr<DataDirectory>> Open() { return DataDirectory::Open(&disk_, "/data"); }
  void Write(const std::string& name, const std::string& text) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
    ASSERT_EQ(WriteFileAtomically(disk_, "/data", name, {bytes, text.size()}), absl::OkStatus());
  }
  // Opening fails for the file `name`, and says `advice`.
  void ExpectDamaged(const std::string& name, const std::string& text, const std::string& advice) {
    Write(name, text);
    const absl::Status opened = Open().status();
    EXPECT_EQ(opened.code(), absl::StatusCode::kDataLoss) << text.substr(0, 40);
    EXPECT_THAT(std::string(opened.message()), HasSubstr("'/data/" + name + "'"));
    EXPECT_THAT(std::string(opened.message()), HasSubstr(advice));
  }

  testing_support::FakeDisk disk_;
};

TEST_F(DataDirectoryTest, RoleThatCannotBeReadIsNotWritten) {
  auto directory = Open();
  ASSERT_TRUE(directory.ok()) << directory.status();
  const StoredRole good{StoredRole::Kind::kFenced, 7, std::string(kMaxServerNameBytes, 'n')};
  ASSERT_EQ((*directory)->SetRole(good), absl::OkStatus());
  using Kind = StoredRole::Kind;
  for (const StoredRole& bad : {StoredRole{Kind::kFenced, kEpochsEnd + 5, "a"}, StoredRole{Kind::kFenced, 8, "a\nb"},
                                StoredRole{Kind::kFenced, 8, std::string(5000, 'n')}}) {
    EXPECT_EQ((*directory)->SetRole(bad).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ((*directory)->RaiseEpoch(kEpochsEnd).code(), absl::StatusCode::kInvalidArgument);
  const uint64_t epoch = (*directory)->epoch();
  directory = Open();
  ASSERT_TRUE(directory.ok()) << directory.status();
  EXPECT_EQ((*directory)->role().epoch, 7u);
  EXPECT_EQ((*directory)->role().name, good.name);
  EXPECT_EQ((*directory)->epoch(), epoch + 1);
}

TEST_F(DataDirectoryTest, DamagedFilesSayWhatToDo) {
  ASSERT_TRUE(Open().ok());
  const std::string largest = std::to_string(std::numeric_limits<uint64_t>::max());
  const std::string too_long(1 << 20, '7');
  for (const std::string& text : {std::string("x"), std::string(), largest, std::to_string(kEpochsEnd - 1), too_long})
    ExpectDamaged("EPOCH", text, "write one there that is larger than every epoch so far");
  Write("EPOCH", "3\n");
  for (const std::string& text : {std::string("fenced"), "fenced " + largest + " a", std::string("king 7"),
                                  "fenced 7 " + std::string(600, 'n'), std::string("fenced 7 \x1b[2J"), too_long})
    ExpectDamaged("ROLE", text, "write `primary 0`, `standby 0` or `fenced 0` there");
  Write("ROLE", "fenced 7\n");
  for (const std::string& text : {std::string(), std::string(31, 'a'), std::string(32, 'x'), too_long})
    ExpectDamaged("LINEAGE", text, "copy the file from this server's standby or primary");
}

TEST_F(DataDirectoryTest, LineageStays) {
  auto directory = Open();
  ASSERT_TRUE(directory.ok()) << directory.status();
  EXPECT_TRUE((*directory)->lineage().none()) << "nobody is served yet";
  const Lineage lineage = Lineage::Random();
  EXPECT_EQ(lineage.key().size(), Lineage::kKeyBytes);
  EXPECT_FALSE(lineage.SameAs(Lineage::Random()));
  EXPECT_FALSE(Lineage().SameAs(Lineage()));
  ASSERT_EQ((*directory)->SetLineage(lineage), absl::OkStatus());
  directory = Open();
  ASSERT_TRUE(directory.ok()) << directory.status();
  EXPECT_TRUE((*directory)->lineage().SameAs(lineage));
  EXPECT_EQ((*directory)->lineage().id(), lineage.id());
  EXPECT_NE(lineage.id(), 0u);
  EXPECT_EQ(Lineage().id(), 0u);
}

// The disk fails at every call of a removal, and is well again before the next one.
TEST_F(DataDirectoryTest, AJobWhoseRemovalFailedIsRemovedByTheNextOneForGood) {
  v1::StoredJob job;
  job.mutable_spec()->set_name("job");
  bool over = false;
  for (uint64_t call = 0; !over; ++call) {
    for (uint32_t seed = 0; seed < 8; ++seed) {
      SCOPED_TRACE(absl::StrCat("call ", call, " seed ", seed));
      testing_support::FakeDisk disk;
      ASSERT_TRUE(disk.CreateDirectory("/").ok());
      const auto directory = *DataDirectory::Open(&disk, "/data");
      ASSERT_EQ(directory->CreateJob(job), absl::OkStatus());
      disk.CrashAt(disk.calls() + call);
      over = directory->RemoveJob("job").ok();
      disk.ProcessDied();
      if (seed % 2 == 0) directory->CreateJob(job).IgnoreError();  // made anew, unless it is still there
      ASSERT_EQ(directory->RemoveJob("job"), absl::OkStatus());
      std::mt19937 random(seed);
      disk.PowerCycle(random);
      EXPECT_THAT(*(*DataDirectory::Open(&disk, "/data"))->Jobs(), testing::IsEmpty());
    }
  }
}

}  // namespace
}  // namespace gradwire
