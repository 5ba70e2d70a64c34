// What the two push kernels share: packs, their sums, and packs on their way between ranks.
//
// A pack that arrives is its own flag (Lamport's protocol): a word of staging memory is EMPTY until
// a peer has written it, and EMPTY again once it was read. No number of the three element types is
// lost by that: EMPTY stands for a NaN, or two, and is sent as another NaN. So nothing has to wait
// until stores have arrived before it can tell the peer, which under load takes microseconds.
//
// Staging memory has two halves, which calls use in turn. A peer writes into a half again two calls
// later. To end the call between, it had to have a sum with what this rank pushed in that call, thus
// after it had ended the first and emptied what it had read. So no call needs a barrier at its
// beginning or end.
#pragma once

constexpr u32 WARP = 32;
constexpr u32 PEERS = WORLD_SIZE - 1;
constexpr u32 EMPTY = 0xffffffffu, OTHER_NAN = 0x7fffffffu;
constexpr u32 SPINS_PER_CHECK = 256;
constexpr int FLOAT = 0, HALF = 1;  // else bfloat16

struct alignas(16) Pack {
  u32 words[4];
};

struct Args {
  const Pack* input;
  Pack* output;
  u32* state;  // the number of the last call, and how many blocks of this one have ended
  u32 num_packs;
  u32 max_packs;  // of the largest message, a multiple of `WARP * WORLD_SIZE`
  u64 timeout_ns;
  Pack* memory[WORLD_SIZE];  // of each rank, as this process has it mapped
};

struct Sum {
  float parts[8];

  DEVICE_MEMBER void add(const Pack& pack, bool first) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 word = pack.words[i];
      if (ELEMENT == FLOAT) {
        parts[i] = first ? from_bits(word) : parts[i] + from_bits(word);
      } else {
        const float low = ELEMENT == HALF ? half_to_float(word & 0xffffu) : from_bits(word << 16);
        const float high =
            ELEMENT == HALF ? half_to_float(word >> 16) : from_bits(word & 0xffff0000u);
        parts[2 * i] = first ? low : parts[2 * i] + low;
        parts[2 * i + 1] = first ? high : parts[2 * i + 1] + high;
      }
    }
  }

  DEVICE_MEMBER Pack rounded() const {
    Pack pack;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      if (ELEMENT == FLOAT)
        pack.words[i] = as_bits(parts[i]);
      else if (ELEMENT == HALF)
        pack.words[i] = floats_to_halves(parts[2 * i], parts[2 * i + 1]);
      else
        pack.words[i] = floats_to_bfloats(parts[2 * i], parts[2 * i + 1]);
    }
    return pack;
  }
};

// The place of a source among the parts that a rank keeps for its peers.
DEVICE constexpr u32 place(u32 source, u32 owner) { return source < owner ? source : source - 1; }

DEVICE constexpr u32 source_at(u32 place, u32 owner) { return place < owner ? place : place + 1; }

// The peer that is `step` ranks further; all ranks begin with another one.
DEVICE u32 peer(u32 step) { return (RANK + 1 + step) % WORLD_SIZE; }

// As it may be sent.
DEVICE Pack sendable(Pack pack) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    if (pack.words[i] == EMPTY) pack.words[i] = OTHER_NAN;
  return pack;
}

DEVICE bool has_arrived(const Pack& pack) {
  return pack.words[0] != EMPTY && pack.words[1] != EMPTY && pack.words[2] != EMPTY &&
         pack.words[3] != EMPTY;
}

DEVICE void store_to_peer(Pack* address, const Pack& pack) {
  store_for_peers(address, pack.words);
}

DEVICE Pack load_staged(const Pack* address) {
  Pack pack;
  load_from_peers(address, pack.words);
  return pack;
}

DEVICE void empty(Pack* address) {
  const u32 words[4] = {EMPTY, EMPTY, EMPTY, EMPTY};
  store_for_peers(address, words);
}

// Counts looks in vain, and ends a kernel, and with it the process's use of the GPU, if a peer does
// not come.
class Patience {
  u64 start_ = 0;
  u32 spins_ = 0;

 public:
  DEVICE_MEMBER void spin(u64 timeout_ns) {
    if (++spins_ % SPINS_PER_CHECK != 0) return;
    const u64 now = nanoseconds();
    if (start_ == 0) start_ = now;
    if (now - start_ > timeout_ns) trap();
  }
};

// The pack that a peer stores there, which is empty again afterwards.
DEVICE Pack take(Pack* address, u64 timeout_ns) {
  Pack pack = load_staged(address);
  for (Patience patience; !has_arrived(pack); pack = load_staged(address))
    patience.spin(timeout_ns);
  empty(address);
  return pack;
}

// The last block that ends counts the call, so that a replayed graph goes on counting.
DEVICE void end_call(u32* state, u32 call) {
  block_barrier();
  if (thread_index() != 0) return;
  fence_device();
  if (fetch_add(state + 1, 1) == num_blocks() - 1) {
    state[1] = 0;
    state[0] = call;
  }
}
