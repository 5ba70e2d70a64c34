// Packs: 16 bytes of a row, and the weights that belong to them. All arithmetic is in float.
#pragma once

#define STREAM_LOADS 1
#define STREAM_STORES 2

constexpr int FLOAT = 0, HALF = 1;  // else bfloat16

template <int TYPE>
struct Storage {
  typedef unsigned short Type;
};
template <>
struct Storage<FLOAT> {
  typedef float Type;
};

typedef Storage<ELEMENT>::Type Element;
typedef Storage<WEIGHT>::Type Weight;

constexpr u32 PACK = 16 / sizeof(Element);  // elements
constexpr u32 WEIGHT_WORDS = PACK * sizeof(Weight) / 4;

struct alignas(16) Pack {
  u32 words[4];
};
struct alignas(WEIGHT_WORDS >= 4 ? 16 : 8) WeightPack {
  u32 words[WEIGHT_WORDS];
};

template <int TYPE>
DEVICE float element(const u32* words, u32 index) {
  if (TYPE == FLOAT) return from_bits(words[index]);
  const u32 word = words[index / 2];
  if (TYPE == HALF) return half_to_float(index % 2 ? word >> 16 : word & 0xffffu);
  return from_bits(index % 2 ? word & 0xffff0000u : word << 16);
}

template <int TYPE>
DEVICE u32 pair(float first, float second) {
  return TYPE == HALF ? floats_to_halves(first, second) : floats_to_bfloats(first, second);
}

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
  Pack out;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    if (ELEMENT == FLOAT)
      out.words[i] = as_bits(scaled[i % PACK]);
    else
      out.words[i] = pair<ELEMENT>(scaled[(2 * i) % PACK], scaled[(2 * i + 1) % PACK]);
  }
  return out;
}
