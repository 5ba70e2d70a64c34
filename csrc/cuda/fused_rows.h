// What the two fused kernels share: a row's sum over ranks plus its residual, normed and quantised.
//
// A team is a block, and takes a row at a time. The number of threads is a matter of speed alone:
// squares are added by pack, then over 32 neighbouring packs, then over those in a fixed tree,
// whoever holds them, so a row has the same bits in every form of the kernels and beside any others.
//
// Macros, set by fused/layout.py, beside ELEMENT, WORLD_SIZE and RANK:
//   WEIGHT        as ELEMENT, of the norm's weights
//   HIDDEN        elements of a row, a multiple of 8
//   TEAM_WARPS    warps of a block
//   MIN_BLOCKS    blocks that a multiprocessor must have registers for
//   RESIDUAL      1 adds a residual
//   WEIGHT_BIAS   added to each weight: 1 for Gemma's
//   EPILOGUE      0 stores the norm; in 8 bits (e4m3) of what it would have stored: 1 by a scale that
//                 is given, 2 by a scale a row, 3 by a scale for each 128 elements
#pragma once

#include "push_parts.h"
#include "weights.h"

constexpr int NORM = 0, STATIC_FP8 = 1, ROW_FP8 = 2, GROUP_FP8 = 3;
constexpr u32 GROUP = 128;  // elements
constexpr float MAX_FP8 = 448.0f;
constexpr float MIN_ROW_SCALE = 1.0f / (MAX_FP8 * 512.0f), MIN_GROUP_LARGEST = 1e-10f;  // as vLLM

constexpr u32 TEAM = TEAM_WARPS * WARP;
constexpr u32 THREADS = TEAM;
constexpr u32 ROW_PACKS = HIDDEN / PACK;
constexpr u32 PACKS = (ROW_PACKS + TEAM - 1) / TEAM;       // a thread
constexpr u32 WARP_SUMS = (ROW_PACKS + WARP - 1) / WARP;   // of 32 neighbouring packs each
constexpr u32 GROUP_LANES = GROUP / PACK;                  // that hold a group's packs

struct Args {
  const Pack* input;
  const Pack* residual;
  const WeightPack* weight;
  Pack* residual_out;
  u32* output;          // packs, or two words or one in place of each
  float* scales;        // given (1), a row's (2) or a group's (3)
  u32* state;           // the number of the last call, and how many blocks have come in this one
  u32 num_rows;
  u32 half_packs;       // of staging memory
  float eps;
  u32 scale_rows;       // between columns of the groups' scales; 0: they lie row by row
  u64 timeout_ns;
  u32 row_blocks;       // blocks of the launch that take rows; those behind them prefetch
  u32 prefetch_after;   // cycles
  const char* next;     // what the output is multiplied by afterwards, of which is prefetched:
  u32 num_pieces;       // so many pieces
  u32 piece_bytes;      // of so many bytes, a multiple of 16
  u64 piece_stride;     // from one's beginning to the next's
  Pack* memory[WORLD_SIZE];  // of each rank, as this process has it mapped
};

struct TeamShared {
  float sums[2][WARP_SUMS];  // rows take turns, so that one barrier a row is enough
  float largest[2][TEAM_WARPS];
};

// What a thread holds of a row: pack `member + j * TEAM` at j.
struct Row {
  Pack packs[PACKS];
};

// Whether pack j of this thread is in the row; known to the compiler for all but the last.
DEVICE bool in_row(u32 j, u32 member) {
  return (j + 1) * TEAM <= ROW_PACKS || member + j * TEAM < ROW_PACKS;
}

DEVICE float add_lanes(float sum) {
#pragma unroll
  for (u32 distance = WARP / 2; distance > 0; distance /= 2) sum += exchange_lanes(sum, distance);
  return sum;
}

DEVICE float largest_of_lanes(float largest, u32 lanes) {
  for (u32 distance = lanes / 2; distance > 0; distance /= 2)
    largest = fmaxf(largest, exchange_lanes(largest, distance));
  return largest;
}

// The row's sum of squares, in all threads of the team; has the barrier of this row.
DEVICE float add_row(const Row& row, TeamShared& shared, u32 turn, u32 member) {
  const u32 warp = member / WARP, lane = member % WARP;
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j) {
    const float sum = add_lanes(in_row(j, member) ? sum_of_squares(row.packs[j]) : 0.0f);
    const u32 at = warp + j * TEAM_WARPS;
    if (lane == 0 && at < WARP_SUMS) shared.sums[turn % 2][at] = sum;
  }
  block_barrier();
  float sum = 0.0f;
#pragma unroll
  for (u32 at = 0; at < WARP_SUMS; at += WARP)
    if (at + lane < WARP_SUMS) sum += shared.sums[turn % 2][at + lane];
  return add_lanes(sum);
}

// This rank's packs of a row, and the residual's; `first` is the index of this thread's first.
DEVICE void load_own(const Args& args, u32 first, Pack* mine, Pack* residual) {
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j) {
    if (!in_row(j, thread_index())) continue;
    mine[j] = args.input[first + j * TEAM];
    if (RESIDUAL) residual[j] = args.residual[first + j * TEAM];
  }
}

// The sum over ranks is rounded before the residual is added, as where they are two kernels.
DEVICE Pack add_residual(const Pack& summed, const Pack& residual) {
  Sum sum;
  sum.add(summed, true);
  sum.add(residual, false);
  return sum.rounded();
}

DEVICE Pack normed(const Pack& pack, float factor, const WeightPack& weights) {
  float scaled[PACK];
#pragma unroll
  for (u32 i = 0; i < PACK; ++i) {
    const float weight = element<WEIGHT>(weights.words, i) + float(WEIGHT_BIAS);
    scaled[i] = element<ELEMENT>(pack.words, i) * factor * weight;
  }
  return pack_of<ELEMENT>(scaled);
}

DEVICE float largest_of(const Pack& pack) {
  float largest = 0.0f;
#pragma unroll
  for (u32 i = 0; i < PACK; ++i) largest = fmaxf(largest, fabsf(element<ELEMENT>(pack.words, i)));
  return largest;
}

// As many bytes as the pack has elements.
DEVICE void store_fp8(u32* output, u64 index, const Pack& pack, float scale) {
  const float inverse = 1.0f / scale;  // vLLM multiplies by a given scale's and divides by its own
  u32 words[2];
#pragma unroll
  for (u32 i = 0; i < PACK; i += 4) {
    float x[4];
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      const float number = element<ELEMENT>(pack.words, i + k);
      x[k] = EPILOGUE == STATIC_FP8 ? number * inverse : number / scale;
    }
    words[i / 4] = floats_to_fp8(x[0], x[1]) | (floats_to_fp8(x[2], x[3]) << 16);
  }
#pragma unroll
  for (u32 i = 0; i < PACK / 4; ++i) output[index * (PACK / 4) + i] = words[i];
}

// The row's largest number, in all threads; has a barrier.
DEVICE float largest_in_row(const Row& row, TeamShared& shared, u32 turn, u32 member) {
  const u32 warp = member / WARP, lane = member % WARP;
  float largest = 0.0f;
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j)
    if (in_row(j, member)) largest = fmaxf(largest, largest_of(row.packs[j]));
  largest = largest_of_lanes(largest, WARP);
  if (lane == 0) shared.largest[turn % 2][warp] = largest;
  block_barrier();
  return largest_of_lanes(lane < TEAM_WARPS ? shared.largest[turn % 2][lane] : 0.0f, WARP);
}

DEVICE u64 place_of_scale(const Args& args, u32 row, u32 group) {
  return args.scale_rows ? u64(group) * args.scale_rows + row : u64(row) * (HIDDEN / GROUP) + group;
}

// The norm's weights. A thread needs the same for every row, and keeps them where they are few: what
// it would load last would come last, and from memory, as a model's other weights have passed by.
struct Weights {
  static constexpr bool KEPT = PACKS <= 2;
  WeightPack packs[KEPT ? PACKS : 1];

  DEVICE_MEMBER void load(const Args& args) {
#pragma unroll
    for (u32 j = 0; KEPT && j < PACKS; ++j)
      if (in_row(j, thread_index())) packs[j] = args.weight[thread_index() + j * TEAM];
  }

  DEVICE_MEMBER WeightPack at(const Args& args, u32 j) const {
    return KEPT ? packs[j] : args.weight[thread_index() + j * TEAM];
  }
};

// The row's z comes in with its sum of squares, as `add_row` has it, and its output goes out; all
// threads of the team take part.
DEVICE void finish_row(const Args& args, Row& row, const Weights& weights, float total, u32 number,
                       TeamShared& shared, u32 turn) {
  const u32 member = thread_index();
  const u64 first = u64(number) * ROW_PACKS + member;
  const float factor = rsqrtf(total * (1.0f / HIDDEN) + args.eps);
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j) {
    if (!in_row(j, member)) continue;
    row.packs[j] = normed(row.packs[j], factor, weights.at(args, j));
    if (EPILOGUE == NORM) reinterpret_cast<Pack*>(args.output)[first + j * TEAM] = row.packs[j];
  }
  if (EPILOGUE == NORM) return;
  float scale = EPILOGUE == STATIC_FP8 ? args.scales[0] : 0.0f;
  if (EPILOGUE == ROW_FP8) {
    const float largest = largest_in_row(row, shared, turn, member);
    scale = fmaxf(largest / MAX_FP8, MIN_ROW_SCALE);
    if (member == 0) args.scales[number] = scale;
  }
#pragma unroll
  for (u32 j = 0; j < PACKS; ++j) {
    const u32 at = member + j * TEAM;
    if (EPILOGUE == GROUP_FP8) {
      const float here = in_row(j, member) ? largest_of(row.packs[j]) : 0.0f;
      const float largest = fmaxf(largest_of_lanes(here, GROUP_LANES), MIN_GROUP_LARGEST);
      scale = largest / MAX_FP8;
      if (in_row(j, member) && at % GROUP_LANES == 0)
        args.scales[place_of_scale(args, number, at / GROUP_LANES)] = scale;
    }
    if (in_row(j, member)) store_fp8(args.output, first + j * TEAM, row.packs[j], scale);
  }
}
