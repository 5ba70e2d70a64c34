// What the two push kernels share: packs and their sums, staging memory, flags.
#pragma once

constexpr u32 WARP = 32;
constexpr u32 CHUNK = WARP * PACKS;  // packs that a warp moves at a time
constexpr u32 PEERS = WORLD_SIZE - 1;
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
  u32 max_chunks;    // of the largest message, a multiple of the ranks
  u64 flags_offset;  // bytes from the beginning of a rank's memory to its flags
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

// The peer that is `step` ranks further; all ranks begin with another one.
DEVICE u32 peer(u32 step) { return (RANK + 1 + step) % WORLD_SIZE; }

DEVICE u32* flags(const Args& args, u32 owner) {
  return reinterpret_cast<u32*>(reinterpret_cast<char*>(args.memory[owner]) + args.flags_offset);
}

DEVICE Pack load_staged(const Pack* address) {
  Pack pack;
  load_from_peers(address, pack.words);
  return pack;
}

DEVICE void await(const u32* flag, u32 call, u64 timeout_ns) {
  if (int(load_acquire_system(flag) - call) >= 0) return;
  const u64 start = nanoseconds();
  for (;;) {
    for (u32 spin = 0; spin < SPINS_PER_CHECK; ++spin)
      if (int(load_acquire_system(flag) - call) >= 0) return;
    if (nanoseconds() - start > timeout_ns) trap();
  }
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
