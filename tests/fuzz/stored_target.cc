// The files of a data directory: whatever the job's, EPOCH, ROLE or LINEAGE holds, it is read as it was meant or
// refused.
#include <cstring>
#include <limits>
#include <string>

#include "common/base/crc32c.h"
#include "common/storage/data_directory.h"
#include "common/storage/files.h"
#include "tests/fuzz/targets.h"
#include "tests/lib/fake_disk.h"

namespace gradwire::fuzz {
namespace {

constexpr char kData[] = "/data";
constexpr char kStoredJob[] = "lm";
constexpr char kRole[] = "ROLE";
constexpr char kLineage[] = "LINEAGE";
constexpr size_t kChecked = 8;  // a job's file is checked from here on

enum File : uint8_t { kJobOfIt, kEpochOfIt, kRoleOfIt, kLineageOfIt };

v1::StoredJob SomeStoredJob() {
  v1::StoredJob job;
  job.mutable_spec()->set_name(kStoredJob);
  job.mutable_spec()->set_codec("tagc:density=0.05");
  job.mutable_spec()->add_tensors()->set_name("weight");
  job.mutable_spec()->mutable_tensors(0)->add_shape(77);
  job.set_shard_index(1);
  job.set_shard_count(4);
  job.set_followed_history(5);
  job.set_followed_term(2);
  return job;
}

// With a job and every other file in it.
std::unique_ptr<testing_support::FakeDisk> GoodDirectory() {
  auto disk = std::make_unique<testing_support::FakeDisk>();
  Require(disk->CreateDirectory("/").ok(), "the fake disk takes directories");
  const auto directory = DataDirectory::Open(disk.get(), kData);
  Require(directory.ok() && (*directory)->CreateJob(SomeStoredJob()).ok() &&
              (*directory)->SetRole({StoredRole::Kind::kStandby, 3, "host,grpc://a:7070"}).ok() &&
              (*directory)->SetLineage(*Lineage::OfKey("0123456789abcdef")).ok(),
          "a data directory can be made");
  return disk;
}

std::string FolderOf(uint8_t file) {
  return file == kJobOfIt ? std::string(kData) + "/jobs/" + kStoredJob + kJobSuffix : kData;
}

const char* FileNameOf(uint8_t file) {
  constexpr const char* kNames[] = {kJobFile, kEpochFile, kRole, kLineage};
  return kNames[file];
}

void RequireSameRole(const StoredRole& a, const StoredRole& b) {
  Require(a.kind == b.kind && a.epoch == b.epoch && a.name == b.name, "a role that is written is read");
}

}  // namespace

// u8: bits 0 and 1 which file, bit 2: the checksum of a job is made right; its bytes.
void RunStored(Input input) {
  Reader reader(input);
  const uint8_t how = reader.Take<uint8_t>();
  const uint8_t file = how & 3;
  std::vector<uint8_t> bytes(reader.rest().begin(), reader.rest().end());
  if (file == kJobOfIt && (how & 4) != 0 && bytes.size() >= kChecked) {
    const uint32_t crc = Crc32c(std::span(bytes).subspan(kChecked));
    std::memcpy(bytes.data() + 4, &crc, sizeof(crc));
  }
  const auto disk = GoodDirectory();
  Require(WriteFileAtomically(*disk, FolderOf(file), FileNameOf(file), bytes).ok(), "the fake disk takes files");
  const absl::StatusOr<uint64_t> last = ReadEpoch(*disk, kData);
  const auto opened = DataDirectory::Open(disk.get(), kData);
  if (!opened.ok()) {
    Require(file != kJobOfIt, "a job that cannot be read stops no server");
    Require(absl::IsDataLoss(opened.status()), "damage is told as such");
    return;
  }
  DataDirectory& directory = **opened;
  Require(last.ok() && directory.epoch() > *last, "the epoch grows");
  Require(directory.lineage().key().size() == Lineage::kKeyBytes, "a lineage that is read has a key");
  const auto names = directory.Jobs();
  Require(names.ok() && *names == std::vector<std::string>{kStoredJob}, "the job is listed");
  const absl::StatusOr<v1::StoredJob> job = directory.LoadJob(kStoredJob);
  if (job.ok()) {
    Require(job->spec().name() == kStoredJob, "a job is that of its directory");
    Require(directory.RemoveJob(kStoredJob).ok() && directory.CreateJob(*job).ok(), "a job can be stored again");
    const absl::StatusOr<v1::StoredJob> again = directory.LoadJob(kStoredJob);
    Require(again.ok() && again->SerializeAsString() == job->SerializeAsString(), "a job that is written is read");
  } else {
    Require(file == kJobOfIt && absl::IsDataLoss(job.status()), "damage is told as such");
    Require(directory.RemoveJob(kStoredJob).ok() && directory.Jobs()->empty(), "a damaged job can be removed");
  }
  const StoredRole role = directory.role();
  if (role.kind == StoredRole::Kind::kNone) return;
  Require(directory.SetRole(role).ok(), "a role can be written");
  const auto again = DataDirectory::Open(disk.get(), kData);
  Require(again.ok() && (*again)->epoch() > directory.epoch(), "the epoch grows with every start");
  RequireSameRole((*again)->role(), role);
}

Seeds StoredSeeds() {
  const auto disk = GoodDirectory();
  Seeds seeds;
  for (const uint8_t file : {kJobOfIt, kEpochOfIt, kRoleOfIt, kLineageOfIt}) {
    std::vector<uint8_t>& seed = seeds.emplace_back(1, static_cast<uint8_t>(file | 4));
    const auto bytes = ReadWholeFile(*disk, FolderOf(file) + "/" + FileNameOf(file), 1 << 20);
    seed.insert(seed.end(), bytes->begin(), bytes->end());
  }
  for (const std::string_view text : {"primary 0", "fenced 7 other", "standby 18446744073709551615 x\ny"}) {
    seeds.emplace_back(1, static_cast<uint8_t>(kRoleOfIt)).insert(seeds.back().end(), text.begin(), text.end());
  }
  const std::string largest = std::to_string(std::numeric_limits<uint64_t>::max());
  seeds.emplace_back(1, static_cast<uint8_t>(kEpochOfIt)).insert(seeds.back().end(), largest.begin(), largest.end());
  return seeds;
}

}  // namespace gradwire::fuzz
