// Runs a kernel on a CPU, in place of device_primitives.h.
//
// A GPU thread is a fiber; the fibers of a block share one OS thread and change places where the
// kernel shuffles, meets a barrier or looks at memory that others write. Ranks and blocks are OS
// threads, so the slots are written and read concurrently for real. What is the same for all kernels
// is in host_emulation.cpp, which is compiled once.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#define DEVICE [[maybe_unused]] static inline
#define DEVICE_MEMBER inline
#define KERNEL(threads, blocks) void
#define ARGUMENT
#define SHARED static thread_local

namespace emulation {

// Of the fiber that runs.
struct Indices {
  u32 thread, block, num_blocks;
};
extern __thread Indices indices;

// Calls on one rank, one after the other.
struct Calls {
  u32 num_calls;
  const u32* blocks;  // of each
  u32 threads, teams;
  u32 workers, seed;
  u32 pause_every, most_pause_us;  // one of so many calls begins late by up to so much
};

// `begin` is told the number of the call in the OS thread that then runs `body` in fibers.
void run(const Calls& calls, const void* context, void (*begin)(const void* context, u32 call),
         void (*body)());
void yield();
// Anything may happen between two accesses of shared memory.
void disturb();
// Every lane gives a value and takes that of another.
u32 exchange(u32 value, u32 from_lane);
void meet_block();
void meet_team(u32 team, u32 threads);
u64 nanoseconds();

// A GPU faults where an access of 16 bytes is not to a multiple of 16; this CPU would not.
inline void check_pack(const void* address) {
  if (reinterpret_cast<u64>(address) % 16 != 0) std::abort();
}

}  // namespace emulation

DEVICE u32 thread_index() { return emulation::indices.thread; }
DEVICE u32 block_index() { return emulation::indices.block; }
DEVICE u32 num_blocks() { return emulation::indices.num_blocks; }
DEVICE void await_previous_grid() {}
DEVICE void release_next_grid() {}

DEVICE u64 nanoseconds() { return emulation::nanoseconds(); }

DEVICE u64 cycles() { return nanoseconds(); }

DEVICE u64 load_system(const u64* address) {
  emulation::yield();
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

DEVICE void store_system(u64* address, u64 value) {
  emulation::disturb();
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

DEVICE u64 load_device(const u64* address) { return __atomic_load_n(address, __ATOMIC_RELAXED); }

DEVICE u32 load_relaxed_device(const u32* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

// A word at a time: nothing says that 16 bytes arrive together.
DEVICE void load_from_peers(const void* address, u32* words) {
  emulation::check_pack(address);
  emulation::yield();
  for (u32 i = 0; i < 4; ++i)
    words[i] = __atomic_load_n(static_cast<const u32*>(address) + i, __ATOMIC_RELAXED);
}

DEVICE void store_for_peers(void* address, const u32* words) {
  emulation::check_pack(address);
  for (u32 i = 0; i < 4; ++i) {
    emulation::disturb();
    __atomic_store_n(static_cast<u32*>(address) + i, words[i], __ATOMIC_RELAXED);
  }
}

DEVICE void load_streaming(const void* address, u32* words) {
  emulation::check_pack(address);
  std::memcpy(words, address, 16);
}

DEVICE void store_streaming(void* address, const u32* words) {
  emulation::check_pack(address);
  std::memcpy(address, words, 16);
}

// Whoever asks for what is not there is told so by the sanitizer or the processor.
DEVICE void prefetch(const char* address, u32 num_bytes) {
  (void)static_cast<const volatile char*>(address)[0];
  (void)static_cast<const volatile char*>(address)[num_bytes - 1];
}

DEVICE u32 fetch_or(u32* address, u32 bits) {
  emulation::disturb();
  return __atomic_fetch_or(address, bits, __ATOMIC_RELAXED);
}

DEVICE u32 fetch_add(u32* address, u32 value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

DEVICE void block_barrier() { emulation::meet_block(); }
DEVICE void block_barrier_after(u32) { block_barrier(); }
DEVICE void trap() { std::abort(); }

DEVICE u64 compare_and_swap(u64* address, u64 expected, u64 value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

DEVICE u32 as_bits(float value) {
  u32 bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

DEVICE float from_bits(u32 bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

DEVICE float exchange_lanes(float value, u32 distance) {
  return from_bits(emulation::exchange(as_bits(value), (thread_index() % 32) ^ distance));
}

DEVICE float broadcast(float value, u32 lane) {
  return from_bits(emulation::exchange(as_bits(value), lane));
}

DEVICE u32 broadcast(u32 value, u32 lane) { return emulation::exchange(value, lane); }

DEVICE void team_barrier(u32 team, u32 threads, u32) { emulation::meet_team(team, threads); }

DEVICE float half_to_float(u32 bits) { return _cvtsh_ss((unsigned short)bits); }

DEVICE u32 floats_to_halves(float first, float second) {
  return u32(_cvtss_sh(first, 0)) | (u32(_cvtss_sh(second, 0)) << 16);
}

DEVICE u32 float_to_bfloat(float value) {
  if (value != value) return 0x7fffu;
  const u32 bits = as_bits(value);
  return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}

DEVICE u32 floats_to_bfloats(float first, float second) {
  return float_to_bfloat(first) | (float_to_bfloat(second) << 16);
}

DEVICE float rsqrtf(float value) { return 1.0f / std::sqrt(value); }

DEVICE void forget_derived(u32&) {}
