// Kernels without a fault, for the words that the harness must know.
#include "demo.cuh"

extern "C" __global__ void __launch_bounds__(1024) scan(const Args a) {
    const i64 i = threadIdx.x;
    const int x = i < a.n ? a.in[i] : 0;
    const int before = block_exclusive(x);
    if (i < a.n) a.out[i] = before;
}

// The sum over many blocks: the last one to finish adds up the others' parts.
extern "C" __global__ void __launch_bounds__(256, 2) grid_sum(const Args a) {
    __shared__ int sum;
    __shared__ bool last;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    const i64 i = global_thread();
    const int x = __reduce_add_sync(FULL_WARP, i < a.n ? a.in[i] : 0);
    if ((threadIdx.x & 31) == 0) atomicAdd(&sum, x);
    __syncthreads();
    if (threadIdx.x == 0) {
        a.partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(a.ticket, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last || threadIdx.x > 0) return;
    int total = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) total += a.partial[b];
    *a.out = total;
}

// Row k of the output: what the k-th collective gave each lane of one warp.
extern "C" __global__ void __launch_bounds__(32) warp_words(const Args a) {
    const int lane = threadIdx.x, x = a.in[lane];
    int* out = a.out + lane;
    auto put = [&](i64 value) {
        *out = static_cast<int>(value);
        out += 32;
    };
    put(__shfl_sync(FULL_WARP, x, lane + 5));
    put(__shfl_sync(FULL_WARP, x, lane + 3, 8));
    put(__shfl_up_sync(FULL_WARP, x, 2));
    put(__shfl_up_sync(FULL_WARP, x, 3, 8));
    put(__shfl_down_sync(FULL_WARP, static_cast<i64>(x) << 20, 4) >> 20);
    put(__shfl_down_sync(FULL_WARP, x, 1, 4));
    put(__shfl_xor_sync(FULL_WARP, x, 9));
    put(__shfl_xor_sync(FULL_WARP, x, 8, 8));
    put(__ballot_sync(FULL_WARP, x > 0));
    put(__any_sync(FULL_WARP, x > 90) * 2 + __all_sync(FULL_WARP, x > -100));
    put(__match_any_sync(FULL_WARP, x & 3));
    put(__reduce_add_sync(FULL_WARP, x));
    put(__reduce_min_sync(FULL_WARP, x));
    put(__reduce_max_sync(FULL_WARP, static_cast<unsigned>(x)));
    put(__reduce_xor_sync(FULL_WARP, static_cast<unsigned>(x)));
    if (lane < 11)
        put(__reduce_add_sync(0x7ffu, x));
    else
        put(__ballot_sync(~0x7ffu, x & 1));
    __syncwarp();
    if (lane & 1) return;
    put(__popc(__ballot_sync(0x55555555u, 1)));  // the odd lanes have gone
    put(__popc(__ballot_sync(FULL_WARP, 1)));
}

// Barriers that reduce, with threads that have left; rows as above.
extern "C" __global__ void __launch_bounds__(128) block_words(const Args a) {
    const int t = threadIdx.x;
    if (t >= a.n) return;
    a.out[t] = __syncthreads_or(t == 70);
    a.out[128 + t] = __syncthreads_and(t < 70);
    a.out[256 + t] = __syncthreads_count(t % 3 == 0);
    a.out[384 + t] = __syncthreads_and(t >= 0);
}

// atomics and arithmetic, on one word each.
extern "C" __global__ void atomics(const Args a) {
    const int x = a.in[global_thread()];
    unsigned* bits = reinterpret_cast<unsigned*>(a.out);
    atomicAdd(&a.out[0], x);
    atomicSub(&a.out[1], x);
    atomicMin(&a.out[2], x);
    atomicMax(&a.out[3], x);
    atomicOr(&bits[4], 1u << (x & 31));
    atomicAnd(&bits[5], ~(1u << (x & 31)));
    if (atomicExch(&a.out[6], 1) == 0) atomicAdd(&a.out[7], 1);
    int seen = __ldg(&a.in[0]);
    while (true) {
        const int old = atomicCAS(&a.out[8], seen, seen + 1);
        if (old == seen) break;
        seen = old;
    }
    i64* wide = reinterpret_cast<i64*>(a.partial);
    atomicMin(wide, static_cast<i64>(x) << 33);
    if (global_thread() > 0) return;
    a.out[9] = __ffs(0x50) + 10 * __clz(1) + 1000 * __popcll(0xff00000000000001ull);
    a.out[10] = static_cast<int>(__umulhi(1u << 31, 6u)) + max(3, 4) + static_cast<int>(min(5u, 7u));
    const int4 four = make_int4(1, 2, 3, 4);
    *reinterpret_cast<int4*>(a.out + 12) = four;
}

// What a volatile access means to another thread is no race.
extern "C" __global__ void volatile_word(const Args a) {
    volatile int* word = a.out;
    *word = 7;
    if (*word != 7) a.out[1] = 1;
}

// Each block tells the next one of its cluster what it has; a thread that has returned is not waited for.
extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(64) cluster_ring(const Args a) {
    __shared__ int told;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    if (threadIdx.x == 0) {
        const unsigned next = (blockIdx.x + 1) % gridDim.x;
        *static_cast<int*>(__cluster_map_shared_rank(&told, next)) = a.in[blockIdx.x];
    }
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    if (threadIdx.x == 63 && blockIdx.x % 2) return;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    if (threadIdx.x == 0) a.out[blockIdx.x] = told;
}
