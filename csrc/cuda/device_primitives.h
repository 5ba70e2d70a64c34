// The instructions that the kernels need beyond C++, for sm_80 and newer. The test suite has another
// header in place of this one, which lets the same kernels run on a CPU.
#pragma once

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define ARGUMENT __grid_constant__
#define SHARED __shared__

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 num_blocks() { return gridDim.x; }

// Programmatic dependent launch: nothing that an earlier kernel may still read or write is touched
// before the wait, which also makes its writes visible.
DEVICE void await_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void release_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Of this multiprocessor's clock, which ticks 1 to 2 times a nanosecond.
DEVICE u64 cycles() { return clock64(); }

// One 8-byte access, so both sums of a word arrive together or not at all.
DEVICE u64 load_system(const u64* address) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

DEVICE void store_system(u64* address, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

DEVICE u64 load_device(const u64* address) {
  u64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

DEVICE u32 load_relaxed_device(const u32* address) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// 16 bytes that peers have written, which are never in this multiprocessor's own cache. Several of
// these are under way at the same time: nothing between them makes one wait for another.
DEVICE void load_from_peers(const void* address, u32* words) {
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(address));
}

// 16 bytes for a peer, or where a peer will write.
DEVICE void store_for_peers(void* address, const u32* words) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// 16 bytes that nobody is expected to want soon again.
DEVICE void load_streaming(const void* address, u32* words) {
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(address));
}

DEVICE void store_streaming(void* address, const u32* words) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Bytes that are wanted soon, in whole 16 at such an address: into the second-level cache.
DEVICE void prefetch(const char* address, u32 num_bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(num_bytes) : "memory");
#else
  for (u32 at = 0; at < num_bytes; at += 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address + at) : "memory");
#endif
}

DEVICE u32 fetch_or(u32* address, u32 bits) { return atomicOr(address, bits); }
DEVICE u32 fetch_add(u32* address, u32 value) { return atomicAdd(address, value); }
DEVICE void block_barrier() { __syncthreads(); }

// Nobody passes before all threads have the value that they come with, if it was being loaded.
DEVICE void block_barrier_after(u32 value) {
  asm volatile(
      "{\n .reg .pred p;\n .reg .u32 r;\n setp.ne.u32 p, %0, 0;\n bar.red.popc.u32 r, 0, p;\n}" ::"r"(value)
      : "memory");
}

DEVICE void trap() { __trap(); }

DEVICE u64 compare_and_swap(u64* address, u64 expected, u64 value) {
  return atomicCAS(address, expected, value);
}

DEVICE float exchange_lanes(float value, u32 distance) {
  return __shfl_xor_sync(0xffffffffu, value, distance);
}

DEVICE float broadcast(float value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE u32 broadcast(u32 value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }

// Barrier 0 is the whole block's; a team of several in a block has one of its own.
DEVICE void team_barrier(u32 team, u32 threads, u32 teams) {
  if (teams == 1)
    __syncthreads();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}

DEVICE u32 as_bits(float value) { return __float_as_uint(value); }
DEVICE float from_bits(u32 bits) { return __uint_as_float(bits); }

// Two numbers of 16 bits in a word, the first in its low half.
DEVICE float half_to_float(u32 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}

DEVICE u32 floats_to_halves(float first, float second) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

DEVICE u32 floats_to_bfloats(float first, float second) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

// Two numbers of 8 bits (e4m3), the first in the low byte.
#if __CUDA_ARCH__ >= 890
#define NATIVE_FP8
DEVICE u32 floats_to_fp8(float first, float second) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}
#endif

// Makes the compiler forget what it has derived from a word, instead of keeping that in registers.
DEVICE void forget_derived(u32& word) { asm volatile("" : "+r"(word)); }
