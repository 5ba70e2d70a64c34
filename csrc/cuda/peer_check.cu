// Whether what each GPU stores into its peers' memory gets there: a machine may map that memory and
// deliver nothing, or something else. One launch a rank, all at about the same time.
//
// A thread a peer stores a pack into that peer's staging memory, as the other kernels do, and looks
// for the peer's own, but not for longer than the time-out. Nothing is ended: the answer says whose
// pack came. What came is emptied again.

#include "packs.h"

struct Args {
  u32* answer;  // bit `rank` becomes one where that rank's pack has come
  u64 timeout_ns;
  Pack* memory[WORLD_SIZE];  // of each rank, as this process has it mapped
};

constexpr u32 THREADS = WARP;

// Of one rank for another, unlike any other pair's.
DEVICE Pack greeting(u32 from, u32 to) {
  Pack pack;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) pack.words[i] = (from * 16 + to) * 0x01000193u + i;
  return pack;
}

DEVICE bool is_equal(const Pack& one, const Pack& other) {
  bool equal = true;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) equal = equal && one.words[i] == other.words[i];
  return equal;
}

extern "C" KERNEL(THREADS, 1) peer_check(const ARGUMENT Args args) {
  const u32 peer = thread_index(), rank = RANK;
  if (peer < WORLD_SIZE && peer != rank) {
    store_to_peer(args.memory[peer] + rank, greeting(rank, peer));
    Pack* const mine = args.memory[rank] + peer;
    const u64 start = nanoseconds();
    Pack found = load_staged(mine);
    while (!has_arrived(found) && nanoseconds() - start < args.timeout_ns)
      found = load_staged(mine);
    if (is_equal(found, greeting(peer, rank))) fetch_or(args.answer, 1u << peer);
    empty(mine);
  }
}
