// All-reduce of small messages through host memory, in one launch a rank: half of the warps send this
// rank's message as parcels to its outbox, the other half add what the peers have in theirs. Nothing
// waits but for a parcel to come.
//
// Progress: adders wait only for senders on other GPUs, and senders wait for nobody. Blocks begin in
// the order of their index, so the first parcel that is missing anywhere has its sender running.
//
// Macros, set by host_layout.py:
//   ELEMENT       0 float, 1 half, 2 bfloat16
//   WORLD_SIZE    ranks, 2 to 8
//   RANK          this one
//   SHARE         units that a block handles at a time

#include "packs.h"

constexpr u32 THREADS = 2 * SHARE * WARP;

#include "host_parts.h"

constexpr u32 LANE_PACKS = 7, LANE_PARCELS = 8;  // that a lane moves at a time
constexpr u32 UNIT_PACKS = LANE_PACKS * WARP, UNIT_PARCELS = LANE_PARCELS * WARP;  // and a warp
constexpr u32 WORDS = LANE_PACKS * 4, WHOLE_WORDS = LANE_PARCELS * CALL;  // the rest goes by halves
constexpr u32 NUMBER = 0xffff;                // of a call, as much as a parcel has of it
constexpr u32 LOOKS = PEERS < 3 ? PEERS : 3;  // peers of which a lane reads at the same time

// What a lane moves: packs that are a warp apart, so that a warp moves whole lines.
struct Load {
  Pack packs[LANE_PACKS];

  DEVICE_MEMBER u32& word(u32 index) { return packs[index / 4].words[index % 4]; }
  DEVICE_MEMBER u32 word(u32 index) const { return packs[index / 4].words[index % 4]; }
};

// The lane's first pack is number `first` of the message; behind its end there are zeros.
DEVICE Load load_message(const Args& args, u32 first) {
  Load load;
#pragma unroll
  for (u32 i = 0; i < LANE_PACKS; ++i) {
    const u32 index = first + i * WARP;
    load.packs[i] = index < args.num_packs ? args.input[index] : Pack{{0, 0, 0, 0}};
  }
  return load;
}

DEVICE void send(Pack* there, const Load& load, u32 call) {
#pragma unroll
  for (u32 i = 0; i < LANE_PARCELS; ++i) {
    Pack parcel;
#pragma unroll
    for (u32 j = 0; j < CALL; ++j) parcel.words[j] = load.word(i * CALL + j);
    const u32 halves = load.word(WHOLE_WORDS + i / 2);
    parcel.words[CALL] = (i % 2 ? halves & ~NUMBER : halves << 16) | (call & NUMBER);
    store_whole(there + i * WARP, parcel.words);
  }
}

// A lane's parcels, as they were at one look.
struct Parcels {
  Pack parcels[LANE_PARCELS];

  DEVICE_MEMBER void look(const Pack* there) {
#pragma unroll
    for (u32 i = 0; i < LANE_PARCELS; ++i) load_whole(there + i * WARP, parcels[i].words);
  }

  DEVICE_MEMBER bool are_of(u32 call) const {
    bool here = true;
#pragma unroll
    for (u32 i = 0; i < LANE_PARCELS; ++i)
      here = here && ((parcels[i].words[CALL] ^ call) & NUMBER) == 0;
    return here;
  }

  // What they carry, once all of them are of this call.
  DEVICE_MEMBER Load await(const Pack* there, u32 call, u64 timeout_ns) {
    for (Patience patience; !are_of(call); look(there)) patience.spin(timeout_ns);
    Load load;
#pragma unroll
    for (u32 i = 0; i < WHOLE_WORDS; ++i) load.word(i) = parcels[i / CALL].words[i % CALL];
#pragma unroll
    for (u32 i = WHOLE_WORDS; i < WORDS; ++i) {
      const Pack* pair = parcels + (i - WHOLE_WORDS) * 2;
      load.word(i) = (pair[0].words[CALL] >> 16) | (pair[1].words[CALL] & ~NUMBER);
    }
    return load;
  }
};

// Adds what all ranks have, in the order of ranks; `there` counts from the beginning of a half.
DEVICE void add(const Args& args, u32 first, u32 there, u32 call) {
  const Load mine = load_message(args, first);
  Parcels found[PEERS];
#pragma unroll
  for (u32 i = 0; i < LOOKS; ++i) found[i].look(half_outbox(args, peer_at(i), call) + there);
  Sum sums[LANE_PACKS];
#pragma unroll
  for (u32 rank = 0; rank < WORLD_SIZE; ++rank) {
    Load load = mine;
    if (rank != RANK) {
      const u32 place = place_of(rank), next = place + LOOKS;
      const Pack* theirs = half_outbox(args, rank, call) + there;
      load = found[place].await(theirs, call, args.timeout_ns);
      if (next < PEERS) found[next].look(half_outbox(args, peer_at(next), call) + there);
    }
#pragma unroll
    for (u32 i = 0; i < LANE_PACKS; ++i) sums[i].add(load.packs[i], rank == 0);
  }
#pragma unroll
  for (u32 i = 0; i < LANE_PACKS; ++i) {
    const u32 index = first + i * WARP;
    if (index < args.num_packs) args.output[index] = sums[i].rounded();
  }
}

extern "C" KERNEL(THREADS, 1) host_one_shot(const ARGUMENT Args args) {
  const u32 warp = thread_index() / WARP, lane = thread_index() % WARP;
  Count count;
  const u32 call = begin_call(args.state, count);
  const u32 units = (args.num_packs + UNIT_PACKS - 1) / UNIT_PACKS;
  for (u32 unit = block_index() * SHARE + warp % SHARE; unit < units;
       unit += num_blocks() * SHARE) {
    const u32 first = unit * UNIT_PACKS + lane, there = unit * UNIT_PARCELS + lane;
    if (warp < SHARE)
      send(half_outbox(args, RANK, call) + there, load_message(args, first), call);
    else
      add(args, first, there, call);
  }
  end_call(args, count, call);
}
