// Sequences of calls on several ranks at once, for emulation.py.

#define HOST_EMULATION
#include "reduce_rms.cu"

namespace {

thread_local const Args* current_args;

void body() { reduce_rms(*current_args); }

// One call: as on a GPU, blocks start in the order of their index and several run at a time.
void call(const Args& args, std::vector<emulation::Block>& workers) {
  const u32 blocks = (args.num_tokens + BLOCK_TEAMS - 1) / BLOCK_TEAMS;
  std::atomic<u32> next{0};
  std::vector<std::thread> threads;
  for (emulation::Block& worker : workers)
    threads.emplace_back([&] {
      current_args = &args;
      for (u32 index; (index = next++) < blocks;) emulation::run_block(worker, index, body);
    });
  for (std::thread& thread : threads) thread.join();
}

void rank(const Args* calls, u32 num_calls, u32 num_workers, u32 seed) {
  std::vector<emulation::Block> workers(num_workers);
  for (u32 i = 0; i < num_workers; ++i)
    emulation::make_block(workers[i], BLOCK_THREADS, BLOCK_TEAMS, seed * 31 + i);
  std::minstd_rand random(seed);
  for (u32 i = 0; i < num_calls; ++i) {
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    call(calls[i], workers);
  }
}

}  // namespace

// calls: [streams][num_calls]. A stream makes its calls one after the other; streams run at once.
extern "C" void run_streams(const Args* calls, u32 streams, u32 num_calls, u32 workers, u32 seed) {
  std::vector<std::thread> threads;
  for (u32 i = 0; i < streams; ++i)
    threads.emplace_back(rank, calls + i * num_calls, num_calls, workers, seed + i);
  for (std::thread& thread : threads) thread.join();
}

extern "C" u32 args_bytes() { return sizeof(Args); }
