// What all kernels build on: packs of 16 bytes, their numbers, and packs that peers send.
//
// A pack that arrives is its own flag (Lamport's protocol): a word of staging memory is EMPTY until
// a peer has written it, and EMPTY again once it was read. No number of the three element types is
// lost by that: EMPTY stands for a NaN, or two, and is sent as another NaN. So nothing has to wait
// until stores have arrived before it can tell the peer, which under load takes microseconds.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef HOST_EMULATION
#include "host_emulation.h"
#else
#include "device_primitives.h"
#endif

constexpr u32 WARP = 32;
constexpr int FLOAT = 0, HALF = 1;  // else bfloat16
constexpr u32 EMPTY = 0xffffffffu, OTHER_NAN = 0x7fffffffu;
constexpr u32 SPINS_PER_CHECK = 256;

struct alignas(16) Pack {
  u32 words[4];
};

#ifdef ELEMENT
constexpr u32 PACK = ELEMENT == FLOAT ? 4 : 8;  // elements
#endif

template <int TYPE>
struct Storage {
  typedef unsigned short Type;
};
template <>
struct Storage<FLOAT> {
  typedef float Type;
};

// Number `index` of those in the words.
template <int TYPE>
DEVICE float element(const u32* words, u32 index) {
  if (TYPE == FLOAT) return from_bits(words[index]);
  const u32 word = words[index / 2];
  if (TYPE == HALF) return half_to_float(index % 2 ? word >> 16 : word & 0xffffu);
  return from_bits(index % 2 ? word & 0xffff0000u : word << 16);
}

// The pack of as many numbers as it holds, each rounded once.
template <int TYPE>
DEVICE Pack pack_of(const float* numbers) {
  Pack pack;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    if constexpr (TYPE == FLOAT)
      pack.words[i] = as_bits(numbers[i]);
    else if constexpr (TYPE == HALF)
      pack.words[i] = floats_to_halves(numbers[2 * i], numbers[2 * i + 1]);
    else
      pack.words[i] = floats_to_bfloats(numbers[2 * i], numbers[2 * i + 1]);
  }
  return pack;
}

#ifndef NATIVE_FP8
// The nearest number of 8 bits (e4m3), of two the even one; beyond the largest it is the largest.
DEVICE u32 float_to_fp8(float value) {
  constexpr u32 LARGEST = 0x7e, NOT_A_NUMBER = 0x7f, BIAS = (127 - 7) << 3;
  constexpr float SMALLEST_NORMAL = 0.015625f, STEPS = 512.0f, INTEGERS = 8388608.0f;
  const u32 bits = as_bits(value) & 0x7fffffffu, sign = as_bits(value) >> 31 << 7;
  if (bits > 0x7f800000u) return NOT_A_NUMBER;
  const float size = from_bits(bits);
  if (size < SMALLEST_NORMAL) return sign | (as_bits(size * STEPS + INTEGERS) & 0xfu);
  if (size >= 464.0f) return sign | LARGEST;
  return sign | (((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - BIAS);
}

DEVICE u32 floats_to_fp8(float first, float second) {
  return float_to_fp8(first) | (float_to_fp8(second) << 8);
}
#endif

// As it may be sent.
DEVICE Pack sendable(Pack pack) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    if (pack.words[i] == EMPTY) pack.words[i] = OTHER_NAN;
  return pack;
}

DEVICE bool has_arrived(const Pack& pack) {
  return pack.words[0] != EMPTY && pack.words[1] != EMPTY && pack.words[2] != EMPTY &&
         pack.words[3] != EMPTY;
}

DEVICE void store_to_peer(Pack* address, const Pack& pack) {
  store_for_peers(address, pack.words);
}

DEVICE Pack load_staged(const Pack* address) {
  Pack pack;
  load_from_peers(address, pack.words);
  return pack;
}

DEVICE void empty(Pack* address) {
  const u32 words[4] = {EMPTY, EMPTY, EMPTY, EMPTY};
  store_for_peers(address, words);
}

// Counts looks in vain, and ends a kernel, and with it the process's use of the GPU, if a peer does
// not come.
class Patience {
  u64 start_ = 0;
  u32 spins_ = 0;

 public:
  DEVICE_MEMBER void spin(u64 timeout_ns) {
    if (++spins_ % SPINS_PER_CHECK != 0) return;
    const u64 now = nanoseconds();
    if (start_ == 0) start_ = now;
    if (now - start_ > timeout_ns) trap();
  }
};

// The pack that a peer stores there; `pack` is what was there at a first look. It is empty again
// afterwards.
DEVICE Pack take_after_look(Pack* address, Pack pack, u64 timeout_ns) {
  for (Patience patience; !has_arrived(pack); pack = load_staged(address))
    patience.spin(timeout_ns);
  empty(address);
  return pack;
}

DEVICE Pack take(Pack* address, u64 timeout_ns) {
  return take_after_look(address, load_staged(address), timeout_ns);
}

// The number of a call, which its last block to read it raises, so that a replayed graph goes on
// counting; `state` is that number and how many blocks have read it. Nobody waits for the count: a
// block goes on with its work until it ends, and only then looks whether it was the last.
class Count {
  u32 earlier_ = 0;

 public:
  // Of `blocks` blocks; after a barrier before which all threads of this one have used the number.
  DEVICE_MEMBER void begin(u32* state, u32 blocks) {
    if (thread_index() == 0) earlier_ = blocks > 1 ? fetch_add(state + 1, 1) : 0;
  }

  DEVICE_MEMBER void end(u32* state, u32 call, u32 blocks) const {
    if (thread_index() != 0 || earlier_ != blocks - 1) return;
    state[1] = 0;
    state[0] = call;
  }
};

// The number of this call, for all threads of a block, counted.
DEVICE u32 begin_call(u32* state, Count& count) {
  const u32 call = load_relaxed_device(state) + 1;
  block_barrier_after(call);
  count.begin(state, num_blocks());
  return call;
}
