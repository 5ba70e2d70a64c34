// All-reduce of large messages between two ranks, in one launch a rank: half of the warps push this
// rank's message into the peer's staging memory, the other half add what the peer has pushed.
//
// A chunk is what one warp moves at a time. Its pusher stores it to the peer and then, with release
// semantics, the call's number into the chunk's flag there. Its adder waits for the peer's flag,
// adds in the order of ranks in float32, so that both ranks get the same bits, and stores the sum.
// Copying, the way over the links and adding overlap from chunk to chunk, and no copy of the input
// is made that the links do not need.
//
// Staging memory has two halves, which calls use in turn. A peer writes into a half again two calls
// later; by then it has seen flags of the call between, which this rank set after it had ended the
// first. So a call needs no barrier, at its beginning or at its end.
//
// Progress: adders wait only for pushers on the other GPU, and pushers wait for nobody. Blocks begin
// in the order of their index, so the first chunk that is missing anywhere has its pusher running.
//
// Macros, set by push.py:
//   ELEMENT       0 float, 1 half, 2 bfloat16
//   WORLD_SIZE    2
//   RANK          this one
//   PACKS         packs of 16 bytes that a lane has of a chunk

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef HOST_EMULATION
#include "host_emulation.h"
#else
#include "device_primitives.h"
#endif
#include "push_parts.h"

static_assert(WORLD_SIZE == 2, "push_two_shot.cu is for more ranks");

constexpr u32 PUSHERS = 8;  // warps of a block; as many add
constexpr u32 THREADS = 2 * PUSHERS * WARP;
constexpr u32 PEER = 1 - RANK;

DEVICE Pack* staged(const Args& args, u32 owner, u32 call) {
  return args.memory[owner] + (call & 1) * args.max_chunks * CHUNK;
}

DEVICE void push(const Args& args, u32 chunk, u32 lane, u32 call) {
  const u32 begin = chunk * CHUNK + lane;
  Pack* there = staged(args, PEER, call);
  Pack mine[PACKS];
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i)
    if (begin + i * WARP < args.num_packs) mine[i] = args.input[begin + i * WARP];
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i)
    if (begin + i * WARP < args.num_packs) there[begin + i * WARP] = mine[i];
  sync_warp();
  if (lane == 0) store_release_system(flags(args, PEER) + chunk, call);
}

DEVICE void add(const Args& args, u32 chunk, u32 lane, u32 call) {
  const u32 begin = chunk * CHUNK + lane;
  const Pack* arrived = staged(args, RANK, call);
  Pack mine[PACKS], theirs[PACKS];
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i)
    if (begin + i * WARP < args.num_packs) mine[i] = args.input[begin + i * WARP];
  if (lane == 0) await(flags(args, RANK) + chunk, call, args.timeout_ns);
  sync_warp();
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i)
    if (begin + i * WARP < args.num_packs) theirs[i] = load_staged(arrived + begin + i * WARP);
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i) {
    Sum sum;
    sum.add(RANK == 0 ? mine[i] : theirs[i], true);
    sum.add(RANK == 0 ? theirs[i] : mine[i], false);
    if (begin + i * WARP < args.num_packs) args.output[begin + i * WARP] = sum.rounded();
  }
}

extern "C" KERNEL(THREADS, 2) push_all_reduce(const ARGUMENT Args args) {
  const u32 warp = thread_index() / WARP, lane = thread_index() % WARP;
  const u32 call = load_relaxed_device(args.state) + 1;
  const u32 num_chunks = (args.num_packs + CHUNK - 1) / CHUNK;
  const u32 stride = num_blocks() * PUSHERS;
  const u32 first = block_index() * PUSHERS + warp % PUSHERS;
  if (warp < PUSHERS)
    for (u32 chunk = first; chunk < num_chunks; chunk += stride) push(args, chunk, lane, call);
  else
    for (u32 chunk = first; chunk < num_chunks; chunk += stride) add(args, chunk, lane, call);
  end_call(args.state, call);
}
