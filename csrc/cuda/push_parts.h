// What all kernels that push packs between ranks share: the ranks, and the staging memory.
//
// Staging memory has two halves, which calls use in turn. A peer writes into a half again two calls
// later. To end the call between, it had to have a sum with what this rank pushed in that call, thus
// after it had ended the first and emptied what it had read. So no call needs a barrier at its
// beginning or end, and any of the kernels may make the next call.
#pragma once

#include "packs.h"

constexpr u32 PEERS = WORLD_SIZE - 1;
constexpr u32 PACK = ELEMENT == FLOAT ? 4 : 8;  // elements

// The numbers of a pack, added in float32.
struct Sum {
  float parts[PACK];

  DEVICE_MEMBER void add(const Pack& pack, bool first) {
#pragma unroll
    for (u32 i = 0; i < PACK; ++i) {
      const float number = element<ELEMENT>(pack.words, i);
      parts[i] = first ? number : parts[i] + number;
    }
  }

  DEVICE_MEMBER Pack rounded() const { return pack_of<ELEMENT>(parts); }
};

// The place of a source among the parts that a rank keeps for its peers.
DEVICE constexpr u32 place(u32 source, u32 owner) { return source < owner ? source : source - 1; }

DEVICE constexpr u32 source_at(u32 place, u32 owner) { return place < owner ? place : place + 1; }

// The peer that is `step` ranks further; all ranks begin with another one.
DEVICE u32 peer(u32 step) { return (RANK + 1 + step) % WORLD_SIZE; }
