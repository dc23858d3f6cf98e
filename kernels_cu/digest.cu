// A digest of what a pool hands out and takes back, by which ranks that must do the same compare. Its two cells are
// the caller's. It changes no state of the pool, so it is no op: no number, no error, no mail.
#include "common.cuh"

typedef unsigned long long u64;

enum DigestCell {
    DIGEST,
    FREED_SEEN,  // FREED as of the last fold
};

// Maps 64 bits one to one (the end of splitmix64): sums that differ stay different.
__device__ __forceinline__ u64 mixed(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

// What the value at a place of a fold adds to its sum. Multiples of 2^64 over the golden ratio lie far apart: below
// 2^31, no two pairs of place and value add the same.
__device__ __forceinline__ u64 term(i64 place, i64 value) {
    return mixed(static_cast<u64>(value) + static_cast<u64>(place + 1) * 0x9e3779b97f4a7c15ULL);
}

// Folds `n` entries, then the pages that came back since the last fold, in their order in the ring, then three words.
// One block: sums commute, so no order of threads shows, and the next fold finds the cells as this one leaves them.
extern "C" __global__ void __launch_bounds__(1024) fold_digest(const __grid_constant__ Args a) {
    __shared__ u64 sums[32];
    u64* cells = reinterpret_cast<u64*>(a.out);
    const i64 listed = a.words[FREE] + a.words[STAGED], freed = a.words[FREED];
    i64 pushed = freed - static_cast<i64>(cells[FREED_SEEN]);
    pushed = pushed < 0 ? 0 : pushed < listed ? pushed : listed;
    const i64 first = ring_position(a, a.words[HEAD] + (a.where == FRONT ? 0 : listed - pushed));
    u64 sum = 0;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < a.n; i += blockDim.x) sum += term(i, a.seq.at(i));
    for (i64 i = threadIdx.x; i < pushed; i += blockDim.x) sum += term(a.n + i, a.free_ring[ring_position(a, first + i)]);
    for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(FULL_WARP, sum, d);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (u32 warp = 1; warp < blockDim.x >> 5; warp++) sum += sums[warp];
    const i64 behind = a.n + pushed;
    sum += term(behind, a.words[FREE]) + term(behind + 1, a.words[STAGED]) + term(behind + 2, a.words[SHARED]);
    cells[DIGEST] = mixed(cells[DIGEST] + sum);
    cells[FREED_SEEN] = static_cast<u64>(freed);
}
