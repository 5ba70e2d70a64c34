// All-reduce of large messages between two ranks, in one launch a rank: half of the warps push this
// rank's message into the peer's staging memory, the other half add what the peer has pushed.
//
// A thread moves a pack of 16 bytes at a time, which is best at every size: what is under way at the
// same time are the packs of many warps. A pusher stores a pack to the peer; its adder waits until
// the peer's has arrived, adds in the order of ranks in float32, so that both ranks get the same
// bits, and stores the sum. Copying, the way over the links and adding overlap, and no copy of the
// input is made that the links do not need.
//
// Progress: adders wait only for pushers on the other GPU, and pushers wait for nobody. Blocks begin
// in the order of their index, so the first pack that is missing anywhere has its pusher running.

#include "push_args.h"

static_assert(WORLD_SIZE == 2, "push_two_shot.cu is for more ranks");

constexpr u32 PUSHERS = 8;  // warps of a block; as many add
constexpr u32 THREADS = 2 * PUSHERS * WARP;

DEVICE Pack* staged(const Args& args, u32 owner, u32 call) {
  return args.memory[owner] + (call & 1) * args.max_packs;
}

DEVICE void push(const Args& args, u32 index, u32 call) {
  store_to_peer(staged(args, 1 - RANK, call) + index, sendable(args.input[index]));
}

DEVICE void add(const Args& args, u32 index, u32 call) {
  const Pack mine = sendable(args.input[index]);
  const Pack theirs = take(staged(args, RANK, call) + index, args.timeout_ns);
  Sum sum;
  sum.add(RANK == 0 ? mine : theirs, true);
  sum.add(RANK == 0 ? theirs : mine, false);
  args.output[index] = sum.rounded();
}

extern "C" KERNEL(THREADS, 2) push_all_reduce(const ARGUMENT Args args) {
  const u32 warp = thread_index() / WARP, lane = thread_index() % WARP;
  Count count;
  const u32 call = begin_call(args.state, count);
  const u32 stride = num_blocks() * PUSHERS * WARP;
  u32 index = (block_index() * PUSHERS + warp % PUSHERS) * WARP + lane;
  for (; index < args.num_packs; index += stride) {
    if (warp < PUSHERS)
      push(args, index, call);
    else
      add(args, index, call);
  }
  count.end(args.state, call, num_blocks());
}
