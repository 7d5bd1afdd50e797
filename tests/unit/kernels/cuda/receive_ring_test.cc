// The pinned receive ring on a device that lags behind.
#include "kernels/cuda/receive_ring.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <thread>
#include <vector>

#include "tests/unit/kernels/cuda/late_runtime.h"

namespace gradwire::kernels::cuda {
namespace {

TEST(ReceiveRing, RefusesWhatCannotBe) {
  LateRuntime runtime(1000);
  EXPECT_EQ(ReceiveRing::Make(&runtime, 0, 10).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReceiveRing::Make(&runtime, 10, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReceiveRing::Make(&runtime, SIZE_MAX, 2).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReceiveRing::Make(&runtime, 11, 100).status().code(), absl::StatusCode::kResourceExhausted) << "pinned";
  EXPECT_EQ(ReceiveRing::Make(&runtime, 6, 100).status().code(), absl::StatusCode::kResourceExhausted) << "device";
  EXPECT_EQ(runtime.left(), 1000u) << "what was had of a ring that failed was not freed";
  { EXPECT_TRUE(ReceiveRing::Make(&runtime, 5, 100).ok()); }
  EXPECT_EQ(runtime.left(), 1000u) << "the ring's memory was not freed";
}

TEST(ReceiveRing, ASlotIsFreeOnlyAfterWhatReadsIt) {
  LateRuntime runtime(1 << 20);
  auto ring = *ReceiveRing::Make(&runtime, 2, 64);
  Stream* const stream = runtime.NewStream();
  std::vector<uint8_t> to(64);
  uint8_t* const a = ring->Acquire();
  uint8_t* const b = ring->Acquire();
  ASSERT_NE(a, b);
  EXPECT_EQ(ring->Acquire(), nullptr) << "both are held";
  ring->CopyToDevice(a, ring->TwinOf(a), 64, stream);
  runtime.Copy(to.data(), ring->TwinOf(a), 64, stream);  // stands for a kernel
  ring->ReleaseAfter(a, stream);
  EXPECT_EQ(ring->Acquire(), nullptr) << "the copy waits in its stream";
  runtime.Step(stream);
  EXPECT_EQ(ring->Acquire(), nullptr) << "the copy is made, but not yet read";
  runtime.Step(stream);
  EXPECT_EQ(ring->Acquire(), nullptr) << "it is read, but not known to be";
  runtime.Step(stream);
  EXPECT_EQ(ring->Acquire(), a);
  ring->Release(a);
  ring->Release(b);
}

TEST(ReceiveRing, AStreamThatHangsDoesNotHoldUpTheOthers) {
  LateRuntime runtime(1 << 20);
  std::vector<uint8_t> to(128);  // outlives the ring, whose end waits for copies
  auto ring = *ReceiveRing::Make(&runtime, 2, 64);
  Stream* const slow = runtime.NewStream();
  Stream* const fast = runtime.NewStream();
  uint8_t* const a = ring->Acquire();
  uint8_t* const b = ring->Acquire();
  ring->CopyToDevice(a, to.data(), 64, slow);
  ring->ReleaseAfter(a, slow);
  ring->CopyToDevice(b, to.data() + 64, 64, fast);
  ring->ReleaseAfter(b, fast);
  runtime.Synchronize(fast);
  EXPECT_EQ(ring->Acquire(), b);
  EXPECT_EQ(ring->Acquire(), nullptr);
  ring->Release(b);
}

// Random receiving, copying and lagging: every chunk arrives as it was written, and no slot is handed out twice.
TEST(ReceiveRing, EveryChunkArrives) {
  constexpr size_t kSlots = 5, kBytes = 100, kChunks = 2000;
  LateRuntime runtime(1 << 20);
  auto ring = *ReceiveRing::Make(&runtime, kSlots, kBytes);
  const std::vector<Stream*> streams = {runtime.NewStream(), runtime.NewStream(), runtime.NewStream()};
  std::vector<uint8_t> to(kChunks * kBytes, 0xFF);
  std::set<uint8_t*> held;
  std::mt19937 random(9);
  size_t refused = 0;
  for (size_t sent = 0; sent < kChunks;) {
    if (uint8_t* slot = ring->Acquire()) {
      ASSERT_TRUE(held.insert(slot).second) << "handed out twice";
      std::memset(slot, static_cast<int>(sent % 251), kBytes);
      Stream* const stream = streams[random() % streams.size()];
      ring->CopyToDevice(slot, ring->TwinOf(slot), kBytes, stream);
      runtime.Copy(&to[sent * kBytes], ring->TwinOf(slot), kBytes, stream);
      ring->ReleaseAfter(slot, stream);
      held.erase(slot);
      ++sent;
    } else {
      ++refused;
    }
    for (uint32_t steps = random() % 4; steps > 0; --steps) runtime.Step(streams[random() % streams.size()]);
  }
  EXPECT_GT(refused, 0u) << "the device never lagged: nothing was tested";
  for (Stream* stream : streams) runtime.Synchronize(stream);
  for (size_t i = 0; i < to.size(); ++i) ASSERT_EQ(to[i], i / kBytes % 251) << "chunk " << i / kBytes;
}

TEST(ReceiveRing, WaitsForTheOldestSlot) {
  LateRuntime runtime(1 << 20);
  auto ring = *ReceiveRing::Make(&runtime, 1, 64);
  Stream* const stream = runtime.NewStream();
  uint8_t* const first = ring->AcquireWaiting();
  ring->ReleaseAfter(first, stream);
  EXPECT_EQ(ring->Acquire(), nullptr);
  EXPECT_EQ(ring->AcquireWaiting(), first);
  ring->Release(first);
}

// Every slot is held by other threads, which give them back.
TEST(ReceiveRing, WaitsForThreadsThatHoldSlots) {
  LateRuntime runtime(1 << 20);
  auto ring = *ReceiveRing::Make(&runtime, 1, 64);
  uint8_t* const slot = ring->AcquireWaiting();
  std::thread waiter([&] { ring->Release(ring->AcquireWaiting()); });
  ring->Release(slot);
  waiter.join();
}

TEST(ReceiveRing, ItsEndWaitsForCopies) {
  LateRuntime runtime(1 << 20);
  std::vector<uint8_t> to(64, 0);
  {
    auto ring = *ReceiveRing::Make(&runtime, 1, 64);
    uint8_t* const slot = ring->Acquire();
    std::memset(slot, 7, 64);
    Stream* const stream = runtime.NewStream();
    ring->CopyToDevice(slot, to.data(), 64, stream);
    ring->ReleaseAfter(slot, stream);
  }
  EXPECT_EQ(to, std::vector<uint8_t>(64, 7));
}

}  // namespace
}  // namespace gradwire::kernels::cuda
