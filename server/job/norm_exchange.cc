// See norm_exchange.h.
#include "server/job/norm_exchange.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/base/names.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "common/job/norms.h"

namespace gradwire {
namespace {

constexpr int64_t kCallTimeoutMs = 2000;
constexpr absl::Duration kFirstPause = absl::Milliseconds(5);
constexpr absl::Duration kLongestPause = absl::Milliseconds(500);
constexpr absl::Duration kBetweenWarnings = absl::Seconds(10);
// A shard that did not have its squares yet tells them by itself. Not where it died when it had agreed: it comes back
// behind that round, and has to be asked.
constexpr absl::Duration kAskAgain = absl::Seconds(1);
constexpr size_t kMaxAddressBytes = 4096;
constexpr size_t kMaxAddressesBytes = 1u << 20;

std::vector<size_t> CountsOf(const Job& job) {
  std::vector<size_t> counts;
  for (const std::vector<Norm>& phase : NormPhases(job)) counts.push_back(phase.size());
  return counts;
}

}  // namespace

NormExchange::NormExchange(const Job* job, const Layout* layout, uint32_t shard, std::shared_ptr<Tellers> tellers,
                           Written written)
    : job_(*job),
      layout_(*layout),
      shard_(shard),
      norms_(CountsOf(*job)),
      sums_(layout, job->tensors().size()),
      tellers_(std::move(tellers)),
      written_(std::move(written)),
      lines_(layout->shard_count()) {
  for (Line& line : lines_) line.pause = kFirstPause;
}

NormExchange::~NormExchange() { Stop(); }

absl::Status NormExchange::Start() {
  return layout_.shard_count() > 1 ? tellers_->Add(this) : absl::OkStatus();
}

void NormExchange::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
  }
  tellers_->Remove(this);
  // Here and not with this: that may go inside a sink, where channels must not.
  std::vector<Line> lines;
  {
    absl::MutexLock lock(&mu_);
    lines.swap(lines_);
  }
}

absl::Status NormExchange::CheckAddresses(const std::vector<std::string>& addresses) const {
  size_t bytes = 0;
  for (const std::string& address : addresses) bytes += address.size();
  const bool bad_one = std::any_of(addresses.begin(), addresses.end(), [](const std::string& address) {
    return address.size() > kMaxAddressBytes || !IsPlainText(address);
  });
  if (addresses.size() == layout_.shard_count() && !bad_one && bytes <= kMaxAddressesBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "job '%s': its shards exchange norms and reach each other where its workers do; this worker named %d addresses "
      "of %d shards in %d bytes%s: use a client of this server's version",
      job_.spec().name(), addresses.size(), layout_.shard_count(), bytes,
      bad_one ? ", one of them too long or not printable" : ""));
}

void NormExchange::SetAddresses(MemberId member, const std::vector<std::string>& addresses) {
  {
    absl::MutexLock lock(&mu_);
    addresses_.Vote(member, addresses);
  }
  tellers_->Wake();
}

void NormExchange::ForgetAddresses(MemberId member) {
  absl::MutexLock lock(&mu_);
  addresses_.Forget(member);
}

void NormExchange::SetRound(uint64_t round) {
  absl::MutexLock lock(&mu_);
  round_ = round;
  std::erase_if(theirs_, [round](const auto& entry) { return entry.first.first < round; });
  // A server that was started again may have lost what of the open rounds had not been seen by anybody.
  const uint64_t kept = 2 + job_.spec().rounds().staleness();
  std::erase_if(own_, [&](const auto& entry) { return entry.first.first + kept < round; });
}

absl::StatusOr<NormExchange::Agreed> NormExchange::Exchange(uint64_t round, size_t phase, ShardSquares own) {
  const Key key{round, phase};
  const uint32_t shards = layout_.shard_count();
  {
    absl::MutexLock lock(&mu_);
    if (stopped_) return absl::CancelledError("the job ends");
    if (shards > 1) {
      Own& mine = own_[key];
      mine.sums = sums_.Encode(shard_, own, norms_[phase]);
      mine.due.assign(shards, absl::InfinitePast());
      mine.due[shard_] = absl::InfiniteFuture();
    }
    Note(key, shard_, std::move(own));
  }
  if (shards > 1) tellers_->Wake();
  absl::MutexLock lock(&mu_);
  const auto done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopped_ || theirs_[key].missing == 0; };
  mu_.Await(absl::Condition(&done));
  if (stopped_) return absl::CancelledError("the job ends");
  std::vector<ShardSquares> all;
  for (std::optional<ShardSquares>& of : theirs_[key].of) all.push_back(*std::move(of));
  theirs_.erase(key);
  Agreed agreed;
  agreed.sums = sums_.Add(all, norms_[phase]);
  agreed.skipped = SkipsRound(all);
  // A shard that was started again may have other frames in the round: what was agreed on holds.
  const auto mine = own_.find(key);
  if (SkipsNonFinite(job_) && mine != own_.end()) {
    mine->second.sums.set_fate(agreed.skipped ? v1::FATE_SKIPPED : v1::FATE_APPLIED);
  }
  return agreed;
}

void NormExchange::Note(const Key& key, uint32_t shard, ShardSquares squares) {
  Theirs& theirs = theirs_[key];
  if (theirs.of.empty()) {
    theirs.of.resize(layout_.shard_count());
    theirs.missing = layout_.shard_count();
  }
  if (!theirs.of[shard]) --theirs.missing;
  theirs.of[shard] = std::move(squares);
}

absl::StatusOr<v1::ExchangeReply> NormExchange::Take(const v1::ExchangeRequest& request) {
  if (request.layout_digest() != layout_.digest()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("job '%s': shard %d has shard map %016x, this one %016x: not the same job", job_.spec().name(),
                        request.shard(), request.layout_digest(), layout_.digest()));
  }
  if (request.shard() >= layout_.shard_count() || request.shard() == shard_ || request.phase() >= norms_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("job '%s': shard %d tells norms of phase %d to shard %d of %d",
                                                      job_.spec().name(), request.shard(), request.phase(), shard_,
                                                      layout_.shard_count()));
  }
  const Key key{request.round(), request.phase()};
  GW_ASSIGN_OR_RETURN(ShardSquares squares, sums_.Decode(request.shard(), request.sums(), norms_[request.phase()]));
  v1::ExchangeReply reply;
  bool before = false;
  {
    absl::MutexLock lock(&mu_);
    if (stopped_) return absl::UnavailableError("the job ends");
    if (key.first > round_ + 1 + job_.spec().rounds().staleness()) {
      return absl::FailedPreconditionError(absl::StrFormat("job '%s': norms of round %d, but shard %d is in round %d",
                                                           job_.spec().name(), key.first, shard_, round_));
    }
    before = key.first < round_;
    const auto own = own_.find(key);
    if (own != own_.end()) *reply.mutable_sums() = own->second.sums;
    // What is in use already was taken out.
    if (!before && !(own != own_.end() && !theirs_.contains(key))) Note(key, request.shard(), std::move(squares));
  }
  if (before && !reply.has_sums()) {
    const std::optional<ShardSquares> written = written_(key.first, key.second);
    if (written) *reply.mutable_sums() = sums_.Encode(shard_, *written, norms_[key.second]);
  }
  return reply;
}

bool NormExchange::IsMissing(const Key& key, uint32_t shard) const {
  const auto waiting = theirs_.find(key);
  return waiting != theirs_.end() && !waiting->second.of.empty() && !waiting->second.of[shard];
}

const NormExchange::Key* NormExchange::ToTell(uint32_t shard) const {
  const Key* first = nullptr;
  absl::Time due = absl::InfiniteFuture();
  for (const auto& [key, own] : own_) {
    const bool told = own.due[shard] != absl::InfinitePast();
    if (own.due[shard] >= due || (told && !IsMissing(key, shard))) continue;
    first = &key;
    due = own.due[shard];
  }
  return first;
}

Telling::Next NormExchange::TakeNext(bool unproven, absl::Time now) {
  Next next;
  absl::MutexLock lock(&mu_);
  if (stopped_ || addresses_.current().empty() || own_.empty()) return next;
  const uint32_t shards = layout_.shard_count();
  for (uint32_t i = 0; i < shards; ++i) {
    const uint32_t shard = (turn_ + i) % shards;
    Line& line = lines_[shard];
    const Key* const key = line.telling ? nullptr : ToTell(shard);
    if (key == nullptr) continue;
    const absl::Time due = std::max(line.next, own_.at(*key).due[shard]);
    if (due > now) {
      next.due = std::min(next.due, due);
      continue;
    }
    if (!line.proven && !unproven) continue;  // a call that ends makes room for it
    line.telling = true;
    turn_ = shard + 1;
    next.to = shard;
    next.proven = line.proven;
    break;
  }
  return next;
}

void NormExchange::Tell(size_t to) {
  const auto shard = static_cast<uint32_t>(to);
  Line line;
  {
    absl::MutexLock lock(&mu_);
    line = lines_[shard];
    lines_[shard].channel = nullptr;
  }
  const absl::Status told =
      CatchBadAlloc("telling norms", [this, shard, &line] { return TellOnce(shard, line); });
  std::shared_ptr<transport::Channel> given_up;
  if (told.ok()) {
    line.pause = kFirstPause;
  } else {
    given_up = std::move(line.channel);
    line.channel = nullptr;
    ++line.alternative;
    line.next = absl::Now() + line.pause;
    line.pause = std::min(2 * line.pause, kLongestPause);
  }
  line.proven = told.ok();
  line.telling = false;
  absl::MutexLock lock(&mu_);
  lines_[shard] = std::move(line);
}

absl::Status NormExchange::TellOnce(uint32_t shard, Line& line) {
  Key key;
  v1::NormSums sums;
  std::string address;
  {
    absl::MutexLock lock(&mu_);
    const Key* const next = ToTell(shard);
    if (stopped_ || next == nullptr || addresses_.current().empty()) return absl::OkStatus();
    key = *next;
    sums = own_.at(key).sums;
    const std::vector<std::string> alternatives = absl::StrSplit(addresses_.current()[shard], '|');
    address = alternatives[line.alternative % alternatives.size()];
  }
  absl::Status told;
  if (line.channel == nullptr || line.dialled != address) {
    absl::StatusOr<std::shared_ptr<transport::Channel>> made = transport::Dial(address);
    told = made.status();
    line.channel = made.ok() ? *std::move(made) : nullptr;
    line.dialled = address;
  }
  if (told.ok()) told = Call(shard, key, sums, *line.channel);
  if (!told.ok() && absl::Now() - line.warned > kBetweenWarnings) {
    line.warned = absl::Now();
    spdlog::warn("job {} round {}: shard {} at {} cannot be told of norms, and the round waits for it: {}",
                 job_.spec().name(), key.first, shard, address, told.ToString());
  }
  return told;
}

absl::Status NormExchange::Call(uint32_t shard, const Key& key, const v1::NormSums& sums, transport::Channel& channel) {
  v1::ExchangeRequest request;
  request.set_job(job_.spec().name());
  request.set_layout_digest(layout_.digest());
  request.set_shard(shard_);
  request.set_round(key.first);
  request.set_phase(static_cast<uint32_t>(key.second));
  *request.mutable_sums() = sums;
  GW_ASSIGN_OR_RETURN(const std::string bytes,
                      channel.Call("gradwire.v1.Peer/Exchange", request.SerializeAsString(), kCallTimeoutMs));
  v1::ExchangeReply reply;
  if (!reply.ParseFromString(bytes)) return absl::InvalidArgumentError("not a gradwire.v1.ExchangeReply");
  std::optional<ShardSquares> theirs;
  if (reply.has_sums()) {
    GW_ASSIGN_OR_RETURN(theirs, sums_.Decode(shard, reply.sums(), norms_[key.second]));
  }
  absl::MutexLock lock(&mu_);
  const auto own = own_.find(key);
  if (own == own_.end()) return absl::OkStatus();
  own->second.due[shard] = absl::Now() + kAskAgain;
  // Not where the exchange is over.
  const auto waiting = theirs_.find(key);
  if (theirs && waiting != theirs_.end()) Note(key, shard, *std::move(theirs));
  return absl::OkStatus();
}

}  // namespace gradwire
