// What the kernels share that sum through host memory: outboxes, and the count of calls.
//
// A parcel is 16 bytes: seven halves of a word, and in the eighth the end of the number of the call that
// they belong to. CUDA requires of every machine that a GPU's naturally aligned access of 16 bytes to
// host memory is one access for all other devices. So a parcel arrives whole and its number says that
// it has: no word that messages must not hold, and nothing to empty once it was read.
//
// A rank alone writes into its outbox, and all peers read there: over PCI Express a message goes up
// once, however many ranks there are. An outbox has two halves, which calls use in turn. A rank writes
// into a half again two calls later. To end the call between, it had to have a sum with what each
// peer sent in that call, thus after the peer had ended the first and read all it needed. So no call
// needs a barrier at its beginning or end, and either of the kernels may make the next call.
//
// A half begins with its parcels: first those that carry messages, then the flags of chunks. What
// follows is data alone, which says nothing of itself.
#pragma once

#include "packs.h"

constexpr u32 PEERS = WORLD_SIZE - 1;
constexpr u32 PACK = ELEMENT == FLOAT ? 4 : 8;  // elements
constexpr u32 CALL = 3;  // the word of a parcel in whose low half the number of its call ends
constexpr u32 RENEWAL = (1u << 14) - 1;

struct Args {
  const Pack* input;
  Pack* output;
  u32* state;  // the number of the last call, and how many blocks of this one have ended
  u32 num_packs;
  u32 half_packs;     // of an outbox
  u32 first_flag;     // where in a half the flags begin
  u32 first_message;  // where the message begins, and thus how many parcels stand before it
  u32 first_sum;      // where the sums begin that this rank owns
  u32 unused;
  u64 timeout_ns;
  Pack* memory[WORLD_SIZE];  // the outbox of each rank
};

DEVICE Pack* half_outbox(const Args& args, u32 rank, u32 call) {
  return args.memory[rank] + (call & 1) * args.half_packs;
}

// The rank at a place among the peers of this one, in the order of ranks, and the place of a rank.
DEVICE u32 peer_at(u32 place) { return place < RANK ? place : place + 1; }
DEVICE u32 place_of(u32 rank) { return rank < RANK ? rank : rank - 1; }

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

// What every thread does at the end of a call.
//
// What a parcel has of its number comes again after 2^16 calls. One that was not written for so long
// would be taken for a new one, so every 2^14 calls each half gets the number of the call that used it
// last. This block has had something of all peers in this call, so none reads what the call before left.
DEVICE void end_call(const Args& args, const Count& count, u32 call) {
  if ((call & RENEWAL) < 2) {
    block_barrier();
    const u32 words[4] = {0, 0, 0, call - 1};
    Pack* const half = half_outbox(args, RANK, call - 1);
    const u32 stride = num_blocks() * THREADS;
    for (u32 i = block_index() * THREADS + thread_index(); i < args.first_message; i += stride)
      store_whole(half + i, words);
  }
  count.end(args.state, call, num_blocks());
}
