// All-reduce, residual and RMSNorm of large messages, in one launch a rank: row r belongs to rank
// r % WORLD_SIZE, which sums it, adds the residual and pushes the result z to all peers. Every rank
// norms every row, for it has all of z at hand anyway, and the sum of squares has the same bits.
//
// So the links carry no more than for the sum alone, and the residual is read by one rank. A turn is
// as many rows as there are ranks. In its turn t a block pushes its share of turn t + 1, sums its own
// row of turn t and takes the peers' rows of turn t - 1, so that every wait is for what was sent a
// turn ago.
//
// Progress: a block waits only for the block with the same index on other GPUs, and all of these do
// the same steps in the same order. Blocks begin in the order of their index.

#include "fused_rows.h"

// In a half: by source, the peers' shares of the rows that this rank owns; then, by owner, the rows
// that the peers own. Each part has a row a turn.
DEVICE u32 part(const Args& args, u32 index, u32 call) {
  const u32 turns = (args.num_rows + WORLD_SIZE - 1) / WORLD_SIZE;
  return (call & 1) * args.half_packs + index * (turns * ROW_PACKS);
}

DEVICE void push_turn(const Args& args, u32 turn, u32 call) {
  const u32 member = thread_index();
#pragma unroll 1
  for (u32 step = 0; step < PEERS; ++step) {
    const u32 owner = peer(step), number = turn * WORLD_SIZE + owner;
    if (number >= args.num_rows) continue;
    const Pack* mine = args.input + number * ROW_PACKS + member;
    Pack* there =
        args.memory[owner] + part(args, place(RANK, owner), call) + turn * ROW_PACKS + member;
    Pack packs[PACKS];
#pragma unroll
    for (u32 j = 0; j < PACKS; ++j)
      if (in_row(j, member)) packs[j] = mine[j * TEAM];
#pragma unroll
    for (u32 j = 0; j < PACKS; ++j)
      if (in_row(j, member)) store_to_peer(there + j * TEAM, sendable(packs[j]));
  }
}

// This rank's row of the turn: summed, with the residual, and on its way to the peers.
DEVICE void sum_turn(const Args& args, Row& row, u32 turn, u32 call) {
  const u32 member = thread_index(), own = turn * ROW_PACKS + member;
  const u32 first = (turn * WORLD_SIZE + RANK) * ROW_PACKS + member;
  const u32 stride = part(args, 1, call) - part(args, 0, call);
  Pack* here = args.memory[RANK] + part(args, 0, call) + own;
  Pack mine[PACKS], residual[PACKS];
  load_own(args, first, mine, residual);
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j) {
    if (!in_row(j, member)) continue;
    const Pack summed = sum_of_ranks(here + j * TEAM, stride, mine[j], args.timeout_ns);
    row.packs[j] = sendable(RESIDUAL ? add_residual(summed, residual[j]) : summed);
#pragma unroll
    for (u32 step = 0; step < PEERS; ++step) {
      const u32 to = peer(step);
      Pack* there = args.memory[to] + part(args, PEERS + place(RANK, to), call) + own;
      store_to_peer(there + j * TEAM, row.packs[j]);
    }
    args.residual_out[first + j * TEAM] = row.packs[j];
  }
}

// The row of a turn that a peer has summed.
DEVICE void take_row(const Args& args, Row& row, u32 turn, u32 owner, u32 call) {
  const u32 member = thread_index();
  const u32 first = (turn * WORLD_SIZE + owner) * ROW_PACKS + member;
  Pack* here = args.memory[RANK] + part(args, PEERS + place(owner, RANK), call) +
               turn * ROW_PACKS + member;
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j)
    if (in_row(j, member)) row.packs[j] = load_staged(here + j * TEAM);
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j) {
    if (!in_row(j, member)) continue;
    row.packs[j] = take_after_look(here + j * TEAM, row.packs[j], args.timeout_ns);
    args.residual_out[first + j * TEAM] = row.packs[j];
  }
}

DEVICE void finish(const Args& args, Row& row, const Weights& weights, u32 number,
                   TeamShared& shared, u32 turn) {
  const float total = add_row(row, shared, turn, thread_index());
  finish_row(args, row, weights, total, number, shared, turn);
}

extern "C" KERNEL(THREADS, MIN_BLOCKS) fused_two_phase(const ARGUMENT Args args) {
  SHARED TeamShared shared;
  Count count;
  const u32 call = begin_call(args.state, count);
  const u32 turns = (args.num_rows + WORLD_SIZE - 1) / WORLD_SIZE;
  u32 done = 0;  // rows, of which each has a barrier
  Row row;
  Weights weights;
  weights.load(args);
  push_turn(args, block_index(), call);
  for (u32 turn = block_index(); turn < turns + num_blocks(); turn += num_blocks()) {
    const u32 next = turn + num_blocks();
    if (next < turns) push_turn(args, next, call);
    const u32 own = turn * WORLD_SIZE + RANK;
    if (turn < turns && own < args.num_rows) {
      sum_turn(args, row, turn, call);
      finish(args, row, weights, own, shared, done++);
    }
    if (turn < num_blocks()) continue;
    const u32 before = turn - num_blocks();
#pragma unroll 1
    for (u32 step = 0; step < PEERS; ++step) {
      const u32 owner = peer(step), number = before * WORLD_SIZE + owner;
      if (number >= args.num_rows) continue;
      take_row(args, row, before, owner, call);
      finish(args, row, weights, number, shared, done++);
    }
  }
  count.end(args.state, call, num_blocks());
}
