// Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Host and device.
// Key (seed, t), counter (e / 4 low, e / 4 high, parameter id, stream), word e % 4, where e is the element's index in the
// global parameter: the bits depend on nothing else, so tiling, threads, backend and sharding cannot change them.
#pragma once
#include <cstdint>

#include "rounding.h"

namespace halfstep {

enum RandomStream : uint32_t { kStreamWeight = 0, kStreamExpAvg = 1, kStreamExpAvgSq = 2, kStreamMaxExpAvgSq = 3 };

// Of one stream of one tensor at one step.
struct RandomKey {
  uint32_t seed, t, param_id, stream;
};

struct Philox4 {
  uint32_t word[4];
};

HALFSTEP_FN Philox4 philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The words of elements 4 * quad to 4 * quad + 3.
HALFSTEP_FN Philox4 random_quad(const RandomKey& key, uint64_t quad) {
  return philox4x32_10(static_cast<uint32_t>(quad), static_cast<uint32_t>(quad >> 32), key.param_id, key.stream,
                       key.seed, key.t);
}

}  // namespace halfstep
