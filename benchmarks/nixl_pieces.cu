// Copies pieces of equal size from one GPU's memory to another's, a piece a block at a time.
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

struct Arguments {
    uint4* target;
    const uint4* source;
    const uint32_t* pairs;  // [count, 2] places in pieces: target, source
    uint32_t count;
    uint32_t words;  // of 16 bytes, in a piece
};

extern "C" __global__ void __launch_bounds__(512) nixl_pieces(const __grid_constant__ Arguments all) {
    for (uint32_t piece = blockIdx.x; piece < all.count; piece += gridDim.x) {
        uint4* target = all.target + uint64_t(all.pairs[2 * piece]) * all.words;
        const uint4* source = all.source + uint64_t(all.pairs[2 * piece + 1]) * all.words;
        for (uint32_t first = threadIdx.x; first < all.words; first += 4 * blockDim.x) {
            uint4 held[4];
#pragma unroll
            for (uint32_t step = 0; step < 4; ++step) {
                uint32_t word = first + step * blockDim.x;
                if (word < all.words) held[step] = source[word];
            }
#pragma unroll
            for (uint32_t step = 0; step < 4; ++step) {
                uint32_t word = first + step * blockDim.x;
                if (word < all.words) target[word] = held[step];
            }
        }
    }
}
