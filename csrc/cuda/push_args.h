// What the two kernels that only sum take.
#pragma once

#include "push_parts.h"

struct Args {
  const Pack* input;
  Pack* output;
  u32* state;  // the number of the last call, and how many blocks of this one have ended
  u32 num_packs;
  u32 max_packs;  // of the largest message, a multiple of `WARP * WORLD_SIZE`
  u64 timeout_ns;
  Pack* memory[WORLD_SIZE];  // of each rank, as this process has it mapped
};
