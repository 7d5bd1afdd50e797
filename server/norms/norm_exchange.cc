// See norm_exchange.h.
#include "server/norms/norm_exchange.h"

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
                           Written written, std::function<void()> heard)
    : job_(*job),
      layout_(*layout),
      shard_(shard),
      norms_(CountsOf(*job)),
      sums_(layout, job->tensors().size()),
      tellers_(std::move(tellers)),
      written_(std::move(written)),
      heard_(std::move(heard)),
      lines_(layout->shard_count()) {
  for (Line& line : lines_) line.pause = kFirstPause;
}

NormExchange::~NormExchange() { Stop(); }

absl::Status NormExchange::Start() {
  return tellers_ != nullptr && layout_.shard_count() > 1 ? tellers_->Add(this) : absl::OkStatus();
}

void NormExchange::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
  }
  if (tellers_ != nullptr) tellers_->Remove(this);
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
  if (tellers_ != nullptr) tellers_->Wake();
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

void NormExchange::Offer(uint64_t round, size_t phase, ShardSquares own) {
  const Key key{round, phase};
  const uint32_t shards = layout_.shard_count();
  {
    absl::MutexLock lock(&mu_);
    if (stopped_) return;
    if (shards > 1) {
      Own& mine = own_[key];
      mine.sums = sums_.Encode(shard_, own, norms_[phase]);
      mine.due.assign(shards, absl::InfinitePast());
      mine.due[shard_] = absl::InfiniteFuture();
    }
    Note(key, shard_, std::move(own));
  }
  if (shards > 1 && tellers_ != nullptr) tellers_->Wake();
}

std::optional<NormExchange::Agreed> NormExchange::TryAgree(uint64_t round, size_t phase) {
  const Key key{round, phase};
  absl::MutexLock lock(&mu_);
  const auto told = theirs_.find(key);
  if (stopped_ || told == theirs_.end() || told->second.missing > 0) return std::nullopt;
  std::vector<ShardSquares> all;
  for (std::optional<ShardSquares>& of : told->second.of) all.push_back(*std::move(of));
  theirs_.erase(told);
  Agreed agreed;
  agreed.sums = sums_.Add(all, norms_[phase]);
  agreed.skipped = SkipsNonFinite(job_) && SkipsRound(all);  // whatever a peer answers
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
  if (request.sums().fate() != v1::FATE_UNSPECIFIED && !SkipsNonFinite(job_)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job '%s': shard %d tells the fate of a round to shard %d, and the job skips none",
                        job_.spec().name(), request.shard(), shard_));
  }
  const Key key{request.round(), request.phase()};
  GW_ASSIGN_OR_RETURN(ShardSquares squares, sums_.Decode(request.shard(), request.sums(), norms_[request.phase()]));
  v1::ExchangeReply reply;
  bool before = false;
  bool noted = false;
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
    noted = !before && !(own != own_.end() && !theirs_.contains(key));
    if (noted) Note(key, request.shard(), std::move(squares));
  }
  if (noted) heard_();
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
  const absl::Status told = CatchBadAlloc("telling norms", [this, to] {
    const std::optional<Question> question = Begin(to);
    if (!question) return absl::OkStatus();
    const absl::Status carried = Carry(to, *question);
    NoteTold(to, *question, carried);
    return carried;
  });
  Ended(to, told.ok(), absl::Now());
}

std::optional<NormExchange::Question> NormExchange::Begin(size_t to) const {
  const auto shard = static_cast<uint32_t>(to);
  absl::MutexLock lock(&mu_);
  const Key* const key = stopped_ ? nullptr : ToTell(shard);
  if (key == nullptr || addresses_.current().empty()) return std::nullopt;
  v1::ExchangeRequest request;
  request.set_job(job_.spec().name());
  request.set_layout_digest(layout_.digest());
  request.set_shard(shard_);
  request.set_round(key->first);
  request.set_phase(static_cast<uint32_t>(key->second));
  *request.mutable_sums() = own_.at(*key).sums;
  const std::vector<std::string> alternatives = absl::StrSplit(addresses_.current()[shard], '|');
  return Question{*key, alternatives[lines_[shard].alternative % alternatives.size()], request.SerializeAsString()};
}

absl::Status NormExchange::Carry(size_t to, const Question& question) {
  std::shared_ptr<transport::Channel> channel;
  {
    absl::MutexLock lock(&mu_);
    if (stopped_) return absl::OkStatus();
    if (lines_[to].dialled == question.address) channel = lines_[to].channel;
  }
  if (channel == nullptr) {
    GW_ASSIGN_OR_RETURN(channel, transport::Dial(question.address));
    std::shared_ptr<transport::Channel> given_up = channel;  // goes without the lock
    absl::MutexLock lock(&mu_);
    if (stopped_) return absl::OkStatus();
    lines_[to].dialled = question.address;
    lines_[to].channel.swap(given_up);
  }
  GW_ASSIGN_OR_RETURN(const std::string reply,
                      channel->Call("gradwire.v1.Peer/Exchange", question.request, kCallTimeoutMs));
  return Answered(to, question.key, reply, absl::Now());
}

absl::Status NormExchange::Answered(size_t to, const Key& key, const std::string& bytes, absl::Time now) {
  const auto shard = static_cast<uint32_t>(to);
  v1::ExchangeReply reply;
  if (!reply.ParseFromString(bytes)) return absl::InvalidArgumentError("not a gradwire.v1.ExchangeReply");
  std::optional<ShardSquares> theirs;
  if (reply.has_sums()) {
    GW_ASSIGN_OR_RETURN(theirs, sums_.Decode(shard, reply.sums(), norms_[key.second]));
  }
  {
    absl::MutexLock lock(&mu_);
    const auto own = own_.find(key);
    if (own == own_.end()) return absl::OkStatus();
    own->second.due[shard] = now + kAskAgain;
    // Not where the exchange is over.
    const auto waiting = theirs_.find(key);
    if (!theirs || waiting == theirs_.end()) return absl::OkStatus();
    Note(key, shard, *std::move(theirs));
  }
  heard_();
  return absl::OkStatus();
}

void NormExchange::NoteTold(size_t to, const Question& question, const absl::Status& told) {
  {
    absl::MutexLock lock(&mu_);
    if (told.ok() || stopped_ || absl::Now() - lines_[to].warned <= kBetweenWarnings) return;
    lines_[to].warned = absl::Now();
  }
  spdlog::warn("job {} round {}: shard {} at {} cannot be told of norms, and the round waits for it: {}",
               job_.spec().name(), question.key.first, to, question.address, told.ToString());
}

void NormExchange::Ended(size_t to, bool told, absl::Time now) {
  std::shared_ptr<transport::Channel> given_up;  // goes without the lock
  absl::MutexLock lock(&mu_);
  if (stopped_) return;
  Line& line = lines_[to];
  line.telling = false;
  line.proven = told;
  if (told) {
    line.pause = kFirstPause;
    return;
  }
  given_up = std::move(line.channel);
  line.channel = nullptr;
  ++line.alternative;
  line.next = now + line.pause;
  line.pause = std::min(2 * line.pause, kLongestPause);
}

}  // namespace gradwire
