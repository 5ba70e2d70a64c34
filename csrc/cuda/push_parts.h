// What all kernels that push packs between ranks share: the ranks, and the staging memory. Macros:
// ELEMENT (0 float, 1 half, 2 bfloat16), WORLD_SIZE and RANK, this one.
//
// Staging memory has two halves, which calls use in turn. A peer writes into a half again two calls
// later. To end the call between, it had to have a sum with what this rank pushed in that call, thus
// after it had ended the first and emptied what it had read. So no call needs a barrier at its
// beginning or end, and any of the kernels may make the next call.
#pragma once

#include "packs.h"

constexpr u32 PEERS = WORLD_SIZE - 1;

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

// The sum in the order of ranks, of this rank's pack and what each peer stores at its place, `stride`
// packs apart from `here`; emptied again.
DEVICE Pack sum_of_ranks(Pack* here, u32 stride, const Pack& mine, u64 timeout_ns) {
  Pack packs[PEERS];
#pragma unroll
  for (u32 i = 0; i < PEERS; ++i) packs[i] = load_staged(here + i * stride);
  Sum sum;
#pragma unroll
  for (u32 source = 0; source < WORLD_SIZE; ++source) {
    if (source == RANK) {
      sum.add(sendable(mine), source == 0);
      continue;
    }
    const u32 i = place(source, RANK);
    sum.add(take_after_look(here + i * stride, packs[i], timeout_ns), source == 0);
  }
  return sum.rounded();
}

// The peer that is `step` ranks further; all ranks begin with another one.
DEVICE u32 peer(u32 step) { return (RANK + 1 + step) % WORLD_SIZE; }
