// Runs a kernel on a CPU, in place of device_primitives.h.
//
// A GPU thread is a fiber; the fibers of a block share one OS thread and change places where the
// kernel shuffles, meets a barrier or looks at memory that others write. Ranks and blocks are OS
// threads, so the slots are written and read concurrently for real.
#pragma once

#include <immintrin.h>
#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#define DEVICE [[maybe_unused]] static inline
#define DEVICE_MEMBER inline
#define KERNEL(threads, blocks) void
#define ARGUMENT
#define SHARED static thread_local

namespace emulation {

constexpr u32 LANES = 32, STACK_BYTES = 64 << 10;

// Fibers that wait for one another: a warp or a team.
struct Meeting {
  u32 arrived = 0, generation = 0;
};

struct Fiber {
  ucontext_t context;  // to begin; places to go on from are jumped to, which asks no kernel
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  bool begun = false, done = false;
  u32 parity = 0;
};

struct Block {
  jmp_buf scheduler;
  std::vector<Fiber> fibers;
  std::vector<Meeting> warps, teams;
  std::vector<u32> values[2];
  u32 current = 0, index = 0, count = 0;
  std::minstd_rand random;
  void (*body)() = nullptr;
};

inline thread_local Block* block = nullptr;

inline void yield() {
  Block& b = *block;
  if (_setjmp(b.fibers[b.current].place) == 0) _longjmp(b.scheduler, 1);
}

[[gnu::noinline]] inline void resume(Block& b, Fiber& fiber) {
  if (_setjmp(b.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

inline void meet(Meeting& meeting, u32 members) {
  const u32 generation = meeting.generation;
  if (++meeting.arrived == members) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == generation) yield();
}

// Every lane gives a value and takes that of another; two buffers, so that the next exchange does
// not overwrite what a slow lane has still to read.
inline u32 exchange(u32 value, u32 from_lane) {
  Block& b = *block;
  const u32 me = b.current, first = me - me % LANES;
  std::vector<u32>& values = b.values[b.fibers[me].parity ^= 1];
  values[me] = value;
  meet(b.warps[me / LANES], LANES);
  return values[first + from_lane];
}

inline void enter() {
  Block& b = *block;
  b.body();
  b.fibers[b.current].done = true;
  yield();
}

inline void run_block(Block& b, u32 index, void (*body)()) {
  b.index = index;
  b.body = body;
  block = &b;
  for (Fiber& fiber : b.fibers) {
    fiber.begun = fiber.done = false;
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool running = true; running;) {
    running = false;
    for (u32 i = 0; i < b.fibers.size(); ++i) {
      if (b.fibers[i].done) continue;
      running = true;
      b.current = i;
      resume(b, b.fibers[i]);
    }
    if (b.random() % 4 == 0) sched_yield();
  }
}

inline void make_block(Block& b, u32 threads, u32 teams, u32 seed) {
  b.fibers.resize(threads);
  for (Fiber& fiber : b.fibers) {
    fiber.stack.reset(new char[STACK_BYTES]);
    getcontext(&fiber.context);
  }
  b.warps.resize(threads / LANES);
  b.teams.resize(teams + 1);  // the first is the whole block
  for (auto& values : b.values) values.resize(threads);
  b.random.seed(seed);
}

// Anything may happen between two accesses of shared memory.
inline void disturb() {
  if (block->random() % 8 == 0) yield();
  if (block->random() % 64 == 0) sched_yield();
}

// A GPU faults where an access of 16 bytes is not to a multiple of 16; this CPU would not.
inline void check_pack(const void* address) {
  if (reinterpret_cast<u64>(address) % 16 != 0) std::abort();
}

}  // namespace emulation

DEVICE u32 thread_index() { return emulation::block->current; }
DEVICE u32 block_index() { return emulation::block->index; }
DEVICE u32 num_blocks() { return emulation::block->count; }
DEVICE void await_previous_grid() {}
DEVICE void release_next_grid() {}

DEVICE u64 nanoseconds() {
  using namespace std::chrono;
  return u64(duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count());
}

DEVICE u64 cycles() { return nanoseconds(); }

DEVICE u64 load_system(const u64* address) {
  emulation::yield();
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

DEVICE void store_system(u64* address, u64 value) {
  emulation::disturb();
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

DEVICE u32 load_acquire_system(const u32* address) {
  emulation::yield();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
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

// In one piece: so are these instructions on processors with AVX.
DEVICE void load_whole(const void* address, u32* words) {
  emulation::yield();
  const __m128i found = *static_cast<const volatile __m128i*>(address);
  std::memcpy(words, &found, sizeof(found));
}

DEVICE void store_whole(void* address, const u32* words) {
  emulation::disturb();
  __m128i value;
  std::memcpy(&value, words, sizeof(value));
  *static_cast<volatile __m128i*>(address) = value;
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

DEVICE void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
DEVICE void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
DEVICE void block_barrier() {
  emulation::meet(emulation::block->teams[0], u32(emulation::block->fibers.size()));
}
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

DEVICE void team_barrier(u32 team, u32 threads, u32) {
  emulation::meet(emulation::block->teams[team + 1], threads);
}

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
