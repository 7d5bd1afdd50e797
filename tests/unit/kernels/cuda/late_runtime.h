// A device that does nothing until it is told to: copies and events stand in their stream's queue, so tests see what
// happens while a copy has not been made yet. Memory is the host's, and limited.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>

#include "kernels/cuda/async_backend.h"

namespace gradwire::kernels::cuda {

// Thread-compatible.
class LateRuntime final : public DeviceRuntime {
 public:
  explicit LateRuntime(size_t memory_bytes) : left_(memory_bytes) {}

  // Does the next thing of a stream's queue; false if there is none.
  bool Step(Stream* stream) {
    std::deque<std::function<void()>>& queue = queues_[stream];
    if (queue.empty()) return false;
    queue.front()();
    queue.pop_front();
    return true;
  }
  size_t left() const { return left_; }

  std::string Describe() override { return "a late device"; }
  void* Allocate(size_t bytes, Stream*) override { return AllocatePinned(bytes); }
  void Free(void* p, Stream*) override { FreePinned(p); }
  void* AllocatePinned(size_t bytes) override {
    if (bytes > left_) return nullptr;
    left_ -= bytes;
    void* p = std::malloc(bytes);
    sizes_[p] = bytes;
    return p;
  }
  void FreePinned(void* p) override {
    left_ += sizes_.at(p);
    sizes_.erase(p);
    std::free(p);
  }
  size_t FreeBytes() override { return left_; }
  Stream* NewStream() override { return reinterpret_cast<Stream*>(++handles_); }
  void DeleteStream(Stream*) override {}
  void ToDevice(void* to, const void* from, size_t bytes, Stream* stream) override { Copy(to, from, bytes, stream); }
  void ToHost(void* to, const void* from, size_t bytes, Stream* stream) override { Copy(to, from, bytes, stream); }
  void Copy(void* to, const void* from, size_t bytes, Stream* stream) override {
    queues_[stream].push_back([=] { std::memcpy(to, from, bytes); });
  }
  void Fill(void* p, int byte, size_t bytes, Stream* stream) override {
    queues_[stream].push_back([=] { std::memset(p, byte, bytes); });
  }
  void Synchronize(Stream* stream) override {
    while (Step(stream)) {
    }
  }
  Event* NewEvent() override { return reinterpret_cast<Event*>(++handles_); }
  void DeleteEvent(Event* event) override { pending_.erase(event); }
  void Record(Event* event, Stream* stream) override {
    pending_[event] = stream;
    queues_[stream].push_back([this, event] { pending_.erase(event); });
  }
  void Wait(Stream*, Event*) override {}
  bool Done(Event* event) override { return pending_.count(event) == 0; }
  void WaitOnHost(Event* event) override {
    while (!Done(event)) Step(pending_.at(event));
  }
  double Seconds(Event*, Event*) override { return 0; }

 private:
  size_t left_;
  uintptr_t handles_ = 0;
  std::map<void*, size_t> sizes_;
  std::map<Stream*, std::deque<std::function<void()>>> queues_;
  std::map<Event*, Stream*> pending_;
};

}  // namespace gradwire::kernels::cuda
