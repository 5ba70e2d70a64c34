// RMSNorm over rows that are sharded across tensor-parallel ranks, in one launch a rank.
//
// A team of warps takes one token: it keeps the local shard of the row in registers, sums its
// squares, stores the sums into the slots of all peers, waits for theirs in its own slots, and
// scales the registers. The sum itself is the flag (Lamport's protocol): a slot word holds -0.0
// while it is empty, and a sum of squares is never -0.0, even where it is +0.0, Inf or NaN.
//
// Every token has its own state word, the same on all ranks after the same sequence of calls:
//
//     call e writes slot e % 3, reads slot e % 3, and empties slot (e - 1) % 3
//
// A peer writes slot e % 3 again in its call e + 3. By then it has seen this rank's sums of call
// e + 2, so this rank has finished call e + 1, in which it emptied the slot. No counter is shared
// between teams, and nothing has to be cleared beyond what was used.
//
// Progress: a team waits only for the same token on other GPUs. Blocks start in the order of their
// index, so the lowest token that is still missing somewhere has a free place there.
//
// Compiled for one shape at a time; the macros are set by kernel.py:
//   ELEMENT       0 float, 1 half, 2 bfloat16: type of rows and outputs
//   WEIGHT        the same for the weights
//   WORLD_SIZE    ranks, 2 to 8
//   Q_SIZE        elements of the local first part (Q), a multiple of 8
//   K_SIZE        elements of the local second part (K), a multiple of 8
//   TEAM_WARPS    warps a token
//   BLOCK_TEAMS   tokens a block
//   ALIGNED       1 where rows and weights are aligned to 16 bytes
//   WEIGHTS_EARLY 1 loads the weights while the sums travel, which costs registers
//   STREAMING     1 loads rows as what is not wanted again soon

#include "weights.h"

constexpr u32 SENTINEL = 0x80000000u;  // -0.0f
constexpr u64 EMPTY_WORD = (u64(SENTINEL) << 32) | SENTINEL;
constexpr u32 BUSY = 1;  // low bit of a state word; the slot stands above it
constexpr u32 NUM_SLOTS = 3;
constexpr u32 SPINS_PER_LOOK = 64;  // at the clock and at whether the workspace has failed
constexpr u64 MISSING_PEER = 1, CONCURRENT_USE = 2;  // kinds of failure, as in kernel.py

typedef Storage<ELEMENT>::Type Element;

constexpr u32 TEAM_THREADS = TEAM_WARPS * WARP;
constexpr u32 BLOCK_THREADS = TEAM_THREADS * BLOCK_TEAMS;
constexpr u32 Q_PACKS = Q_SIZE / PACK;
constexpr u32 ROW_PACKS = (Q_SIZE + K_SIZE) / PACK;
constexpr u32 PACKS = (ROW_PACKS + TEAM_THREADS - 1) / TEAM_THREADS;  // a thread
constexpr u32 STEP = TEAM_THREADS * PACK;  // elements from a thread's pack to its next

struct Args {
  const Element* q;
  const Element* k;
  const Weight* q_weight;
  const Weight* k_weight;
  Element* q_out;
  Element* k_out;
  const u64* workspace;
  u32* states;  // these two are in the workspace too; here they cost no dependent load
  u64 rank;
  u64 q_stride;  // elements from row to row
  u64 k_stride;
  u64 timeout_ns;
  u32 num_tokens;
  float q_scale;  // 1 / elements of the whole row, all ranks together
  float k_scale;
  float eps;
};

// An address that is aligned only to its elements is read element by element.
template <typename P, typename T>
DEVICE P load(const T* address) {
#if ALIGNED
  return *reinterpret_cast<const P*>(address);
#else
  P pack;
#pragma unroll
  for (u32 i = 0; i < sizeof(P) / 4; ++i) {
    if (sizeof(T) == 4) {
      pack.words[i] = as_bits(address[i]);
    } else {
      pack.words[i] = u32(address[2 * i]) | (u32(address[2 * i + 1]) << 16);
    }
  }
  return pack;
#endif
}

DEVICE Pack load_pack(const Element* address) {
#if ALIGNED && STREAMING
  Pack pack;
  load_streaming(address, pack.words);
  return pack;
#else
  return load<Pack>(address);
#endif
}

DEVICE Pack scale(const Pack& pack, float factor, const WeightPack& weights) {
  float scaled[PACK];
#pragma unroll
  for (u32 i = 0; i < PACK; ++i)
    scaled[i] = element<ELEMENT>(pack.words, i) * factor * element<WEIGHT>(weights.words, i);
  return pack_of<ELEMENT>(scaled);
}

struct Sums {
  float q, k;
};

// What a lane needs of the workspace, whose words kernel.py describes.
struct Peer {
  u64* slots;     // of the rank whose number is the lane's
  u64* my_slots;  // of this rank
  u32* states;    // a word a token
  u64* failure;   // in device memory: not 0 once the workspace has failed
  u64* report;    // the same in host memory
  u64 slot_words;
  u32 rank;
};

DEVICE Peer read_workspace(const Args& args, u32 lane) {
  const u64* words = args.workspace;
  Peer peer;
  peer.rank = u32(args.rank);
  peer.slots = reinterpret_cast<u64*>(words[lane < WORLD_SIZE ? lane : 0]);
  peer.my_slots = reinterpret_cast<u64*>(words[peer.rank]);
  peer.states = args.states;
  peer.failure = reinterpret_cast<u64*>(words[WORLD_SIZE + 1]);
  peer.report = reinterpret_cast<u64*>(words[WORLD_SIZE + 2]);
  peer.slot_words = words[WORLD_SIZE + 3] / sizeof(u64);
  return peer;
}

DEVICE u64 pack_sums(Sums sums) {
  return (u64(as_bits(sums.k)) << 32) | as_bits(sums.q);
}

DEVICE Sums unpack_sums(u64 word) {
  return {from_bits(u32(word)), from_bits(u32(word >> 32))};
}

DEVICE bool arrived(u64 word) {
  return u32(word) != SENTINEL && u32(word >> 32) != SENTINEL;
}

DEVICE Sums not_a_number() {
  return {from_bits(0x7fffffffu), from_bits(0x7fffffffu)};
}

// Only the first failure is told to the host.
DEVICE void fail(const Peer& peer, u64 kind, u32 rank, u32 token) {
  const u64 record = (kind << 56) | (u64(rank) << 32) | token;
  if (compare_and_swap(peer.failure, 0, record) == 0) store_system(peer.report, record);
}

// The sums that `rank` stored in `word`. NaN once the time is up or the workspace has failed.
DEVICE Sums await_sums(const Peer& peer, const u64* word, u32 rank, u32 token, u64 timeout_ns) {
  u64 deadline = 0;
  for (u32 spins = 1;; ++spins) {
    const u64 value = load_system(word);
    if (arrived(value)) return unpack_sums(value);
    if (spins % SPINS_PER_LOOK != 0) continue;
    if (load_device(peer.failure) != 0) return not_a_number();
    const u64 now = nanoseconds();
    if (deadline == 0) deadline = now + timeout_ns;
    if (now < deadline) continue;
    fail(peer, MISSING_PEER, rank, token);
    return not_a_number();
  }
}

// All ranks add in the order of ranks, so all get the same bits.
DEVICE Sums add_ranks(Sums sums) {
  Sums total{0.0f, 0.0f};
#pragma unroll
  for (u32 rank = 0; rank < WORLD_SIZE; ++rank) {
    total.q += broadcast(sums.q, rank);
    total.k += broadcast(sums.k, rank);
  }
  return total;
}

DEVICE Sums add_lanes(Sums sums) {
#pragma unroll
  for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
    sums.q += exchange_lanes(sums.q, distance);
    sums.k += exchange_lanes(sums.k, distance);
  }
  return sums;
}

// One lane a team takes the token's state; BUSY in what was there tells of a call still running.
DEVICE u32 begin(const Peer& peer, u32 token) {
  const u32 state = fetch_or(&peer.states[token], BUSY);
  if (state & BUSY) fail(peer, CONCURRENT_USE, peer.rank, token);
  return state;
}

DEVICE void send(const Peer& peer, u32 lane, u32 slot, u32 token, Sums sums) {
  if (lane >= WORLD_SIZE || lane == peer.rank) return;
  const u64 at = slot * peer.slot_words + u64(token) * WORLD_SIZE + peer.rank;
  store_system(peer.slots + at, pack_sums(sums));
}

DEVICE Sums receive(const Peer& peer, u32 lane, u32 slot, u32 token, Sums mine, u64 timeout_ns) {
  if (lane >= WORLD_SIZE || lane == peer.rank) return mine;
  const u64 at = slot * peer.slot_words + u64(token) * WORLD_SIZE + lane;
  return await_sums(peer, peer.my_slots + at, lane, token, timeout_ns);
}

DEVICE void end(const Peer& peer, u32 lane, u32 slot, u32 token) {
  const u32 before = (slot + NUM_SLOTS - 1) % NUM_SLOTS;
  if (lane < WORLD_SIZE)
    store_system(peer.my_slots + before * peer.slot_words + u64(token) * WORLD_SIZE + lane,
                 EMPTY_WORD);
  if (lane == 0) peer.states[token] = ((slot + 1) % NUM_SLOTS) << 1;
}

// Whether a thread's pack j is in the row at all, and whether in its Q part; known to the compiler
// for all but the packs at the ends of the parts.
DEVICE bool in_row(u32 j, u32 member) {
  return (j + 1) * TEAM_THREADS <= ROW_PACKS || member + j * TEAM_THREADS < ROW_PACKS;
}

DEVICE bool in_q(u32 j, u32 member) {
  if ((j + 1) * TEAM_THREADS <= Q_PACKS) return true;
  return j * TEAM_THREADS < Q_PACKS && member + j * TEAM_THREADS < Q_PACKS;
}

struct TeamShared {
  Sums sums[TEAM_WARPS];
  u32 state;
};

// The team's sums and the token's state, in all of its threads.
DEVICE Sums add_team(Sums sums, u32& state, TeamShared& shared, u32 team, u32 warp, u32 lane) {
  sums = add_lanes(sums);
  if (TEAM_WARPS == 1) {
    state = broadcast(state, 0);
    return sums;
  }
  if (lane == 0) shared.sums[warp] = sums;
  if (lane == 0 && warp == 0) shared.state = state;
  team_barrier(team, TEAM_THREADS, BLOCK_TEAMS);
  state = shared.state;
  return add_lanes(lane < TEAM_WARPS ? shared.sums[lane] : Sums{0.0f, 0.0f});
}

extern "C" KERNEL(BLOCK_THREADS, 1) reduce_rms(const ARGUMENT Args args) {
  SHARED TeamShared shared[BLOCK_TEAMS];
  const u32 team = thread_index() / TEAM_THREADS;
  const u32 member = thread_index() % TEAM_THREADS;
  const u32 warp = member / WARP, lane = member % WARP;
  const u32 token = block_index() * BLOCK_TEAMS + team;

  const Peer peer = read_workspace(args, lane);  // never changes, so it may come early
  await_previous_grid();
  release_next_grid();
  if (token >= args.num_tokens) return;

  u32 state = 0;
  if (member == 0) state = begin(peer, token);

  // A thread's packs stand a fixed distance apart, so each part needs one address a thread.
  const u32 q_at = member * PACK;
  const int k_at = (int(member) - int(Q_PACKS)) * int(PACK);
  const Element* q = args.q + token * args.q_stride + q_at;
  const Element* k = args.k + token * args.k_stride + k_at;
  const Weight* q_weight = args.q_weight + q_at;
  const Weight* k_weight = args.k_weight + k_at;

  Pack row[PACKS];
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j)
    if (in_row(j, member)) row[j] = load_pack((in_q(j, member) ? q : k) + j * STEP);
  Sums sums{0.0f, 0.0f};
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j) {
    if (!in_row(j, member)) continue;
    const float sum = sum_of_squares(row[j]);
    if (in_q(j, member))
      sums.q += sum;
    else
      sums.k += sum;
  }
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j)
    for (u32& word : row[j].words) forget_derived(word);  // else it would keep all as float
  sums = add_team(sums, state, shared[team], team, warp, lane);

  const u32 slot = state >> 1;
  const bool usable = (state & BUSY) == 0;
  if (warp == 0 && usable) send(peer, lane, slot, token, sums);

  WeightPack weights[WEIGHTS_EARLY ? PACKS : 1];
#pragma unroll
  for (u32 j = 0; WEIGHTS_EARLY && j < PACKS; ++j)
    if (in_row(j, member)) weights[j] = load<WeightPack>((in_q(j, member) ? q_weight : k_weight) + j * STEP);

  sums = usable ? receive(peer, lane, slot, token, sums, args.timeout_ns) : not_a_number();
  sums = add_ranks(sums);
  const float q_factor = rsqrtf(sums.q * args.q_scale + args.eps);
  const float k_factor = rsqrtf(sums.k * args.k_scale + args.eps);

  Element* q_out = args.q_out + u64(token) * Q_SIZE + q_at;
  Element* k_out = args.k_out + u64(token) * K_SIZE + k_at;
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j) {
    if (!in_row(j, member)) continue;
    const bool is_q = in_q(j, member);
    if (!WEIGHTS_EARLY) weights[0] = load<WeightPack>((is_q ? q_weight : k_weight) + j * STEP);
    *reinterpret_cast<Pack*>((is_q ? q_out : k_out) + j * STEP) =
        scale(row[j], is_q ? q_factor : k_factor, weights[WEIGHTS_EARLY ? j : 0]);
  }
  if (warp == 0 && usable) end(peer, lane, slot, token);
}
