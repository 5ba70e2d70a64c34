// Copies pieces of a peer's memory, which this process has mapped, to where they belong here: many
// and small ones as quickly as one large one, which a copy for each would not be.
//
// Pieces of one length are a run. A piece is copied in chunks, a chunk by a warp, of which all loads
// of a step are under way at the same time: that, and not the number of blocks, hides how far the
// memory is. Where both addresses are the same distance from a multiple of 16, or of 4, bytes go in
// words of so many, else one by one.
//
// Macros, set by gather.py:
//   THREADS      of a block, whole warps
//   CHUNK_BYTES  of a piece that a warp copies at a time
//   DEPTH        loads of a thread that are under way together
//   MAX_RUNS     of a launch

#include "packs.h"

typedef unsigned char u8;

struct Run {
  u32 end;    // number of the first chunk behind it
  u32 first;  // number of its first piece
  u32 parts;  // chunks of a piece
  u32 bytes;  // of a piece
};

struct Args {
  const u64* places;  // of each piece, the address where it is and the one where it belongs
  u32 num_chunks;
  u32 num_runs;
  Run runs[MAX_RUNS];
};

struct Chunk {
  u64 source, target;
  u32 bytes;
};

// Finds chunks whose numbers grow.
class Runs {
  u32 run_ = 0, begin_ = 0;

 public:
  DEVICE_MEMBER Chunk chunk(const Args& args, u32 number) {
    while (number >= args.runs[run_].end) begin_ = args.runs[run_++].end;
    const Run& run = args.runs[run_];
    const u32 piece = run.first + (number - begin_) / run.parts;
    const u32 offset = (number - begin_) % run.parts * CHUNK_BYTES, left = run.bytes - offset;
    Chunk chunk;
    chunk.source = args.places[2 * u64(piece)] + offset;
    chunk.target = args.places[2 * u64(piece) + 1] + offset;
    chunk.bytes = left < CHUNK_BYTES ? left : CHUNK_BYTES;
    return chunk;
  }
};

template <typename WORD>
DEVICE void copy_words(u64 source, u64 target, u32 count, u32 lane) {
  const volatile WORD* const from = reinterpret_cast<const volatile WORD*>(source);
  WORD* const to = reinterpret_cast<WORD*>(target);
  for (u32 i = lane; i < count; i += WARP) to[i] = from[i];
}

DEVICE void copy_packs(u64 source, u64 target, u32 count, u32 lane) {
  const Pack* const from = reinterpret_cast<const Pack*>(source);
  Pack* const to = reinterpret_cast<Pack*>(target);
  u32 i = lane;
  for (; i + (DEPTH - 1) * WARP < count; i += DEPTH * WARP) {
    Pack packs[DEPTH];
#pragma unroll
    for (u32 step = 0; step < DEPTH; ++step) load_from_peers(from + i + step * WARP, packs[step].words);
#pragma unroll
    for (u32 step = 0; step < DEPTH; ++step) store_streaming(to + i + step * WARP, packs[step].words);
  }
  for (; i < count; i += WARP) {
    Pack pack;
    load_from_peers(from + i, pack.words);
    store_streaming(to + i, pack.words);
  }
}

DEVICE void copy(const Chunk& chunk, u32 lane) {
  const u32 apart = u32(chunk.source ^ chunk.target);
  const u32 width = apart % 16 == 0 ? 16 : apart % 4 == 0 ? 4 : 1;
  const u32 ahead = (0 - u32(chunk.source)) % width;
  const u32 head = ahead < chunk.bytes ? ahead : chunk.bytes;
  const u32 count = (chunk.bytes - head) / width, done = head + count * width;
  const u64 source = chunk.source + head, target = chunk.target + head;
  copy_words<u8>(chunk.source, chunk.target, head, lane);
  if (width == 16)
    copy_packs(source, target, count, lane);
  else if (width == 4)
    copy_words<u32>(source, target, count, lane);
  else
    copy_words<u8>(source, target, count, lane);
  copy_words<u8>(chunk.source + done, chunk.target + done, chunk.bytes - done, lane);
}

extern "C" KERNEL(THREADS, 1) gather_pieces(const ARGUMENT Args args) {
  const u32 lane = thread_index() % WARP, warps = num_blocks() * (THREADS / WARP);
  u32 number = block_index() * (THREADS / WARP) + thread_index() / WARP;
  if (number >= args.num_chunks) return;
  Runs runs;
  // The next chunk's addresses come over PCIe while this one is copied.
  for (Chunk next = runs.chunk(args, number);;) {
    const Chunk chunk = next;
    number += warps;
    const bool goes_on = number < args.num_chunks;
    if (goes_on) next = runs.chunk(args, number);
    copy(chunk, lane);
    if (!goes_on) return;
  }
}
