// What the demo kernels share: one argument struct, a block-wide scan.
#pragma once

typedef long long i64;
constexpr unsigned FULL_WARP = 0xffffffffu;

struct Args {
    const int* in;
    int* out;
    int* partial;          // one a block
    unsigned* ticket;
    i64 n;
};

__device__ __forceinline__ int warp_inclusive(int x) {
    const int lane = threadIdx.x & 31;
    for (int d = 1; d < 32; d <<= 1) {
        const int y = __shfl_up_sync(FULL_WARP, x, d);
        if (lane >= d) x += y;
    }
    return x;
}

// A template, since that is where static variables in sections of their own go wrong.
template <typename T>
__device__ __forceinline__ T block_exclusive(T x) {
    __shared__ T carry[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const T inclusive = warp_inclusive(x);
    if (lane == 31) carry[warp] = inclusive;
    __syncthreads();
    const T mine = lane < warps ? carry[lane] : 0;
    const T before = __shfl_sync(FULL_WARP, warp_inclusive(mine) - mine, warp);
    __syncthreads();
    return before + inclusive - x;
}

__device__ __forceinline__ i64 global_thread() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }
