// A device on the host that lags behind, as a GPU does: copies, fills, kernels and frees stand in the queue of their
// stream and are done as late as their waits allow, or some of them earlier, at random. What is read before it was
// waited for, or overwritten before it was read, shows as wrong bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "kernels/cuda/device_backend.h"
#include "tests/gpu/host/host_device.h"

namespace gradwire::kernels::cuda {

enum class Lag { kLatest, kRandom };

// Operations' Device. Thread-safe. The null stream, a thread's own, does not lag.
class QueuedDevice final : public DeviceRuntime {
 public:
  using Tiles = HostTiles;

  explicit QueuedDevice(const HostDeviceOptions& options, Lag lag)
      : host_(options), lag_(lag), left_(options.memory_bytes) {}
  ~QueuedDevice() override {
    for (auto& [stream, queue] : queues_) Run(queue, queue.added);
  }

  template <class Body>
  void Launch(const Body& body, uint64_t blocks, size_t shared_bytes, Stream* stream) {
    if (blocks == 0) return;
    Enqueue(stream, [=, this] { host_.Launch(body, blocks, shared_bytes, nullptr); });
  }
  void Fill(void* p, int byte, size_t bytes, Stream* stream) override {
    Enqueue(stream, [=, this] { host_.Fill(p, byte, bytes, nullptr); });
  }
  uint32_t units() const { return host_.units(); }
  size_t shared_limit() const { return host_.shared_limit(); }
  size_t TileBytes(uint32_t count) const { return host_.TileBytes(count); }
  Tiles MakeTiles(uint32_t count, uint8_t* memory, size_t bytes) const { return host_.MakeTiles(count, memory, bytes); }

  void* Allocate(size_t bytes, Stream*) override {
    const absl::MutexLock lock(&mutex_);
    if (bytes > left_) return nullptr;
    left_ -= bytes;
    void* p = host_.Allocate(bytes, nullptr);
    sizes_[p] = bytes;
    return p;
  }
  void Free(void* p, Stream* stream) override {
    Enqueue(stream, [=, this] {
      left_ += sizes_.at(p);
      sizes_.erase(p);
      host_.Free(p, nullptr);
    });
  }
  void* AllocatePinned(size_t bytes) override {
    const absl::MutexLock lock(&mutex_);
    void* p = host_.AllocatePinned(bytes);
    pinned_[static_cast<uint8_t*>(p)] = bytes;
    return p;
  }
  void FreePinned(void* p) override {
    const absl::MutexLock lock(&mutex_);
    pinned_.erase(static_cast<uint8_t*>(p));
    host_.FreePinned(p);
  }
  size_t FreeBytes() override {
    const absl::MutexLock lock(&mutex_);
    return left_;
  }

  Stream* NewStream() override {
    const absl::MutexLock lock(&mutex_);
    return reinterpret_cast<Stream*>(++handles_);
  }
  void DeleteStream(Stream*) override {}

  void ToDevice(void* to, const void* from, size_t bytes, Stream* stream) override {
    if (bytes == 0) return;
    if (IsPinned(from)) return Copy(to, from, bytes, stream);
    const auto* source = static_cast<const uint8_t*>(from);
    Enqueue(stream,
            [to, copy = std::vector<uint8_t>(source, source + bytes)] { std::memcpy(to, copy.data(), copy.size()); });
  }
  void ToHost(void* to, const void* from, size_t bytes, Stream* stream) override {
    Copy(to, from, bytes, stream);
    if (bytes != 0 && !IsPinned(to)) Synchronize(stream);
  }
  void Copy(void* to, const void* from, size_t bytes, Stream* stream) override {
    Enqueue(stream, [=, this] { host_.Copy(to, from, bytes, nullptr); });
  }
  void Synchronize(Stream* stream) override {
    const absl::MutexLock lock(&mutex_);
    Queue& queue = queues_[stream];
    Run(queue, queue.added);
  }

  Event* NewEvent() override {
    const absl::MutexLock lock(&mutex_);
    return reinterpret_cast<Event*>(++handles_);
  }
  void DeleteEvent(Event* event) override {
    const absl::MutexLock lock(&mutex_);
    recorded_.erase(event);
  }
  void Record(Event* event, Stream* stream) override {
    const absl::MutexLock lock(&mutex_);
    recorded_[event] = {stream, queues_[stream].added};
  }
  void Wait(Stream* stream, Event* event) override {
    Enqueue(stream, [this, point = At(event)] { Run(queues_[point.stream], point.position); });
  }
  bool Done(Event* event) override {
    const Point point = At(event);
    const absl::MutexLock lock(&mutex_);
    return queues_[point.stream].done >= point.position;
  }
  void WaitOnHost(Event* event) override {
    const Point point = At(event);
    const absl::MutexLock lock(&mutex_);
    Run(queues_[point.stream], point.position);
  }
  double Seconds(Event*, Event*) override { return 0; }
  std::string Describe() override { return "the host, late"; }

  // Allocations, pinned ones too, that were not freed.
  int64_t allocated() const { return host_.allocated(); }
  // How often something was launched and not done at once.
  uint64_t queued() const {
    const absl::MutexLock lock(&mutex_);
    return queued_;
  }

 private:
  struct Queue {
    std::deque<std::function<void()>> waiting;
    uint64_t added = 0;
    uint64_t done = 0;
  };
  // Of a stream: after so many launches.
  struct Point {
    Stream* stream = nullptr;
    uint64_t position = 0;
  };

  void Enqueue(Stream* stream, std::function<void()> what) {
    const absl::MutexLock lock(&mutex_);
    Queue& queue = queues_[stream];
    queue.waiting.push_back(std::move(what));
    ++queue.added;
    ++queued_;
    if (stream == nullptr) return Run(queue, queue.added);
    if (lag_ == Lag::kLatest || random_() % 2 == 0) return;
    auto some = std::next(queues_.begin(), static_cast<ptrdiff_t>(random_() % queues_.size()));
    Run(some->second, some->second.done + random_() % (some->second.waiting.size() + 1));
  }

  // The mutex is held; what runs may run another queue.
  static void Run(Queue& queue, uint64_t position) {
    while (queue.done < position) {
      const std::function<void()> next = std::move(queue.waiting.front());
      queue.waiting.pop_front();
      ++queue.done;
      next();
    }
  }

  Point At(Event* event) const {
    const absl::MutexLock lock(&mutex_);
    const auto it = recorded_.find(event);
    return it == recorded_.end() ? Point{} : it->second;
  }

  bool IsPinned(const void* p) const {
    const absl::MutexLock lock(&mutex_);
    auto it = pinned_.upper_bound(static_cast<uint8_t*>(const_cast<void*>(p)));
    return it != pinned_.begin() && p < std::prev(it)->first + std::prev(it)->second;
  }

  HostDevice host_;
  const Lag lag_;
  mutable absl::Mutex mutex_;
  size_t left_;
  uintptr_t handles_ = 0;
  uint64_t queued_ = 0;
  std::mt19937_64 random_{11};
  std::map<void*, size_t> sizes_;
  std::map<uint8_t*, size_t> pinned_;
  std::map<Stream*, Queue> queues_;
  std::map<Event*, Point> recorded_;
};

using QueuedBackend = OwningDeviceBackend<QueuedDevice>;

}  // namespace gradwire::kernels::cuda
