// What encoding threads are to do next: the order of tasks, and which of them must not run beside each other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace gradwire::client {

// Where a task stands among the others.
struct TaskPlace {
  // What leaves soonest goes first.
  enum class Rank : uint8_t { kMessage, kEncode, kTakeIn };
  static constexpr uint32_t kNone = UINT32_MAX;

  Rank rank = Rank::kTakeIn;
  uint32_t turn = 0;  // among those of a rank, and then in the order in which they came
  // Tasks of the same slice never run beside each other, nor does one of a whole shard beside any of that shard.
  uint32_t shard = kNone;
  uint32_t slice = kNone;   // with a shard; none: all of the shard's
  bool needs_room = false;  // not before the shard's link has some

  bool operator==(const TaskPlace&) const = default;
  bool Collides(const TaskPlace& other) const {
    return shard != kNone && shard == other.shard && (slice == kNone || other.slice == kNone || slice == other.slice);
  }
};

// Not thread-safe.
template <typename Task>
class TaskQueue {
 public:
  struct Entry {
    TaskPlace place;
    Task task;
  };

  void Add(const TaskPlace& place, Task task) {
    const Key key{place.rank, place.turn, added_++};
    if (spare_.empty()) {
      waiting_.emplace(key, Entry{place, std::move(task)});
      return;
    }
    Node node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = key;
    node.mapped() = {place, std::move(task)};
    waiting_.insert(std::move(node));
  }
  // Whether a task may begin. `has_room`: of a shard.
  template <typename HasRoom>
  bool CanBegin(const HasRoom& has_room) const {
    return First(has_room) != waiting_.end();
  }
  // The first one that may; it is at work until End. Nothing: none may now.
  template <typename HasRoom>
  std::optional<Entry> Begin(const HasRoom& has_room) {
    const auto first = First(has_room);
    if (first == waiting_.end()) return std::nullopt;
    at_work_.push_back(first->second.place);
    Node node = waiting_.extract(first);
    std::optional<Entry> entry(std::move(node.mapped()));
    if (spare_.size() < kMaxSpare) spare_.push_back(std::move(node));
    return entry;
  }
  void End(const TaskPlace& place) { at_work_.erase(std::find(at_work_.begin(), at_work_.end(), place)); }
  void Clear() { waiting_.clear(); }

  size_t size() const { return waiting_.size(); }
  bool empty() const { return waiting_.empty(); }
  size_t at_work() const { return at_work_.size(); }

 private:
  using Key = std::tuple<TaskPlace::Rank, uint32_t, uint64_t>;
  using Node = typename std::map<Key, Entry>::node_type;
  static constexpr size_t kMaxSpare = 64;

  template <typename HasRoom>
  typename std::map<Key, Entry>::const_iterator First(const HasRoom& has_room) const {
    // One that waits for another to end keeps its place before those that came later.
    std::vector<TaskPlace> before;
    const auto collides = [](const std::vector<TaskPlace>& places, const TaskPlace& place) {
      return std::any_of(places.begin(), places.end(), [&](const TaskPlace& other) { return other.Collides(place); });
    };
    for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
      const TaskPlace& place = it->second.place;
      if (place.needs_room && !has_room(place.shard)) continue;
      if (!collides(at_work_, place) && !collides(before, place)) return it;
      before.push_back(place);
    }
    return waiting_.end();
  }

  std::map<Key, Entry> waiting_;
  std::vector<Node> spare_;  // for tasks to come: a small round would spend as long on memory as on its queue
  std::vector<TaskPlace> at_work_;
  uint64_t added_ = 0;
};

}  // namespace gradwire::client
