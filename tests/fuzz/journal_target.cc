// Journals: any bytes in segment files are read, cut or refused; a journal that was repaired reads again, whole.
#include <algorithm>
#include <cstring>

#include "common/base/crc32c.h"
#include "common/journal/journal_reader.h"
#include "common/journal/record.h"
#include "tests/fuzz/buckets.h"
#include "tests/fuzz/chunk_input.h"
#include "tests/fuzz/record_input.h"
#include "tests/fuzz/targets.h"
#include "tests/lib/fake_disk.h"

namespace gradwire::fuzz {
namespace {

using journal::kRecordHeaderBytes;

constexpr char kDirectory[] = "/journal";
constexpr journal::Identity kIdentity = {0x1111, 0x2222, 3};
constexpr size_t kCrcOffset = 60;
constexpr size_t kMaxSegments = 3;

template <typename T>
void StoreInRecord(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof(value));
}

// Makes the checksums of segment `sequence` right, and bodies as long as what is there.
void RepairSegment(uint64_t sequence, std::vector<uint8_t>* segment) {
  if (segment->size() < journal::kSegmentHeaderBytes) return;
  uint8_t* p = segment->data();
  StoreInRecord(p + 8, sequence);
  StoreInRecord(p + kCrcOffset, Crc32c({p, kCrcOffset}));
  for (size_t at = journal::kSegmentHeaderBytes; at + kRecordHeaderBytes <= segment->size();) {
    at += RepairRecord(std::span(*segment).subspan(at), sequence);
  }
}

void WriteFile(Disk& disk, uint64_t sequence, std::span<const uint8_t> bytes) {
  const auto file = disk.Create(journal::SegmentPath(kDirectory, sequence));
  Require(file.ok() && (*file)->Append({&bytes, 1}).ok() && (*file)->Sync().ok(), "the fake disk takes files");
}

}  // namespace

// As an input of chunks, each chunk a segment's file. Odd `slicing`: checksums are made right first.
void RunJournal(Input bytes) {
  ChunkInput input = ParseInput(bytes);
  input.chunks.resize(std::min(input.chunks.size(), kMaxSegments));
  testing_support::FakeDisk disk;
  Require(disk.CreateDirectory(kDirectory).ok(), "the fake disk takes directories");
  for (size_t i = 0; i < input.chunks.size(); ++i) {
    if (input.slicing % 2 == 1) RepairSegment(i + 1, &input.chunks[i]);
    WriteFile(disk, i + 1, input.chunks[i]);
  }
  const auto read = [&disk](bool repair) {
    return journal::ReadJournal(disk, kDirectory, kIdentity, repair, [](journal::Record record) {
      RequireRoundTrip(record);
      return absl::OkStatus();
    });
  };
  const absl::StatusOr<journal::ReadResult> looked = read(false);
  bool damaged = false;
  const absl::StatusOr<journal::ReadResult> inspected = journal::InspectJournal(
      disk, kDirectory, kIdentity, [&damaged](const journal::Damage&) { damaged = true; },
      [](const journal::Record&) { return absl::OkStatus(); });
  Require(inspected.ok() && damaged == !looked.ok(), "damage is told where the journal is refused, and only there");
  const absl::StatusOr<journal::ReadResult> found = read(true);
  Require(looked.ok() == found.ok(), "repair does not change the verdict");
  if (!found.ok()) return;
  const absl::StatusOr<journal::ReadResult> again = read(true);
  Require(again.ok() && again->torn_bytes == 0 && again->records == found->records, "a repaired journal is whole");
}

Seeds JournalSeeds() {
  Seeds seeds;
  for (const Bucket& bucket : Buckets()) {
    ChunkInput input{0, 0, 1, {}};
    for (uint64_t sequence = 1; sequence <= 2; ++sequence) {
      const uint64_t before = sequence == 1 ? 0 : input.chunks[0].size();
      std::vector<uint8_t> segment = journal::EncodeSegmentHeader({sequence, 1, kIdentity, before});
      for (const Round& round : bucket.rounds) {
        journal::Record record;
        record.round = round.round;
        record.contributions = {{7, "worker-0", 1, 2, true}, {8, "", 3, 4, false}};
        record.chunks = round.update;
        const std::vector<uint8_t> bytes = BytesOf(journal::EncodeRecord(record, sequence, segment.size()));
        segment.insert(segment.end(), bytes.begin(), bytes.end());
      }
      input.chunks.push_back(std::move(segment));
    }
    seeds.push_back(ToBytes(input));
    input.slicing = 0;
    std::vector<uint8_t>& torn = input.chunks[1];
    torn.erase(torn.end() - 20, torn.end());  // GCC takes resize() for one that may grow without end
    seeds.push_back(ToBytes(input));
  }
  return seeds;
}

}  // namespace gradwire::fuzz
