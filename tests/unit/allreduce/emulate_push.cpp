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

thread_local const Args* current_args;

void body() { KERNEL_NAME(*current_args); }

}  // namespace

// As on a GPU, blocks begin in the order of their index and several run at a time.
extern "C" void run_calls(const Args* calls, const u32* blocks, u32 num_calls, u32 num_workers,
                          u32 seed, u32 rank) {
  std::vector<emulation::Block> workers(num_workers);
  for (u32 i = 0; i < num_workers; ++i)
    emulation::make_block(workers[i], THREADS, NUM_TEAMS, seed * 31 + i);
  std::minstd_rand random(seed);
  for (u32 i = 0; i < num_calls; ++i) {
    if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    std::atomic<u32> next{0};
    std::vector<std::thread> threads;
    for (emulation::Block& worker : workers)
      threads.emplace_back([&] {
        current_args = &calls[i];
        rank_of_thread = rank;
        worker.count = blocks[i];
        for (u32 index; (index = next++) < blocks[i];) emulation::run_block(worker, index, body);
      });
    for (std::thread& thread : threads) thread.join();
  }
}

extern "C" u32 args_bytes() { return sizeof(Args); }
