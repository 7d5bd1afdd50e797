// See restore.h.
#include "common/recovery/restore.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/sha256.h"
#include "common/base/status_macros.h"
#include "common/job/round_mode.h"
#include "common/journal/journal_reader.h"
#include "common/recovery/reach.h"
#include "common/recovery/replay.h"
#include "common/recovery/shard_files.h"
#include "common/snapshot/reshard.h"
#include "common/snapshot/snapshot_files.h"
#include "common/snapshot/snapshot_reader.h"
#include "common/storage/data_directory.h"

namespace gradwire {
namespace {

// One directory that has a shard of the job, and what can be made from it.
struct Source {
  ShardFiles files;
  bool in_use = false;
  uint64_t journal_epoch = 0;  // of the server that wrote its last segment
  // Where the shard has other sources: by bucket, what each round's update was, as a digest.
  std::vector<std::map<uint64_t, std::string>> updates = {};
  std::map<uint64_t, uint64_t> reach;  // by version of a snapshot, or of the journal's begin: what the journal goes to
  uint64_t newest() const {
    uint64_t newest = 0;
    for (const auto& [from, to] : reach) newest = std::max(newest, to);
    return newest;
  }
  // The latest start from which `version` is reached.
  std::optional<uint64_t> StartFor(uint64_t version) const {
    for (auto it = reach.rbegin(); it != reach.rend(); ++it) {
      if (it->first <= version && version <= it->second) return it->first;
    }
    return std::nullopt;
  }
  // The largest version below `limit` that is reached.
  std::optional<uint64_t> Below(uint64_t limit) const {
    std::optional<uint64_t> best;
    for (const auto& [from, to] : reach) {
      if (from < limit) best = std::max(best.value_or(0), std::min(to, limit - 1));
    }
    return best;
  }
};

std::string DigestOf(const journal::Record& record) {
  Sha256 sha;
  for (const Bytes& chunk : record.chunks) sha.Update(chunk.span());
  return sha.Hex();
}

class Restorer {
 public:
  Restorer(Disk& disk, const RestoreOptions& options, kernels::Backend* backend)
      : disk_(disk), options_(options), backend_(backend) {}

  absl::StatusOr<RestoreReport> Run() {
    GW_RETURN_IF_ERROR(CheckOptions());
    GW_RETURN_IF_ERROR(FindSources());
    GW_RETURN_IF_ERROR(CheckTargets());
    for (std::vector<Source>& sources : shards_) {
      for (Source& source : sources) GW_RETURN_IF_ERROR(Reach(source, sources.size() > 1));
      GW_RETURN_IF_ERROR(KeepOneHistory(&sources));
    }
    GW_ASSIGN_OR_RETURN(std::vector<ShardState> states, Gather());
    GW_RETURN_IF_ERROR(Write(states));
    report_.job = job().spec().name();
    report_.shards = options_.shards;
    return std::move(report_);
  }

 private:
  const Job& job() const { return *shards_[0][0].files.job; }
  const Layout& from() const { return *shards_[0][0].files.layout; }

  absl::Status CheckOptions() const {
    if (options_.from.empty() || options_.to.empty()) {
      return absl::InvalidArgumentError("name sources (--from) and targets (--to)");
    }
    if (options_.to.size() != options_.write.size()) {
      return absl::InvalidArgumentError(absl::StrFormat("%d targets for %d shards: give one data directory per shard",
                                                        options_.to.size(), options_.write.size()));
    }
    for (const uint32_t shard : options_.write) {
      if (shard < options_.shards) continue;
      return absl::InvalidArgumentError(
          absl::StrFormat("there is no shard %d of %d: the first one is 0", shard, options_.shards));
    }
    if (std::set<std::string>(options_.to.begin(), options_.to.end()).size() == options_.to.size()) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError("each shard needs a data directory of its own");
  }

  absl::Status FindSources() {
    std::vector<Source> found;
    std::set<std::string> names;
    for (const std::string& path : options_.from) {
      GW_ASSIGN_OR_RETURN(std::vector<ShardFiles> shards, FindShards(disk_, path, options_.job));
      const absl::StatusOr<bool> locked = disk_.IsLocked(path + "/" + kLockFile);
      for (ShardFiles& files : shards) {
        names.insert(files.job->spec().name());
        if (!files.damage.ok()) report_.warnings.push_back(std::string(files.damage.message()));
        Source& source = found.emplace_back();
        source.files = std::move(files);
        source.in_use = locked.ok() && *locked;
      }
    }
    if (found.empty()) {
      return absl::NotFoundError(absl::StrFormat("job '%s' is in none of the sources", options_.job));
    }
    GW_RETURN_IF_ERROR(found[0].files.job->CheckGoesWith({Feature::kRestore}));
    if (names.size() > 1) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the sources hold the jobs %s: choose one with --job", absl::StrJoin(names, ", ")));
    }
    shards_.resize(found[0].files.layout->shard_count());
    for (Source& source : found) {
      if (source.files.layout->digest() != found[0].files.layout->digest()) {
        return absl::FailedPreconditionError(absl::StrFormat(
            "'%s' and '%s' are of different jobs or shard maps: digests %016x and %016x", source.files.path,
            found[0].files.path, source.files.layout->digest(), found[0].files.layout->digest()));
      }
      epoch_ = std::max(epoch_, source.files.epoch);
    }
    for (Source& source : found) shards_[source.files.shard].push_back(std::move(source));
    for (size_t s = 0; s < shards_.size(); ++s) {
      if (!shards_[s].empty()) continue;
      return absl::FailedPreconditionError(
          absl::StrFormat("shard %d of %d is in none of the sources: name all %d", s, shards_.size(), shards_.size()));
    }
    return absl::OkStatus();
  }

  // Before anything is read for long.
  absl::Status CheckTargets() const {
    for (const std::string& path : options_.to) {
      const absl::StatusOr<std::vector<std::string>> names = disk_.List(path);
      if (absl::IsNotFound(names.status()) || (names.ok() && names->empty())) continue;
      GW_RETURN_IF_ERROR(names.status());
      const absl::StatusOr<std::vector<std::string>> jobs = ListJobs(disk_, path);
      if (!jobs.ok()) {
        return absl::AlreadyExistsError(
            absl::StrFormat("'%s' is not empty and no data directory: name an empty or a new one", path));
      }
      const std::string& name = job().spec().name();
      if (std::find(jobs->begin(), jobs->end(), name) == jobs->end()) continue;
      return absl::AlreadyExistsError(
          absl::StrFormat("'%s' has job '%s' already: name an empty or a new directory", path, name));
    }
    return absl::OkStatus();
  }

  absl::Status Reach(Source& source, bool has_others) {
    const uint32_t buckets = from().bucket_count(source.files.shard);
    JournalReach reach(buckets);
    source.updates.resize(buckets);
    if (!source.files.journal.empty()) {
      const auto damaged = [this](const journal::Damage& damage) {
        report_.warnings.push_back(absl::StrFormat("'%s' offset %d: %s", damage.path, damage.offset, damage.what));
      };
      const auto note = [&](const journal::Record& record) {
        reach.Note(record);
        if (has_others && record.type == journal::RecordType::kUpdate && record.bucket < source.updates.size()) {
          source.updates[record.bucket][record.round] = DigestOf(record);
        }
        return absl::OkStatus();
      };
      GW_ASSIGN_OR_RETURN(const journal::ReadResult read,
                          journal::InspectJournal(disk_, source.files.journal, source.files.identity(), damaged, note));
      source.journal_epoch = read.epoch;
      // EPOCH may have been lost, or the source is a job's directory alone.
      if (read.epoch < kEpochsEnd / 2) epoch_ = std::max(epoch_, read.epoch);
    }
    for (const auto& [version, path] : source.files.snapshots) source.reach[version] = reach.From(version);
    if (const auto alone = reach.Alone()) {
      source.reach.try_emplace(alone->first, alone->last);
    } else if (!job().keeps_parameters() && reach.newest() > 0) {
      source.reach.try_emplace(0, reach.From(0));
    }
    return absl::OkStatus();
  }

  // A primary that died and the standby that took over, or two copies that were both gone on from, are not one shard:
  // what one has is no part of what the other has come to. The later server's is kept.
  absl::Status KeepOneHistory(std::vector<Source>* sources) {
    const auto latest = std::ranges::max_element(*sources, {}, &Source::journal_epoch);
    const std::string path = latest->files.path;
    const uint64_t epoch = latest->journal_epoch;
    const std::vector<std::map<uint64_t, std::string>> updates = latest->updates;
    for (auto source = sources->begin(); source != sources->end();) {
      const std::optional<uint64_t> apart = WhereApart(updates, source->updates);
      if (!apart) {
        ++source;
        continue;
      }
      const std::string what = absl::StrFormat("'%s' and '%s' went apart: their records of round %d differ", path,
                                               source->files.path, *apart);
      if (source->journal_epoch == epoch) {
        return absl::FailedPreconditionError(absl::StrCat(what, ": name one of them"));
      }
      report_.warnings.push_back(absl::StrFormat("%s; the first is used, which a later server wrote (epoch %d, not %d)",
                                                 what, epoch, source->journal_epoch));
      source = sources->erase(source);
    }
    return absl::OkStatus();
  }

  // The last round of which both have the update of a bucket, and not the same one.
  static std::optional<uint64_t> WhereApart(const std::vector<std::map<uint64_t, std::string>>& a,
                                            const std::vector<std::map<uint64_t, std::string>>& b) {
    for (size_t bucket = 0; bucket < a.size(); ++bucket) {
      for (auto mine = a[bucket].rbegin(); mine != a[bucket].rend(); ++mine) {
        const auto theirs = b[bucket].find(mine->first);
        if (theirs == b[bucket].end()) continue;
        if (theirs->second != mine->second) return mine->first;
        break;
      }
    }
    return std::nullopt;
  }

  static bool Reaches(const std::vector<Source>& sources, uint64_t version) {
    return std::any_of(sources.begin(), sources.end(),
                       [&](const Source& source) { return source.StartFor(version).has_value(); });
  }

  // What each shard has, for messages.
  std::string Describe() const {
    std::string text;
    for (size_t s = 0; s < shards_.size(); ++s) {
      for (const Source& source : shards_[s]) {
        absl::StrAppend(&text, "; shard ", s, " in '", source.files.path, "':");
        if (source.reach.empty()) absl::StrAppend(&text, " nothing");
        const char* separator = " ";
        for (const auto& [first, last] : source.reach) {
          absl::StrAppend(&text, separator, first == last ? absl::StrCat(first) : absl::StrCat(first, " to ", last));
          separator = ", ";
        }
      }
    }
    return text;
  }

  absl::StatusOr<uint64_t> ChooseVersion() const {
    if (options_.version) {
      for (const auto& sources : shards_) {
        if (!Reaches(sources, *options_.version)) {
          return absl::NotFoundError(absl::StrFormat("version %d of job '%s' is not there on every shard%s",
                                                     *options_.version, job().spec().name(), Describe()));
        }
      }
      return *options_.version;
    }
    uint64_t version = UINT64_MAX;
    for (bool lowered = true; lowered;) {
      lowered = false;
      for (const auto& sources : shards_) {
        if (version != UINT64_MAX && Reaches(sources, version)) continue;
        std::optional<uint64_t> best;
        for (const Source& source : sources) best = std::max(best, source.Below(version));
        if (!best) {
          return absl::NotFoundError(absl::StrFormat(
              "job '%s' has no version that all of its shards have%s. Journals lie in data directories, "
              "not beside copied snapshots: name those, or start the servers and take snapshots "
              "together with `gradwire snapshot %s`",
              job().spec().name(), Describe(), job().spec().name()));
        }
        lowered = true;
        version = *best;
      }
    }
    return version;
  }

  // A snapshot that turns out to be damaged is passed over, and the choice made again.
  absl::StatusOr<std::vector<ShardState>> Gather() {
    GW_ASSIGN_OR_RETURN(Layout to, Layout::Make(job(), options_.shards));
    to_ = std::make_unique<Layout>(std::move(to));
    for (;;) {
      GW_ASSIGN_OR_RETURN(const uint64_t version, ChooseVersion());
      report_.version = version;
      report_.sources.clear();
      Resharder resharder(&job(), &from(), to_.get(), options_.write);
      bool again = false;
      for (uint32_t s = 0; s < shards_.size() && !again; ++s) {
        GW_ASSIGN_OR_RETURN(const std::optional<ShardState> state, Make(s, version));
        if (state) resharder.Add(s, *state);
        again = !state;
      }
      if (!again) return resharder.Finish();
    }
  }

  // The state of a shard at `version`; nothing where what it was to be made from is damaged and was struck out.
  absl::StatusOr<std::optional<ShardState>> Make(uint32_t shard, uint64_t version) {
    Source* source = nullptr;
    for (Source& candidate : shards_[shard]) {
      const auto start = candidate.StartFor(version);
      if (start && (source == nullptr || *start > *source->StartFor(version))) source = &candidate;
    }
    const uint64_t start = *source->StartFor(version);
    const ShardFiles& files = source->files;
    const auto struck = [&](const absl::Status& why) {
      report_.warnings.push_back(std::string(why.message()));
      source->reach.erase(start);
      return std::optional<ShardState>();
    };
    std::optional<ShardState> state;
    const auto snapshot = files.snapshots.find(start);
    if (snapshot != files.snapshots.end()) {
      absl::StatusOr<ShardState> loaded = LoadSnapshot(disk_, snapshot->second, job(), from(), shard);
      if (!loaded.ok()) return struck(loaded.status());
      state = *std::move(loaded);
    }
    GW_ASSIGN_OR_RETURN(const std::unique_ptr<ShardReplay> replay,
                        ShardReplay::Make(&job(), &from(), shard, backend_, std::move(state)));
    uint64_t replayed = 0;
    absl::Status failed;
    if (version > start || snapshot == files.snapshots.end()) {
      const auto apply = [&](const journal::Record& record) {
        const absl::Status applied = replay->Apply(record, version);
        if (failed.ok()) failed = applied;
        replayed += record.type == journal::RecordType::kUpdate && record.round >= start && record.round < version;
        return absl::OkStatus();
      };
      GW_RETURN_IF_ERROR(journal::InspectJournal(
                             disk_, files.journal, files.identity(), [](const journal::Damage&) {}, apply)
                             .status());
    }
    if (!replay->whole() || replay->version() != version) {
      return struck(absl::DataLossError(
          absl::StrFormat("'%s' comes to version %d from version %d, not to %d: %s", files.path, replay->version(),
                          start, version, failed.ok() ? "records are missing" : std::string(failed.message()))));
    }
    report_.sources.push_back({files.path, shard, snapshot == files.snapshots.end() ? 0 : start, replayed,
                               source->newest(), !files.journal.empty(), source->in_use});
    return replay->Take();
  }

  absl::Status Write(const std::vector<ShardState>& states) {
    std::vector<std::unique_ptr<DataDirectory>> made;
    absl::Status status;
    for (size_t i = 0; i < states.size() && status.ok(); ++i) {
      auto directory = WriteShard(options_.to[i], options_.write[i], states[i]);
      status = directory.status();
      if (directory.ok()) made.push_back(*std::move(directory));
    }
    if (status.ok()) return status;
    for (const auto& directory : made) directory->RemoveJob(job().spec().name()).IgnoreError();
    return status;
  }

  // Returns the directory, locked.
  absl::StatusOr<std::unique_ptr<DataDirectory>> WriteShard(const std::string& path, uint32_t shard,
                                                            const ShardState& state) {
    // Locks it: where a server runs there, nothing is changed.
    GW_ASSIGN_OR_RETURN(std::unique_ptr<DataDirectory> directory, DataDirectory::Open(&disk_, path));
    // Workers have seen the epochs of the servers before: those that start here must be later.
    if (directory->epoch() <= epoch_) GW_RETURN_IF_ERROR(directory->RaiseEpoch(epoch_ + 1));
    v1::StoredJob stored;
    *stored.mutable_spec() = job().spec();
    stored.set_shard_index(shard);
    stored.set_shard_count(options_.shards);
    GW_RETURN_IF_ERROR(directory->CreateJob(stored, [&](const std::string& made) {
      return SnapshotFiles(&disk_, absl::StrCat(made, "/", kSnapshots), &job(), to_.get(), shard).Write(state);
    }));
    return directory;
  }

  Disk& disk_;
  const RestoreOptions& options_;
  kernels::Backend* const backend_;
  std::vector<std::vector<Source>> shards_;  // by shard of the old job, at least one each
  std::unique_ptr<Layout> to_;
  uint64_t epoch_ = 0;
  RestoreReport report_;
};

}  // namespace

absl::StatusOr<RestoreReport> RestoreJob(Disk& disk, const RestoreOptions& options, kernels::Backend* backend) {
  return Restorer(disk, options, backend).Run();
}

}  // namespace gradwire
