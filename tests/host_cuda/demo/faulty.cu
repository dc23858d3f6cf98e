// One fault a kernel, each as it might slip in; the harness must catch every one.
#include "demo.cuh"

// Comparison: the rank of a kept element counts the element itself.
extern "C" __global__ void __launch_bounds__(1024) wrong_rank(const Args a) {
    const unsigned t = threadIdx.x;
    const bool keep = t < a.n && a.in[t] > 0;
    const unsigned kept = __ballot_sync(FULL_WARP, keep);
    const int before = block_exclusive((t & 31) == 0 ? __popc(kept) : 0);
    const int base = __shfl_sync(FULL_WARP, before, 0);
    if (keep) a.out[base + __popc(kept & ((2u << (t & 31)) - 1))] = a.in[t];
}

// Comparison: warps read the carries of others that may not have written them.
extern "C" __global__ void __launch_bounds__(1024) missing_barrier(const Args a) {
    __shared__ int carry[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int x = threadIdx.x < a.n ? a.in[threadIdx.x] : 0;
    const int inclusive = warp_inclusive(x);
    if (lane == 31) carry[warp] = inclusive;
    int before = 0;
    for (int w = 0; w < warp; ++w) before += carry[w];
    if (threadIdx.x < a.n) a.out[threadIdx.x] = before + inclusive - x;
}

// Call sites: half of the block waits in one barrier, half in another.
extern "C" __global__ void divergent_barrier(const Args a) {
    if (threadIdx.x < 32) {
        a.out[threadIdx.x] = 1;
        __syncthreads();
    } else {
        __syncthreads();
        a.out[threadIdx.x] = 2;
    }
}

// Call sites: both branches name all lanes.
extern "C" __global__ void divergent_warp(const Args a) {
    if (threadIdx.x & 1)
        a.out[threadIdx.x] = __shfl_sync(FULL_WARP, 1, 0);
    else
        a.out[threadIdx.x] = __shfl_sync(FULL_WARP, 2, 0);
}

// Deadlock: lane 5 waits for the block, the other lanes wait for lane 5.
extern "C" __global__ void deadlock(const Args a) {
    if (threadIdx.x == 5) __syncthreads();
    a.out[threadIdx.x] = __shfl_sync(FULL_WARP, 1, 0);
    if (threadIdx.x != 5) __syncthreads();
}

extern "C" __global__ void not_in_mask(const Args a) { a.out[threadIdx.x] = __any_sync(0xffffu, 1); }

extern "C" __global__ void broken_promise(const Args a) {
    __builtin_assume(a.n < 10);
    *a.out = static_cast<int>(a.n);
}

// Garbage: the count starts at whatever was there.
extern "C" __global__ void unwritten_shared(const Args a) {
    __shared__ int count;
    if (threadIdx.x < a.n && a.in[threadIdx.x] > 0) atomicAdd(&count, 1);
    __syncthreads();
    if (threadIdx.x == 0) *a.out = count;
}

// ASan: the guard is of the element, the read is of its right-hand neighbour.
extern "C" __global__ void read_past(const Args a) {
    const i64 i = global_thread();
    if (i < a.n) a.out[i] = a.in[i] != a.in[i + 1];
}

__device__ __noinline__ void put(int* p, int x) { *p = x; }

extern "C" __global__ void shared_past(const Args a) {
    __shared__ int carry[8];
    if ((threadIdx.x & 31) == 0) put(carry + (threadIdx.x >> 5), 1);
    __syncthreads();
    if (threadIdx.x == 0) *a.out = carry[0];
}

// UBSan: a shift by the width when the bit is the last of its word.
extern "C" __global__ void shift_by_width(const Args a) {
    const unsigned before = (1u << (a.in[threadIdx.x] & 63)) - 1;
    a.out[threadIdx.x] = __popc(before);
}

extern "C" __global__ void overflow(const Args a) {
    const int x = a.in[threadIdx.x];
    a.out[threadIdx.x] = x * 65536;
}

extern "C" __global__ void misaligned(const Args a) {
    const int4 x = *reinterpret_cast<const int4*>(a.in + threadIdx.x);
    a.out[threadIdx.x] = x.x + x.w;
}

// TSan: two blocks may draw the same number.
extern "C" __global__ void plain_ticket(const Args a) {
    if (threadIdx.x > 0) return;
    const unsigned mine = *a.ticket;
    *a.ticket = mine + 1;
    a.out[mine] = blockIdx.x;
}

// TSan: the ticket is atomic, but nothing orders the parts that it stands for.
extern "C" __global__ void missing_fence(const Args a) {
    if (threadIdx.x > 0) return;
    a.partial[blockIdx.x] = a.in[blockIdx.x];
    if (atomicAdd(a.ticket, 1u) != gridDim.x - 1) return;
    int total = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) total += a.partial[b];
    *a.out = total;
}

// TSan: a shuffle orders no memory; this needs a __syncwarp.
extern "C" __global__ void missing_syncwarp(const Args a) {
    a.out[threadIdx.x] = a.in[threadIdx.x];
    const int from = __shfl_xor_sync(FULL_WARP, threadIdx.x, 1);
    a.partial[threadIdx.x] = a.out[from];
}

// TSan: a relaxed arrival passes nothing on.
extern "C" __global__ void __cluster_dims__(8, 1, 1) cluster_relaxed(const Args a) {
    __shared__ int told;
    told = 0;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    if (threadIdx.x == 0) *static_cast<int*>(__cluster_map_shared_rank(&told, (blockIdx.x + 1) % gridDim.x)) = 1;
    __cluster_barrier_arrive_relaxed();
    __cluster_barrier_wait();
    if (threadIdx.x == 0) a.out[blockIdx.x] = told;
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) cluster_stuck(const Args a) {
    if (blockIdx.x == 1 && threadIdx.x == 3) __trap();
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    a.out[0] = 1;
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) cluster_stranger(const Args a) {
    __shared__ int told;
    a.out[0] = __cluster_map_shared_rank(&told, gridDim.x) != nullptr;
}
