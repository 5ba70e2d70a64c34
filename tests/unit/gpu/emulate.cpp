// Sequences of calls on all ranks at once, for push_emulation.py. On a GPU a rank's kernel is compiled
// for its number; here all ranks share a library, and each thread knows whose it is.

#define HOST_EMULATION
#ifndef NUM_TEAMS
#define NUM_TEAMS 1
#endif
namespace {
thread_local unsigned rank_of_thread;
}
#define RANK rank_of_thread
#include KERNEL_FILE

namespace {

struct Sequence {
  const Args* calls;
  u32 rank;
};

thread_local const Args* current_args;

void begin(const void* sequence, u32 call) {
  current_args = static_cast<const Sequence*>(sequence)->calls + call;
  rank_of_thread = static_cast<const Sequence*>(sequence)->rank;
}

void body() { KERNEL_NAME(*current_args); }

}  // namespace

extern "C" void run_calls(const Args* calls, const u32* blocks, u32 num_calls, u32 num_workers,
                          u32 seed, u32 rank) {
  const Sequence sequence{calls, rank};
  emulation::run({num_calls, blocks, THREADS, NUM_TEAMS, num_workers, seed, 3, 2000}, &sequence,
                 begin, body);
}

extern "C" u32 args_bytes() { return sizeof(Args); }
