// Arrays that a kernel reads and writes element by element, several at once: how an operation on one element becomes
// one on N neighbours.
#pragma once

#include <type_traits>

#include "kernels/cuda/bodies/block.cuh"

namespace gradwire::kernels::cuda {

// An array of T, aligned to T; of const T: it is read only.
template <class T>
struct Typed {
  T* at;

  template <int N>
  bool aligned() const {
    return IsAligned<T, N>(at);
  }
  template <int N>
  GW_DEVICE auto Load(uint64_t i) const {
    return LoadTyped<N>(at, i);
  }
  template <int N, class V>
  GW_DEVICE void Store(uint64_t i, const Vector<V, N>& value) const {
    if constexpr (!std::is_const_v<T>) StoreTyped<N>(at, i, value);
  }
};

// Values of T at any address. Byte: uint8_t, or const uint8_t, which is read only.
template <class T, class Byte = const uint8_t>
struct Packed {
  Byte* at;

  template <int N>
  bool aligned() const {
    return IsAligned<T, N>(at);
  }
  template <int N>
  GW_DEVICE Vector<T, N> Load(uint64_t i) const {
    return cuda::Load<T, N>(at, i);
  }
  template <int N>
  GW_DEVICE void Store(uint64_t i, const Vector<T, N>& value) const {
    if constexpr (!std::is_const_v<Byte>) cuda::Store<T, N>(at, i, value);
  }
};

// The same where values are written alone.
template <class Array>
struct Out {
  Array array;

  template <int N>
  bool aligned() const {
    return array.template aligned<N>();
  }
  template <int N>
  GW_DEVICE auto Load(uint64_t) const {
    return decltype(array.template Load<N>(0)){};
  }
  template <int N, class V>
  GW_DEVICE void Store(uint64_t i, const Vector<V, N>& value) const {
    array.template Store<N>(i, value);
  }
};

template <int N, class... Arrays>
bool AllAligned(const Arrays&... arrays) {
  return (arrays.template aligned<N>() && ...);
}

// f(k, element i + k of each of `arrays`) for k from 0 to N - 1: all are loaded before, and stored behind it. f takes
// by reference what it changes. N > 1: all are aligned for it.
template <int N, class F, class First, class... Rest>
GW_DEVICE void EachLane(uint64_t i, F f, const First& first, const Rest&... rest) {
  auto lanes = first.template Load<N>(i);
  if constexpr (sizeof...(Rest) == 0) {
    GW_UNROLL
    for (int k = 0; k < N; ++k) f(k, lanes.v[k]);
  } else {
    EachLane<N>(
        i, [&](int k, auto&... others) { f(k, lanes.v[k], others...); }, rest...);
  }
  first.template Store<N>(i, lanes);
}

}  // namespace gradwire::kernels::cuda
