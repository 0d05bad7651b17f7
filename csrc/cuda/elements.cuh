// Elements to and from memory in each dtype, several at a time, and the walk over a block's share of a tensor.
#pragma once
#include <cuda_runtime.h>

#include <type_traits>

#include "philox.h"
#include "tensor_table.h"

#if defined(__CUDA_ARCH__)
#include <cuda_fp16.h>
#endif

namespace halfstep {

__device__ __forceinline__ const char* at(const void* x, Dtype d, int64_t i) {
  return static_cast<const char*>(x) + i * item_size(d);
}
__device__ __forceinline__ char* at(void* x, Dtype d, int64_t i) { return static_cast<char*>(x) + i * item_size(d); }

// N consecutive items that are read or written by as few instructions as their size allows (at most 16 bytes each).
template <class Item, int N>
struct alignas(sizeof(Item) * N < 16 ? sizeof(Item) * N : 16) Pack {
  Item item[N];
};

template <class Item, int N>
__device__ __forceinline__ Pack<Item, N> load_pack(const void* x) {
  return *static_cast<const Pack<Item, N>*>(x);
}
template <class Item, int N>
__device__ __forceinline__ void store_pack(void* x, const Pack<Item, N>& pack) {
  *static_cast<Pack<Item, N>*>(x) = pack;
}

// The hardware's conversions agree with rounding.h bit for bit, up to which NaN a NaN becomes.
__device__ __forceinline__ float wide_half(uint32_t h) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(static_cast<unsigned short>(h)));
#else
  return float_from_half(h);
#endif
}
__device__ __forceinline__ uint32_t narrow_half(float x) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(x));
#else
  return half_from_float(x);
#endif
}

__device__ __forceinline__ float widened(uint32_t word, Dtype d) {
  return d == Dtype::bf16 ? float_from_bf16(word) : wide_half(word);
}
__device__ __forceinline__ uint32_t narrowed(float x, Dtype d) {
  return d == Dtype::bf16 ? bf16_from_float(x) : narrow_half(x);
}
__device__ __forceinline__ uint32_t narrowed(float x, Dtype d, uint32_t random) {
  return d == Dtype::bf16 ? bf16_from_float_stochastic(x, random) : half_from_float_stochastic(x, random);
}

template <int N>
struct Floats {
  float value[N];
};
template <int N>
struct Words {  // random ones
  uint32_t value[N];
};

template <int N>
__device__ __forceinline__ Floats<N> load(const void* x, Dtype d, int64_t i) {
  Floats<N> out;
  if (d == Dtype::f32) {
    const Pack<float, N> pack = load_pack<float, N>(at(x, d, i));
#pragma unroll
    for (int k = 0; k < N; ++k) out.value[k] = pack.item[k];
  } else {
    const Pack<uint16_t, N> pack = load_pack<uint16_t, N>(at(x, d, i));
#pragma unroll
    for (int k = 0; k < N; ++k) out.value[k] = widened(pack.item[k], d);
  }
  return out;
}

// Calls item(k) for the k-th of N consecutive 16-bit items.
template <int N, class Item>
__device__ __forceinline__ void store_words(void* x, Dtype d, int64_t i, Item item) {
  Pack<uint16_t, N> pack;
#pragma unroll
  for (int k = 0; k < N; ++k) pack.item[k] = static_cast<uint16_t>(item(k));
  store_pack(at(x, d, i), pack);
}

// Rounds to nearest.
template <int N>
__device__ __forceinline__ void store(void* x, Dtype d, int64_t i, const Floats<N>& values) {
  if (d == Dtype::f32) {
    Pack<float, N> pack;
#pragma unroll
    for (int k = 0; k < N; ++k) pack.item[k] = values.value[k];
    store_pack(at(x, d, i), pack);
  } else {
    store_words<N>(x, d, i, [&](int k) { return narrowed(values.value[k], d); });
  }
}

// Rounds to 16 bits stochastically, with one random word per element.
template <int N>
__device__ __forceinline__ void store_random(void* x, Dtype d, int64_t i, const Floats<N>& values,
                                             const Words<N>& random) {
  store_words<N>(x, d, i, [&](int k) { return narrowed(values.value[k], d, random.value[k]); });
}

// The random words of elements first to first + N - 1.
template <int N>
__device__ __forceinline__ Words<N> random_words(const RandomKey& key, int64_t first) {
  static_assert(N <= 4, "two quads hold any four words in a row");
  const uint64_t quad = static_cast<uint64_t>(first) >> 2;
  const int skip = static_cast<int>(first & 3);
  const Philox4 here = random_quad(key, quad);
  Philox4 next{};
  if (skip + N > 4) next = random_quad(key, quad + 1);
  Words<N> out;
#pragma unroll
  for (int k = 0; k < N; ++k) {  // selects: an index that is not known would move the words to memory
    const int w = skip + k;
    uint32_t word = here.word[0];
#pragma unroll
    for (int q = 1; q < 8; ++q) word = w == q ? (q < 4 ? here.word[q % 4] : next.word[q % 4]) : word;
    out.value[k] = word;
  }
  return out;
}

// How many elements come before the first one from which a tensor's packs of N are aligned.
template <int N>
__device__ __forceinline__ int head_of(const void* x, Dtype d) {
  const auto index = reinterpret_cast<uintptr_t>(x) / static_cast<uintptr_t>(item_size(d));
  return static_cast<int>((N - index % N) % N);
}

constexpr int kNoHead = -1;  // packs of two tensors are never aligned at the same element

__device__ __forceinline__ int common_head(int a, int b) { return a == b ? a : kNoHead; }

// Calls body(i, std::integral_constant<int, n>) for n elements from i on, so that the whole block covers [begin, begin + count):
// packs of N from element `head` on, single elements before them, after them, and where there is no head.
template <int N, class Body>
__device__ __forceinline__ void sweep(int64_t begin, int count, int head, Body body) {
  using Single = std::integral_constant<int, 1>;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int before = head == kNoHead || head > count ? count : head;
  const int packs = (count - before) / N;
  if (thread < before || before == count)
    for (int i = thread; i < before; i += threads) body(begin + i, Single{});
  for (int p = thread; p < packs; p += threads)
    body(begin + before + static_cast<int64_t>(p) * N, std::integral_constant<int, N>{});
  for (int i = before + packs * N + thread; i < count; i += threads) body(begin + i, Single{});
}

}  // namespace halfstep
