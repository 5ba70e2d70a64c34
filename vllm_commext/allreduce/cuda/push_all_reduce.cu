// All-reduce of large messages, in one launch a rank: half of the warps push this rank's message
// into the peers' staging memory, the other half add what the peers have pushed.
//
// A chunk is what one warp moves at a time. Its pusher stores it to every peer and then, with
// release semantics, the call's number into the chunk's flag there. Its adder waits for the flags
// of all peers, adds in the order of ranks in float32, so that all ranks get the same bits, and
// stores the sum. Copying, the way over the links and adding overlap from chunk to chunk, and no
// copy of the input is made that the links do not need.
//
// Staging memory has two halves, which calls use in turn. A peer writes into a half again two calls
// later; by then it has seen flags of the call between, which this rank set after it had ended the
// first. So a call needs no barrier, at its beginning or at its end. The number of the call is
// counted in device memory, by the last block of each call: a replayed graph goes on counting.
//
// Progress: adders wait only for pushers on other GPUs, and pushers wait for nobody. Blocks begin
// in the order of their index, so the first chunk that is missing anywhere has its pusher running.
//
// Macros, set by push.py:
//   ELEMENT       0 float, 1 half, 2 bfloat16
//   WORLD_SIZE    ranks
//   RANK          this one
//   PACKS         packs of 16 bytes that a lane has of a chunk

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 WARP = 32;
constexpr u32 PUSHERS = 8;  // warps of a block; as many add
constexpr u32 CHUNK = WARP * PACKS;
constexpr u32 SPINS_PER_CHECK = 256;
constexpr u32 PEERS = WORLD_SIZE - 1;
constexpr u32 BATCH = PACKS / PEERS > 0 ? PACKS / PEERS : 1;  // packs of each peer at a time
constexpr int FLOAT = 0, HALF = 1;

struct alignas(16) Pack {
  u32 words[4];
};

struct Args {
  const Pack* input;
  Pack* output;
  u32* state;  // the number of the last call, and how many blocks of this one have ended
  u64 num_packs;
  u64 half_packs;   // a rank's part of one half of the staging memory
  u64 flags_offset;  // bytes from the beginning of a rank's memory to its flags
  u64 flags_stride;  // flags of one source
  u64 timeout_ns;
  Pack* memory[WORLD_SIZE];  // of each rank, as this process has it mapped
};

static __device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

static __device__ __forceinline__ u32 load_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

static __device__ __forceinline__ void store_release(u32* address, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

static __device__ __forceinline__ u32 load_relaxed(const u32* address) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// What peers have written is never in this multiprocessor's own cache. Several of these are under
// way at the same time: nothing between them makes one wait for another.
static __device__ __forceinline__ Pack load_staged(const Pack* address) {
  Pack pack;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]), "=r"(pack.words[3])
               : "l"(address));
  return pack;
}

static __device__ __forceinline__ float low(u32 word) {
  if (ELEMENT != HALF) return __uint_as_float(word << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)(word & 0xffffu)));
  return value;
}

static __device__ __forceinline__ float high(u32 word) {
  if (ELEMENT != HALF) return __uint_as_float(word & 0xffff0000u);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)(word >> 16)));
  return value;
}

static __device__ __forceinline__ u32 join(float first, float second) {
  u32 word;
  if (ELEMENT == HALF)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

struct Sum {
  float parts[8];

  __device__ __forceinline__ void add(const Pack& pack, bool first) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      if (ELEMENT == FLOAT) {
        const float value = __uint_as_float(pack.words[i]);
        parts[i] = first ? value : parts[i] + value;
      } else {
        parts[2 * i] = first ? low(pack.words[i]) : parts[2 * i] + low(pack.words[i]);
        parts[2 * i + 1] = first ? high(pack.words[i]) : parts[2 * i + 1] + high(pack.words[i]);
      }
    }
  }

  __device__ __forceinline__ Pack rounded() const {
    Pack pack;
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
      pack.words[i] =
          ELEMENT == FLOAT ? __float_as_uint(parts[i]) : join(parts[2 * i], parts[2 * i + 1]);
    return pack;
  }
};

// The place of a source among the parts of a half: every rank but the owner has one.
static __device__ __forceinline__ constexpr u32 place(u32 source, u32 owner) {
  return source < owner ? source : source - 1;
}

static __device__ __forceinline__ Pack* part(const Args& args, u32 owner, u32 source, u32 call) {
  return args.memory[owner] + (u64(call & 1) * PEERS + place(source, owner)) * args.half_packs;
}

static __device__ __forceinline__ u32* flags(const Args& args, u32 owner, u32 source) {
  char* base = reinterpret_cast<char*>(args.memory[owner]) + args.flags_offset;
  return reinterpret_cast<u32*>(base) + place(source, owner) * args.flags_stride;
}

static __device__ __forceinline__ void push(const Args& args, u64 chunk, u32 lane, u32 call) {
  const u64 begin = chunk * CHUNK + lane;
  Pack packs[PACKS];
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i)
    if (begin + i * WARP < args.num_packs) packs[i] = args.input[begin + i * WARP];
#pragma unroll
  for (u32 step = 1; step < WORLD_SIZE; ++step) {
    const u32 owner = (RANK + step) % WORLD_SIZE;  // all ranks begin with another one
    Pack* staged = part(args, owner, RANK, call);
#pragma unroll
    for (u32 i = 0; i < PACKS; ++i)
      if (begin + i * WARP < args.num_packs) staged[begin + i * WARP] = packs[i];
  }
  __syncwarp();
  if (lane < PEERS) store_release(flags(args, (RANK + 1 + lane) % WORLD_SIZE, RANK) + chunk, call);
}

static __device__ __forceinline__ void await(const u32* flag, u32 call, u64 timeout_ns) {
  if (int(load_acquire(flag) - call) >= 0) return;
  const u64 start = nanoseconds();
  for (;;) {
    for (u32 spin = 0; spin < SPINS_PER_CHECK; ++spin)
      if (int(load_acquire(flag) - call) >= 0) return;
    if (nanoseconds() - start > timeout_ns) __trap();
  }
}

static __device__ __forceinline__ void add(const Args& args, u64 chunk, u32 lane, u32 call) {
  const u64 begin = chunk * CHUNK + lane;
  Pack own[PACKS];
#pragma unroll
  for (u32 i = 0; i < PACKS; ++i)
    if (begin + i * WARP < args.num_packs) own[i] = args.input[begin + i * WARP];
  if (lane < PEERS)
    await(flags(args, RANK, (RANK + 1 + lane) % WORLD_SIZE) + chunk, call, args.timeout_ns);
  __syncwarp();
#pragma unroll
  for (u32 from = 0; from < PACKS; from += BATCH) {
    Pack staged[PEERS][BATCH];
#pragma unroll
    for (u32 source = 0; source < PEERS; ++source) {
      const Pack* base = args.memory[RANK] + (u64(call & 1) * PEERS + source) * args.half_packs;
#pragma unroll
      for (u32 i = 0; i < BATCH; ++i) {
        const u64 index = begin + (from + i) * WARP;
        if (index < args.num_packs) staged[source][i] = load_staged(base + index);
      }
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; ++i) {
      Sum sum;
#pragma unroll
      for (u32 source = 0; source < WORLD_SIZE; ++source) {
        if (source == RANK)
          sum.add(own[from + i], source == 0);
        else
          sum.add(staged[place(source, RANK)][i], source == 0);
      }
      const u64 index = begin + (from + i) * WARP;
      if (index < args.num_packs) args.output[index] = sum.rounded();
    }
  }
}

extern "C" __global__ void __launch_bounds__(2 * PUSHERS* WARP)
    push_all_reduce(const __grid_constant__ Args args) {
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const u32 call = load_relaxed(args.state) + 1;
  const u64 num_chunks = (args.num_packs + CHUNK - 1) / CHUNK;
  const u64 stride = u64(gridDim.x) * PUSHERS;
  const u64 first = u64(blockIdx.x) * PUSHERS + warp % PUSHERS;
  if (warp < PUSHERS)
    for (u64 chunk = first; chunk < num_chunks; chunk += stride) push(args, chunk, lane, call);
  else
    for (u64 chunk = first; chunk < num_chunks; chunk += stride) add(args, chunk, lane, call);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(args.state + 1, 1) == gridDim.x - 1) {
      args.state[1] = 0;
      args.state[0] = call;
    }
  }
}
