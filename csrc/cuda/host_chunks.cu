// All-reduce of large messages through host memory, in one launch a rank, by chunks with a flag each.
//
// A team of a block's threads moves a chunk at a time. Of two ranks, one team stores this rank's
// chunks into its outbox, the other adds what the peer has in its own. Of more, chunk c is summed by
// rank c % WORLD_SIZE: the first team stores the chunks that others sum, the second sums this rank's
// and stores the rounded sums as well, and a third takes the sums of the others to the output. So of W
// ranks each reads 2 (W - 1) / W messages; links in both directions and the sums are at work at the
// same time. Ranks are added in their order in float32, and all get the same bits.
//
// A team stores, meets, and its first thread then makes what all have stored visible to all devices
// before it raises the flag. Whoever reads waits for the flag first. Here nothing is sent twice and
// nothing but flags is read in vain, which large messages gain more by than such a wait costs.
//
// Progress: of a block, the first team waits for nobody, the second for first teams and the third for
// second teams of the block with the same index on other GPUs. Blocks begin in the order of their
// index, so the lowest that has not ended everywhere has a free place there.
//
// Macros, set by host_layout.py:
//   ELEMENT       0 float, 1 half, 2 bfloat16
//   WORLD_SIZE    ranks, 2 to 8
//   RANK          this one
//   TEAM          threads of a team
//   UNROLL        packs of a chunk that a thread moves

#include "packs.h"

constexpr bool TWO_PHASES = WORLD_SIZE > 2;
constexpr u32 TEAMS = TWO_PHASES ? 3 : 2;
constexpr u32 THREADS = TEAMS * TEAM;

#include "host_parts.h"

constexpr u32 CHUNK = TEAM * UNROLL;  // packs
constexpr u32 FLAG_PARCELS = 4;       // a line of its own for each flag

// A chunk of a rank's message, or of the sums that it owns, as its outbox has it.
struct Place {
  Pack* flag;
  Pack* data;
};

DEVICE Place message_chunk(const Args& args, u32 rank, u32 chunk, u32 call) {
  Pack* const half = half_outbox(args, rank, call);
  return {half + args.first_flag + chunk * FLAG_PARCELS, half + args.first_message + chunk * CHUNK};
}

DEVICE Place sum_chunk(const Args& args, u32 rank, u32 own, u32 call) {
  const u32 chunks = (args.first_sum - args.first_message) / CHUNK;  // of the largest message
  Pack* const half = half_outbox(args, rank, call);
  return {half + args.first_flag + (chunks + own) * FLAG_PARCELS,
          half + args.first_sum + own * CHUNK};
}

// What a team does once all its threads have stored.
DEVICE void raise_flag(u32 team, const Place& place, u32 call) {
  team_barrier(team, TEAM, TEAMS);
  if (thread_index() % TEAM != 0) return;
  const u32 words[4] = {0, 0, 0, call};
  fence_system();
  store_whole(place.flag, words);
}

// What a team does before its threads read; several flags at a time, a thread each.
DEVICE void await_flag(const Pack* flag, u32 call, u64 timeout_ns) {
  const u32* word = flag->words + CALL;
  for (Patience patience; load_acquire_system(word) != call;) patience.spin(timeout_ns);
}

DEVICE void send(const Args& args, u32 chunk, u32 lane, u32 call) {
  const Place there = message_chunk(args, RANK, chunk, call);
  Pack packs[UNROLL];
#pragma unroll
  for (u32 i = 0; i < UNROLL; ++i) {
    const u32 index = chunk * CHUNK + i * TEAM + lane;
    if (index < args.num_packs) packs[i] = args.input[index];
  }
#pragma unroll
  for (u32 i = 0; i < UNROLL; ++i)
    if (chunk * CHUNK + i * TEAM + lane < args.num_packs)
      store_to_peer(there.data + i * TEAM + lane, packs[i]);
  raise_flag(0, there, call);
}

DEVICE void add(const Args& args, u32 chunk, u32 lane, u32 call) {
  if (lane < PEERS)
    await_flag(message_chunk(args, peer_at(lane), chunk, call).flag, call, args.timeout_ns);
  team_barrier(1, TEAM, TEAMS);
  const Place sums = sum_chunk(args, RANK, chunk / WORLD_SIZE, call);
  Pack packs[UNROLL][WORLD_SIZE];
#pragma unroll
  for (u32 i = 0; i < UNROLL; ++i) {
    const u32 index = chunk * CHUNK + i * TEAM + lane;
    if (index >= args.num_packs) continue;
    packs[i][RANK] = args.input[index];
#pragma unroll
    for (u32 place = 0; place < PEERS; ++place) {
      const u32 rank = peer_at(place);
      packs[i][rank] = load_staged(message_chunk(args, rank, chunk, call).data + i * TEAM + lane);
    }
  }
#pragma unroll
  for (u32 i = 0; i < UNROLL; ++i) {
    const u32 index = chunk * CHUNK + i * TEAM + lane;
    if (index >= args.num_packs) continue;
    Sum sum;
#pragma unroll
    for (u32 rank = 0; rank < WORLD_SIZE; ++rank) sum.add(packs[i][rank], rank == 0);
    const Pack rounded = sum.rounded();
    if (TWO_PHASES) store_to_peer(sums.data + i * TEAM + lane, rounded);
    args.output[index] = rounded;
  }
  if (TWO_PHASES) raise_flag(1, sums, call);
}

DEVICE void receive(const Args& args, u32 owner, u32 chunk, u32 lane, u32 call) {
  const Place sums = sum_chunk(args, owner, chunk / WORLD_SIZE, call);
  if (lane == 0) await_flag(sums.flag, call, args.timeout_ns);
  team_barrier(2, TEAM, TEAMS);
  Pack packs[UNROLL];
#pragma unroll
  for (u32 i = 0; i < UNROLL; ++i)
    if (chunk * CHUNK + i * TEAM + lane < args.num_packs)
      packs[i] = load_staged(sums.data + i * TEAM + lane);
#pragma unroll
  for (u32 i = 0; i < UNROLL; ++i) {
    const u32 index = chunk * CHUNK + i * TEAM + lane;
    if (index < args.num_packs) args.output[index] = packs[i];
  }
}

extern "C" KERNEL(THREADS, 1) host_chunks(const ARGUMENT Args args) {
  const u32 team = thread_index() / TEAM, lane = thread_index() % TEAM;
  Count count;
  const u32 call = begin_call(args.state, count);
  const u32 chunks = (args.num_packs + CHUNK - 1) / CHUNK;
  const u32 each = TWO_PHASES ? WORLD_SIZE : 1;  // chunks that a block handles at a time
  for (u32 first = block_index() * each; first < chunks; first += num_blocks() * each) {
    if (!TWO_PHASES) {
      if (team == 0)
        send(args, first, lane, call);
      else
        add(args, first, lane, call);
      continue;
    }
    if (team == 1) {
      if (first + RANK < chunks) add(args, first + RANK, lane, call);
      continue;
    }
    for (u32 step = 1; step < WORLD_SIZE; ++step) {  // all ranks begin with another one
      const u32 owner = (RANK + step) % WORLD_SIZE, chunk = first + owner;
      if (chunk >= chunks) continue;
      if (team == 0)
        send(args, chunk, lane, call);
      else
        receive(args, owner, chunk, lane, call);
    }
  }
  end_call(args, count, call);
}
