// A norm's weights, and the squares that it adds. All arithmetic is in float.
#pragma once

#include "packs.h"

typedef Storage<WEIGHT>::Type Weight;

constexpr u32 WEIGHT_WORDS = PACK * sizeof(Weight) / 4;

// Those of a pack's elements.
struct alignas(WEIGHT_WORDS >= 4 ? 16 : 8) WeightPack {
  u32 words[WEIGHT_WORDS];
};

DEVICE float sum_of_squares(const Pack& pack) {
  float sum = 0.0f;
#pragma unroll
  for (u32 i = 0; i < PACK; ++i) {
    const float x = element<ELEMENT>(pack.words, i);
    sum = fmaf(x, x, sum);
  }
  return sum;
}
