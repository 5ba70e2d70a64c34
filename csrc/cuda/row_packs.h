// Packs: 16 bytes of a row, and the weights that belong to them. All arithmetic is in float.
#pragma once

#include "packs.h"

#define STREAM_LOADS 1
#define STREAM_STORES 2

typedef Storage<ELEMENT>::Type Element;
typedef Storage<WEIGHT>::Type Weight;

constexpr u32 PACK = 16 / sizeof(Element);  // elements
constexpr u32 WEIGHT_WORDS = PACK * sizeof(Weight) / 4;

struct alignas(WEIGHT_WORDS >= 4 ? 16 : 8) WeightPack {
  u32 words[WEIGHT_WORDS];
};

// An address that is aligned only to its elements is read element by element.
template <typename P, typename T>
DEVICE P load(const T* address) {
#if ALIGNED
  return *reinterpret_cast<const P*>(address);
#else
  P pack;
#pragma unroll
  for (u32 i = 0; i < sizeof(P) / 4; ++i) {
    if (sizeof(T) == 4) {
      pack.words[i] = as_bits(address[i]);
    } else {
      pack.words[i] = u32(address[2 * i]) | (u32(address[2 * i + 1]) << 16);
    }
  }
  return pack;
#endif
}

DEVICE Pack load_pack(const Element* address) {
#if ALIGNED && STREAMING & STREAM_LOADS
  Pack pack;
  load_streaming(address, pack.words);
  return pack;
#else
  return load<Pack>(address);
#endif
}

DEVICE WeightPack load_weights(const Weight* address) { return load<WeightPack>(address); }

DEVICE void store_pack(Element* address, Pack pack) {
#if STREAMING & STREAM_STORES
  store_streaming(address, pack.words);
#else
  *reinterpret_cast<Pack*>(address) = pack;
#endif
}

DEVICE float sum_of_squares(const Pack& pack) {
  float sum = 0.0f;
#pragma unroll
  for (u32 i = 0; i < PACK; ++i) {
    const float x = element<ELEMENT>(pack.words, i);
    sum = fmaf(x, x, sum);
  }
  return sum;
}

DEVICE Pack scale(const Pack& pack, float factor, const WeightPack& weights) {
  float scaled[PACK];
#pragma unroll
  for (u32 i = 0; i < PACK; ++i)
    scaled[i] = element<ELEMENT>(pack.words, i) * factor * element<WEIGHT>(weights.words, i);
  return pack_of<ELEMENT>(scaled);
}
