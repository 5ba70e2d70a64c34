// All-reduce of large messages between three to eight ranks, in one launch a rank.
//
// A chunk is what one warp moves at a time, and chunk c is summed by rank c % WORLD_SIZE. Of a
// block's warps, some push this rank's chunks into the staging memory of those that sum them; some
// sum, in the order of ranks and in float32, and push the rounded sum to every peer; the others
// take the sums of the peers from staging memory to the output. After each chunk its flag is set,
// with release semantics, to the number of the call. So every link carries each rank's share of the
// message twice, as in any two-shot all-reduce, but the three steps overlap from chunk to chunk and
// all ranks get the same bits.
//
// Staging memory has two halves, which calls use in turn. A peer writes into a half again two calls
// later. To end the call between, it had to have a sum for which every rank had pushed in that call,
// this one too, after it had ended the first. So no call needs a barrier at its beginning or end.
//
// Progress: of a block, pushers wait for nobody, summing warps for pushers and receivers for summing
// warps of the block with the same index on other GPUs. Blocks begin in the order of their index, so
// the lowest that has not ended everywhere has a free place there.
//
// Macros, set by push.py:
//   ELEMENT       0 float, 1 half, 2 bfloat16
//   WORLD_SIZE    ranks, 3 to 8
//   RANK          this one
//   PACKS         packs of 16 bytes that a lane has of a chunk
//   SHARE         chunks of every rank that a block handles at a time

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef HOST_EMULATION
#include "host_emulation.h"
#else
#include "device_primitives.h"
#endif
#include "push_parts.h"

constexpr u32 PUSHERS = SHARE * PEERS;  // warps of a block; as many receive
constexpr u32 THREADS = (2 * PUSHERS + SHARE) * WARP;
constexpr u32 BATCH = PEERS <= 3 ? 2 : 1;  // packs of every peer that a lane has at a time
static_assert(PACKS % BATCH == 0, "a chunk is whole batches");

// In a half come first, by source, the peers' chunks for this rank to sum, then the whole message.
// All of these count packs from the beginning of a rank's memory.
DEVICE u32 half(const Args& args, u32 call) {
  const u32 chunks = args.max_chunks / WORLD_SIZE * PEERS + args.max_chunks;
  return (call & 1) * chunks * CHUNK;
}

DEVICE u32 part(const Args& args, u32 index, u32 call) {
  return half(args, call) + index * (args.max_chunks / WORLD_SIZE) * CHUNK;
}

DEVICE u32 sums(const Args& args, u32 call) { return part(args, PEERS, call); }

DEVICE u32* part_flags(const Args& args, u32 owner, u32 source) {
  return flags(args, owner) + place(source, owner) * (args.max_chunks / WORLD_SIZE);
}

DEVICE u32* sum_flags(const Args& args, u32 rank) {
  return flags(args, rank) + PEERS * (args.max_chunks / WORLD_SIZE);
}

// Where a lane's first pack is of a chunk that stands `own` among those of its rank.
DEVICE u32 first_pack(u32 own, u32 owner, u32 lane) {
  return (own * WORLD_SIZE + owner) * CHUNK + lane;
}

DEVICE void push(const Args& args, u32 own, u32 owner, u32 lane, u32 call) {
  const u32 begin = first_pack(own, owner, lane);
  Pack* there = args.memory[owner] + part(args, place(RANK, owner), call) + own * CHUNK + lane;
  Pack mine[PACKS];
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i)
    if (begin + i * WARP < args.num_packs) mine[i] = args.input[begin + i * WARP];
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i)
    if (begin + i * WARP < args.num_packs) there[i * WARP] = mine[i];
  sync_warp();
  if (lane == 0) store_release_system(part_flags(args, owner, RANK) + own, call);
}

DEVICE void add(const Args& args, u32 own, u32 lane, u32 call) {
  const u32 begin = first_pack(own, RANK, lane);
  if (lane < PEERS) await(part_flags(args, RANK, peer(lane)) + own, call, args.timeout_ns);
  sync_warp();
  const Pack* arrived = args.memory[RANK] + part(args, 0, call) + own * CHUNK + lane;
  const u32 stride = args.max_chunks / WORLD_SIZE * CHUNK, to = sums(args, call);
#pragma unroll 1
  for (u32 from = 0; from < PACKS; from += BATCH) {
    Pack staged[WORLD_SIZE][BATCH];
#pragma unroll
    for (u32 source = 0; source < WORLD_SIZE; ++source) {
#pragma unroll
      for (u32 i = 0; i < BATCH; ++i) {
        const u32 offset = (from + i) * WARP;
        if (begin + offset >= args.num_packs) continue;
        staged[source][i] = source == RANK
                                ? args.input[begin + offset]
                                : load_staged(arrived + place(source, RANK) * stride + offset);
      }
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; ++i) {
      const u32 index = begin + (from + i) * WARP;
      Sum sum;
#pragma unroll
      for (u32 source = 0; source < WORLD_SIZE; ++source) sum.add(staged[source][i], source == 0);
      const Pack rounded = sum.rounded();
      if (index >= args.num_packs) continue;
#pragma unroll
      for (u32 step = 0; step < PEERS; ++step) args.memory[peer(step)][to + index] = rounded;
      args.output[index] = rounded;
    }
  }
  sync_warp();
  if (lane < PEERS)
    store_release_system(sum_flags(args, peer(lane)) + own * WORLD_SIZE + RANK, call);
}

DEVICE void receive(const Args& args, u32 own, u32 owner, u32 lane, u32 call) {
  const u32 begin = first_pack(own, owner, lane);
  if (lane == 0) await(sum_flags(args, RANK) + own * WORLD_SIZE + owner, call, args.timeout_ns);
  sync_warp();
  const Pack* arrived = args.memory[RANK] + sums(args, call) + begin;
  Pack theirs[PACKS];
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i)
    if (begin + i * WARP < args.num_packs) theirs[i] = load_staged(arrived + i * WARP);
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i)
    if (begin + i * WARP < args.num_packs) args.output[begin + i * WARP] = theirs[i];
}

extern "C" KERNEL(THREADS, 2) push_two_shot(const ARGUMENT Args args) {
  const u32 warp = thread_index() / WARP, lane = thread_index() % WARP;
  const u32 call = load_relaxed_device(args.state) + 1;
  const u32 num_chunks = (args.num_packs + CHUNK - 1) / CHUNK;
  const bool pushes = warp < PUSHERS, adds = !pushes && warp < PUSHERS + SHARE;
  const u32 index = pushes ? warp : adds ? warp - PUSHERS : warp - PUSHERS - SHARE;
  const u32 owner = adds ? RANK : peer(index % PEERS);
  const u32 stride = num_blocks() * SHARE;
  u32 own = block_index() * SHARE + (adds ? index : index / PEERS);
  for (; own * WORLD_SIZE + owner < num_chunks; own += stride) {
    if (pushes)
      push(args, own, owner, lane, call);
    else if (adds)
      add(args, own, lane, call);
    else
      receive(args, own, owner, lane, call);
  }
  end_call(args.state, call);
}
