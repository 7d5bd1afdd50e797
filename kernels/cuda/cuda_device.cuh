// Operations' Device on a GPU: launches, stream-ordered memory, copies.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "kernels/cuda/async_backend.h"
#include "kernels/cuda/device_block.cuh"

namespace gradwire::kernels::cuda {

template <class Body>
__global__ void __launch_bounds__(Body::kTuning.threads, Body::kTuning.min_blocks)
    Run(const __grid_constant__ Body body) {
  DeviceBlock<Body::kTuning.threads> block;
  body(block);
}

// One GPU, whichever is current for the calling thread. Thread-safe.
class CudaDevice final : public DeviceRuntime {
 public:
  using Tiles = DeviceTiles;

  CudaDevice(int device, uint32_t units, size_t shared_limit)
      : device_(device), units_(units), shared_limit_(shared_limit) {}

  // A device that fails leaves nothing to go on with: what it computed is unknown.
  static void Check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "gradwire: CUDA: %s: %s\n", what, cudaGetErrorString(error));
    std::abort();
  }

  template <class Body>
  void Launch(const Body& body, uint64_t blocks, size_t shared_bytes, Stream* stream) {
    if (blocks == 0) return;
    const Current current(device_);
    if (shared_bytes > kDefaultShared) {
      Check(
          cudaFuncSetAttribute(Run<Body>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "asking for shared memory");
    }
    Run<Body><<<static_cast<unsigned>(blocks), Body::kTuning.threads, shared_bytes, Handle(stream)>>>(body);
    Check(cudaGetLastError(), "launching a kernel");
  }

  void Fill(void* p, int byte, size_t bytes, Stream* stream) override {
    if (bytes == 0) return;
    const Current current(device_);
    Check(cudaMemsetAsync(p, byte, bytes, Handle(stream)), "filling device memory");
  }
  uint32_t units() const { return units_; }
  size_t shared_limit() const { return shared_limit_; }

  size_t TileBytes(uint32_t count) const {
    const Current current(device_);
    size_t bytes = 0;
    Check(Tiles::AllocationSize(static_cast<int>(count), bytes), "sizing the state of tiles");
    return bytes;
  }
  Tiles MakeTiles(uint32_t count, uint8_t* memory, size_t bytes) const {
    Tiles tiles;
    Check(tiles.Init(static_cast<int>(count), memory, bytes), "placing the state of tiles");
    return tiles;
  }

  void* Allocate(size_t bytes, Stream* stream) override {
    const Current current(device_);
    void* p = nullptr;
    const cudaError_t error = cudaMallocAsync(&p, bytes, Handle(stream));
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // it is not sticky; forget it
      return nullptr;
    }
    Check(error, "allocating device memory");
    return p;
  }
  void Free(void* p, Stream* stream) override {
    const Current current(device_);
    Check(cudaFreeAsync(p, Handle(stream)), "freeing device memory");
  }

  void* AllocatePinned(size_t bytes) override {
    const Current current(device_);
    void* p = nullptr;
    if (cudaHostAlloc(&p, bytes, cudaHostAllocPortable) == cudaSuccess) return p;
    cudaGetLastError();
    return nullptr;
  }
  void FreePinned(void* p) override { Check(cudaFreeHost(p), "freeing pinned memory"); }
  size_t FreeBytes() override {
    const Current current(device_);
    size_t free = 0, total = 0;
    Check(cudaMemGetInfo(&free, &total), "asking for free device memory");
    return free;
  }

  Stream* NewStream() override {
    const Current current(device_);
    cudaStream_t stream = nullptr;
    Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    return reinterpret_cast<Stream*>(stream);
  }
  void DeleteStream(Stream* stream) override { Check(cudaStreamDestroy(Handle(stream)), "deleting a stream"); }

  void ToDevice(void* to, const void* from, size_t bytes, Stream* stream) override {
    if (bytes == 0) return;
    const Current current(device_);
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, Handle(stream)), "copying to the device");
  }
  void ToHost(void* to, const void* from, size_t bytes, Stream* stream) override {
    if (bytes == 0) return;
    const Current current(device_);
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, Handle(stream)), "copying to the host");
    cudaPointerAttributes attributes = {};
    Check(cudaPointerGetAttributes(&attributes, to), "looking at host memory");
    if (attributes.type == cudaMemoryTypeUnregistered) Synchronize(stream);
  }
  void Copy(void* to, const void* from, size_t bytes, Stream* stream) override {
    if (bytes == 0) return;
    const Current current(device_);
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, Handle(stream)), "copying on the device");
  }
  void Synchronize(Stream* stream) override {
    const Current current(device_);
    Check(cudaStreamSynchronize(Handle(stream)), "waiting for a stream");
  }

  Event* NewEvent() override {
    const Current current(device_);
    cudaEvent_t event = nullptr;
    Check(cudaEventCreate(&event), "making an event");
    return reinterpret_cast<Event*>(event);
  }
  void DeleteEvent(Event* event) override { Check(cudaEventDestroy(Handle(event)), "deleting an event"); }
  void Record(Event* event, Stream* stream) override {
    const Current current(device_);
    Check(cudaEventRecord(Handle(event), Handle(stream)), "recording an event");
  }
  void Wait(Stream* stream, Event* event) override {
    const Current current(device_);
    Check(cudaStreamWaitEvent(Handle(stream), Handle(event)), "waiting for an event");
  }
  bool Done(Event* event) override {
    const cudaError_t error = cudaEventQuery(Handle(event));
    if (error == cudaErrorNotReady) return false;
    Check(error, "asking for an event");
    return true;
  }
  void WaitOnHost(Event* event) override { Check(cudaEventSynchronize(Handle(event)), "waiting for an event"); }
  double Seconds(Event* from, Event* to) override {
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, Handle(from), Handle(to)), "timing events");
    return ms * 1e-3;
  }

  std::string Describe() override {
    cudaDeviceProp properties = {};
    Check(cudaGetDeviceProperties(&properties, device_), "describing the GPU");
    return std::string(properties.name) + ", compute capability " + std::to_string(properties.major) + "." +
           std::to_string(properties.minor) + ", " + std::to_string(units_) + " multiprocessors, " +
           std::to_string(properties.totalGlobalMem >> 20) + " MiB";
  }

 private:
  // The device is the calling thread's for as long as this lives: a null stream, kernels and allocations are its own.
  class Current {
   public:
    explicit Current(int device) : device_(device) {
      Check(cudaGetDevice(&before_), "asking for the current device");
      if (before_ != device_) Check(cudaSetDevice(device_), "changing the current device");
    }
    ~Current() {
      if (before_ != device_) Check(cudaSetDevice(before_), "changing the current device");
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const int device_;
    int before_ = 0;
  };

  static cudaEvent_t Handle(Event* event) { return reinterpret_cast<cudaEvent_t>(event); }

  static constexpr size_t kDefaultShared = 48 << 10;  // above, a kernel must ask

  static cudaStream_t Handle(Stream* stream) {
    return stream == nullptr ? cudaStreamPerThread : reinterpret_cast<cudaStream_t>(stream);
  }

  const int device_;
  const uint32_t units_;
  const size_t shared_limit_;
};

}  // namespace gradwire::kernels::cuda
