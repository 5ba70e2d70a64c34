// All-reduce, residual and RMSNorm of small messages, in one launch a rank: every rank pushes its
// rows to all peers, sums each row itself and norms it.
//
// A block pushes its next row before it waits for the one at hand, so the links are never idle, and
// the residual and the weights are loaded while packs travel. While a few rows travel, memory has
// nothing to do, though the matrix product that comes next waits for nothing else: further blocks
// have the beginning of its weights prefetched. Programmatic dependent launch is left
// out: between two matrix products of a model it cost 0.1 to 0.4 us a call
// (benchmarks/results/fused_engine.md).
//
// Progress: a block waits only for the block with the same index on other GPUs, which has pushed the
// row by then or pushes it before it waits itself. Blocks begin in the order of their index, and those
// that prefetch, which wait for nobody, come last.

#include "fused_rows.h"

// In a half, by source: the rows of the whole message.
DEVICE u32 staged(const Args& args, u32 place, u32 call) {
  return (call & 1) * args.half_packs + place * (args.num_rows * ROW_PACKS);
}

DEVICE void push(const Args& args, u32 number, u32 call) {
  const u32 member = thread_index(), first = number * ROW_PACKS + member;
  Pack packs[PACKS];
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j)
    if (in_row(j, member)) packs[j] = sendable(args.input[first + j * TEAM]);
#pragma unroll
  for (u32 step = 0; step < PEERS; ++step) {
    const u32 owner = peer(step);
    Pack* there = args.memory[owner] + staged(args, place(RANK, owner), call) + first;
#pragma unroll
    for (u32 j = 0; j < PACKS; ++j)
      if (in_row(j, member)) store_to_peer(there + j * TEAM, packs[j]);
  }
}

DEVICE void sum_row(const Args& args, Row& row, u32 number, u32 call) {
  const u32 member = thread_index(), first = number * ROW_PACKS + member;
  Pack* here = args.memory[RANK] + staged(args, 0, call) + first;
  Pack mine[PACKS], residual[PACKS];
  load_own(args, first, mine, residual);
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j) {
    if (!in_row(j, member)) continue;
    const Pack summed =
        sum_of_ranks(here + j * TEAM, args.num_rows * ROW_PACKS, mine[j], args.timeout_ns);
    row.packs[j] = RESIDUAL ? add_residual(summed, residual[j]) : summed;
    args.residual_out[first + j * TEAM] = row.packs[j];
  }
}

// Its share of the pieces; once the rows' first loads are under way, which would come later behind
// these. Nothing waits for what was asked for.
DEVICE void prefetch_pieces(const Args& args) {
  const u32 blocks = num_blocks() - args.row_blocks, thread = thread_index();
  const u32 turn = thread % WARP * TEAM_WARPS + thread / WARP;  // a warp's go one after the other
  for (const u64 start = cycles(); cycles() - start < args.prefetch_after;) {}
  for (u32 piece = turn * blocks + block_index() - args.row_blocks; piece < args.num_pieces;
       piece += THREADS * blocks)
    prefetch(args.next + piece * args.piece_stride, args.piece_bytes);
}

extern "C" KERNEL(THREADS, MIN_BLOCKS) fused_one_phase(const ARGUMENT Args args) {
  SHARED TeamShared shared;
  const u32 blocks = args.row_blocks;
  if (block_index() >= blocks) return prefetch_pieces(args);
  const u32 call = load_relaxed_device(args.state) + 1;
  Weights weights;
  weights.load(args);
  Count count;
  u32 number = block_index();
  push(args, number, call);
  for (u32 turn = 0; number < args.num_rows; number += blocks, ++turn) {
    if (number + blocks < args.num_rows) push(args, number + blocks, call);
    Row row;
    sum_row(args, row, number, call);
    const float total = add_row(row, shared, turn, thread_index());
    if (turn == 0) count.begin(args.state, blocks);  // behind the row's barrier
    finish_row(args, row, weights, total, number, shared, turn);
  }
  count.end(args.state, call, blocks);
}
