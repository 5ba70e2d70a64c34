// What runs the fibers of host_emulation.h.

#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
#include "host_emulation.h"

namespace emulation {
namespace {

constexpr u32 LANES = 32, STACK_BYTES = 64 << 10;
// A block whose fibers have only looked for so many turns leaves the processor to the others, each
// time for longer.
constexpr u32 IDLE_TURNS = 8, MOST_PAUSES = 20;
constexpr auto PAUSE = std::chrono::microseconds(50);

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
  std::minstd_rand random;
  u32 idle_turns = 0;
  void (*body)() = nullptr;
};

thread_local Block* block = nullptr;

[[gnu::noinline]] void resume(Block& b, Fiber& fiber) {
  if (_setjmp(b.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

void meet(Meeting& meeting, u32 members) {
  block->idle_turns = 0;
  const u32 generation = meeting.generation;
  if (++meeting.arrived == members) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == generation) yield();
}

void enter() {
  block->body();
  block->fibers[indices.thread].done = true;
  block->idle_turns = 0;
  yield();
}

void run_block(Block& b, u32 index, u32 num_blocks, void (*body)()) {
  indices = {0, index, num_blocks};
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
      indices.thread = i;
      resume(b, b.fibers[i]);
    }
    if (++b.idle_turns > IDLE_TURNS)
      std::this_thread::sleep_for(PAUSE * std::min(b.idle_turns - IDLE_TURNS, MOST_PAUSES));
    else if (b.random() % 4 == 0)
      sched_yield();
  }
}

void make_block(Block& b, u32 threads, u32 teams, u32 seed) {
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

}  // namespace

__thread Indices indices;

// As on a GPU, blocks begin in the order of their index and several run at a time.
void run(const Calls& calls, const void* context, void (*begin)(const void*, u32),
         void (*body)()) {
  std::vector<Block> workers(calls.workers);
  for (u32 i = 0; i < calls.workers; ++i)
    make_block(workers[i], calls.threads, calls.teams, calls.seed * 31 + i);
  std::minstd_rand random(calls.seed);
  for (u32 call = 0; call < calls.num_calls; ++call) {
    if (random() % calls.pause_every == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random() % calls.most_pause_us));
    const u32 blocks = calls.blocks[call];
    std::atomic<u32> next{0};
    std::vector<std::thread> threads;
    for (Block& worker : workers)
      threads.emplace_back([&] {
        begin(context, call);
        for (u32 index; (index = next++) < blocks;) run_block(worker, index, blocks, body);
      });
    for (std::thread& thread : threads) thread.join();
  }
}

void yield() {
  Block& b = *block;
  if (_setjmp(b.fibers[indices.thread].place) == 0) _longjmp(b.scheduler, 1);
}

void disturb() {
  block->idle_turns = 0;
  if (block->random() % 8 == 0) yield();
  if (block->random() % 64 == 0) sched_yield();
}

// Two buffers, so that the next exchange does not overwrite what a slow lane has still to read.
u32 exchange(u32 value, u32 from_lane) {
  Block& b = *block;
  const u32 me = indices.thread, first = me - me % LANES;
  std::vector<u32>& values = b.values[b.fibers[me].parity ^= 1];
  values[me] = value;
  meet(b.warps[me / LANES], LANES);
  return values[first + from_lane];
}

void meet_block() { meet(block->teams[0], u32(block->fibers.size())); }

void meet_team(u32 team, u32 threads) { meet(block->teams[team + 1], threads); }

u64 nanoseconds() {
  using namespace std::chrono;
  return u64(duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count());
}

}  // namespace emulation
