// Runs the kernel bodies of kernels/cuda on the host: a thin layer of blocks and threads. Within a phase, threads run
// in an order that is chosen (forward, backward, shuffled), so a result that depends on it shows. Blocks run one after
// the other in such an order too. Both can also run on several host threads at once, where ThreadSanitizer sees races.
// Scratch, shared memory and registers start as garbage, and their ends are those of the allocation (AddressSanitizer).
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "kernels/cuda/async_backend.h"
#include "kernels/cuda/bodies/block.cuh"

namespace gradwire::kernels::cuda {

enum class Order { kForward, kBackward, kShuffled };

// Inclusive running totals of tiles, or kPending.
struct HostTiles {
  static constexpr uint64_t kPending = ~uint64_t{0};
  uint64_t* inclusive;
};

class HostBlock {
 public:
  // `order`: a permutation of the threads. `shared`: garbage. `workers`: host threads that share each phase.
  HostBlock(uint64_t index, uint64_t count, const std::vector<uint32_t>& order, void* shared, int workers)
      : index_(index), count_(count), order_(order), shared_(shared), workers_(static_cast<size_t>(workers)) {}

  template <class T>
  class PerThread {
   public:
    explicit PerThread(const HostBlock& block) : values_(new T[block.order_.size()]) {
      std::memset(static_cast<void*>(values_.get()), 0xCD, block.order_.size() * sizeof(T));
    }
    T& operator[](uint32_t thread) { return values_[thread]; }

   private:
    std::unique_ptr<T[]> values_;
  };

  uint64_t index() const { return index_; }
  uint64_t count() const { return count_; }

  template <class F>
  void Phase(F f) {
    if (ended_) std::abort();  // a body with a phase after its last: on a device a barrier would be missing
    if (workers_ <= 1) {
      for (uint32_t thread : order_) f(thread);
      return;
    }
    std::vector<std::thread> threads;
    for (size_t w = 0; w < workers_; ++w) {
      threads.emplace_back([&, w] {
        for (size_t i = w; i < order_.size(); i += workers_) f(order_[i]);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  template <class F>
  void Final(F f) {
    Phase(f);
    ended_ = true;
  }

  template <class T>
  T* Shared() {
    return static_cast<T*>(shared_);
  }

  template <class T>
  T ExclusiveSum(PerThread<T>& values) {
    T sum = 0;
    for (uint32_t thread = 0; thread < order_.size(); ++thread) sum += std::exchange(values[thread], sum);
    return sum;
  }

  uint32_t Max(PerThread<uint32_t>& values) {
    uint32_t most = 0;
    for (uint32_t thread = 0; thread < order_.size(); ++thread) most = std::max(most, values[thread]);
    return most;
  }

  uint32_t TilePrefix(HostTiles tiles, uint32_t total) {
    uint64_t before = 0;
    if (index_ > 0) {
      const std::atomic_ref<uint64_t> last(tiles.inclusive[index_ - 1]);
      while ((before = last.load(std::memory_order_acquire)) == HostTiles::kPending) std::this_thread::yield();
    }
    std::atomic_ref<uint64_t>(tiles.inclusive[index_]).store(before + total, std::memory_order_release);
    return static_cast<uint32_t>(before);
  }

  void InitTiles(HostTiles tiles, uint32_t n) {
    if (index_ == 0) std::fill(tiles.inclusive, tiles.inclusive + n, HostTiles::kPending);
  }

 private:
  const uint64_t index_;
  const uint64_t count_;
  const std::vector<uint32_t>& order_;
  void* const shared_;
  const size_t workers_;
  bool ended_ = false;
};

struct HostDeviceOptions {
  Order order = Order::kForward;
  int workers = 1;                  // host threads that run blocks
  int phase_workers = 1;            // host threads that share each phase of a block
  size_t shared_limit = 227 << 10;  // bytes per block
  uint32_t units = 3;
  size_t memory_bytes = size_t{1} << 30;  // what FreeBytes says, however much is taken
};

// Operations' Device. Everything is done when a call returns. Thread-compatible.
class HostDevice final : public DeviceRuntime {
 public:
  using Tiles = HostTiles;

  explicit HostDevice(const HostDeviceOptions& options) : options_(options) {}

  template <class Body>
  void Launch(const Body& body, uint64_t blocks, size_t shared_bytes, Stream*) {
    if (shared_bytes > options_.shared_limit || blocks >= uint64_t{1} << 31) std::abort();
    const std::vector<uint32_t> order = Permutation(Body::kTuning.threads);
    // Blocks of a grid with running totals wait for those before them: on a device they start in order.
    constexpr bool kInOrder = requires { body.tiles; };
    std::atomic<uint64_t> next{0};
    const auto run = [&] {
      // Exactly the bytes that were asked for, so that AddressSanitizer sees the end.
      std::unique_ptr<void, decltype(&std::free)> shared(Garbage(shared_bytes), &std::free);
      for (uint64_t i = next++; i < blocks; i = next++) {
        const uint64_t index = options_.order == Order::kForward || kInOrder ? i : blocks - 1 - i;
        HostBlock block(index, blocks, order, shared.get(), options_.phase_workers);
        body(block);
      }
    };
    if (options_.workers <= 1 || blocks == 1) return run();
    std::vector<std::thread> threads;
    for (int w = 0; w < options_.workers; ++w) threads.emplace_back(run);
    for (std::thread& thread : threads) thread.join();
  }

  void Fill(void* p, int byte, size_t bytes, Stream*) override { std::memset(p, byte, bytes); }
  size_t FreeBytes() override { return options_.memory_bytes; }
  uint32_t units() const { return options_.units; }
  size_t shared_limit() const { return options_.shared_limit; }
  size_t TileBytes(uint32_t count) const { return count * sizeof(uint64_t); }
  Tiles MakeTiles(uint32_t, uint8_t* memory, size_t) const { return {reinterpret_cast<uint64_t*>(memory)}; }

  void* Allocate(size_t bytes, Stream*) override {
    ++allocated_;
    return Garbage(bytes);
  }
  void Free(void* p, Stream*) override {
    --allocated_;
    std::free(p);
  }
  void* AllocatePinned(size_t bytes) override { return Allocate(bytes, nullptr); }
  void FreePinned(void* p) override { Free(p, nullptr); }
  Stream* NewStream() override { return nullptr; }
  void DeleteStream(Stream*) override {}
  void ToDevice(void* to, const void* from, size_t bytes, Stream*) override { Move(to, from, bytes); }
  void ToHost(void* to, const void* from, size_t bytes, Stream*) override { Move(to, from, bytes); }
  void Copy(void* to, const void* from, size_t bytes, Stream*) override { Move(to, from, bytes); }
  void Synchronize(Stream*) override {}
  // Everything is done at once: events have nothing to remember.
  Event* NewEvent() override { return nullptr; }
  void DeleteEvent(Event*) override {}
  void Record(Event*, Stream*) override {}
  void Wait(Stream*, Event*) override {}
  bool Done(Event*) override { return true; }
  void WaitOnHost(Event*) override {}
  double Seconds(Event*, Event*) override { return 0; }
  std::string Describe() override { return "the host"; }

  // Allocations that were not freed.
  int64_t allocated() const { return allocated_; }

 private:
  static void Move(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }

  static void* Garbage(size_t bytes) {
    void* p = nullptr;
    if (posix_memalign(&p, 256, bytes) != 0) std::abort();
    if (bytes > 0) std::memset(p, 0xA5, bytes);
    return p;
  }

  std::vector<uint32_t> Permutation(int threads) {
    std::vector<uint32_t> order(static_cast<size_t>(threads));
    std::iota(order.begin(), order.end(), 0u);
    if (options_.order == Order::kBackward) std::reverse(order.begin(), order.end());
    if (options_.order == Order::kShuffled) std::shuffle(order.begin(), order.end(), random_);
    return order;
  }

  const HostDeviceOptions options_;
  std::mt19937_64 random_{5};
  std::atomic<int64_t> allocated_{0};
};

}  // namespace gradwire::kernels::cuda
