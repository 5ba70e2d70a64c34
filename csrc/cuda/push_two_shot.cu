// All-reduce of large messages between three to eight ranks, in one launch a rank.
//
// A chunk is what one warp moves at a time, a pack of 16 bytes a lane, and chunk c is summed by rank
// c % WORLD_SIZE. Of a block's warps, some push this rank's chunks into the staging memory of those
// that sum them; some sum, in the order of ranks and in float32, and push the rounded sum to every
// peer; the others take the sums of the peers from staging memory to the output. So every link
// carries each rank's share of the message twice, as in any two-shot all-reduce, but the three steps
// overlap from chunk to chunk and all ranks get the same bits.
//
// Progress: of a block, pushers wait for nobody, summing warps for pushers and receivers for summing
// warps of the block with the same index on other GPUs. Blocks begin in the order of their index, so
// the lowest that has not ended everywhere has a free place there.
//
// SHARE, set by allreduce/push.py: chunks of every rank that a block handles at a time.

#include "push_args.h"

constexpr u32 PUSHERS = SHARE * PEERS;  // warps of a block; as many receive
constexpr u32 THREADS = (2 * PUSHERS + SHARE) * WARP;

// In a half come first, by source, the peers' chunks for this rank to sum, then the whole message.
// What these return counts packs from the beginning of a rank's memory.
DEVICE u32 half(const Args& args, u32 call) {
  return (call & 1) * (args.max_packs / WORLD_SIZE * PEERS + args.max_packs);
}

DEVICE u32 part(const Args& args, u32 place, u32 call) {
  return half(args, call) + place * (args.max_packs / WORLD_SIZE);
}

DEVICE u32 sums(const Args& args, u32 call) { return part(args, PEERS, call); }

// `own` counts the packs that one rank sums, `index` those of the message.
DEVICE void push(const Args& args, u32 own, u32 index, u32 owner, u32 call) {
  Pack* there = args.memory[owner] + part(args, place(RANK, owner), call) + own;
  store_to_peer(there, sendable(args.input[index]));
}

DEVICE void add(const Args& args, u32 own, u32 index, u32 call) {
  Pack* here = args.memory[RANK] + half(args, call) + own;
  const Pack summed =
      sum_of_ranks(here, args.max_packs / WORLD_SIZE, args.input[index], args.timeout_ns);
  const Pack rounded = sendable(summed);
#pragma unroll
  for (u32 step = 0; step < PEERS; ++step)
    store_to_peer(args.memory[peer(step)] + sums(args, call) + index, rounded);
  args.output[index] = rounded;
}

DEVICE void receive(const Args& args, u32 index, u32 call) {
  args.output[index] = take(args.memory[RANK] + sums(args, call) + index, args.timeout_ns);
}

extern "C" KERNEL(THREADS, 2) push_two_shot(const ARGUMENT Args args) {
  const u32 warp = thread_index() / WARP, lane = thread_index() % WARP;
  Count count;
  const u32 call = begin_call(args.state, count);
  const bool pushes = warp < PUSHERS, adds = !pushes && warp < PUSHERS + SHARE;
  const u32 turn = pushes ? warp : adds ? warp - PUSHERS : warp - PUSHERS - SHARE;
  const u32 owner = adds ? RANK : peer(turn % PEERS);
  u32 chunk = block_index() * SHARE + (adds ? turn : turn / PEERS);  // among the owner's
  for (;; chunk += num_blocks() * SHARE) {
    const u32 own = chunk * WARP + lane;
    const u32 index = (chunk * WORLD_SIZE + owner) * WARP + lane;
    if (index >= args.num_packs) break;
    if (pushes)
      push(args, own, index, owner, call);
    else if (adds)
      add(args, own, index, call);
    else
      receive(args, index, call);
  }
  count.end(args.state, call, num_blocks());
}
