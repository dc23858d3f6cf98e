// The pool as a whole: sort, clear, backup, restore, refresh, and the queue of a free group.
#include "common.cuh"

// Merges the staged pages with the front, ascending, if an allocation's bound (num_tokens) exceeds the front. Pages
// without an owner are exactly the free and the staged ones, so nothing needs sorting: they are read off in order.
extern "C" __global__ void __launch_bounds__(1024) sort_free(const __grid_constant__ Args a) {
    __shared__ i64 carry[2][32];
    i64* w = a.words;
    const bool wanted = w[STAGED] > 0 && a.num_tokens > w[FREE];
    __syncthreads();
    if (!wanted) return;
    const i64 pages = w[NUM_PAGES] + 1;
    i64 done = 0;
    int turn = 0;
    for (i64 base = 0; base < pages; base += blockDim.x * 4, turn ^= 1) {
        const i64 first = base + threadIdx.x * 4;
        int free[4];
        i64 mine = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            free[j] = first + j < pages && a.ref_count[first + j] == 0;
            mine += free[j];
        }
        i64 tile;
        i64 at = done + block_exclusive(mine, carry[turn], tile);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (free[j]) a.free_ring[at++] = static_cast<int>(first + j);
        done += tile;
    }
    if (threadIdx.x == 0) {
        w[HEAD] = 0;
        w[FREE] += w[STAGED];
        w[STAGED] = 0;
    }
}

// Every page of 1 .. n free, in order; page 0 owned for ever. Block 0 commits: no block reads the words.
extern "C" __global__ void __launch_bounds__(256) clear_pool(const __grid_constant__ Args a) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i <= a.capacity; i += step) {
        if (i < a.capacity) a.free_ring[i] = static_cast<int>(i + 1);
        a.ref_count[i] = i == 0;
        a.first_index[i] = INT32_LARGEST;
    }
    const i64 groups = (static_cast<i64>(a.capacity) >> 15) + 1;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < groups * 1024; i += step) {
        a.touched[i] = a.freed[i] = 0;
        if (i < groups) a.touched_groups[i] = a.freed_groups[i] = 0;
    }
    if (blockIdx.x > 0 || threadIdx.x >= 32) return;
    __shared__ i64 w[STATE_WORDS];
    load_words(a, w);
    __syncwarp();
    if (threadIdx.x == 0) {
        begin_op(a, w);
        w[HEAD] = w[STAGED] = w[SHARED] = w[RET] = 0;
        w[NUM_PAGES] = w[FREE] = a.n;
        w[BREACH] = NO_BREACH;
        w[PLAN_PAGES] = w[PLAN_TOKENS] = w[PLAN_REFUSED] = w[TICKET] = 0;
        end_op(w, STATUS_OK);
    }
    post(a, w);
}

// A backup is one array of int32: ring, reference counts, then these words.
constexpr int SAVED = 5;
__device__ constexpr Word SAVED_WORDS[SAVED] = {HEAD, FREE, STAGED, SHARED, NUM_PAGES};

extern "C" __global__ void __launch_bounds__(256) backup_pool(const __grid_constant__ Args a) {
    int* saved = reinterpret_cast<int*>(a.out);
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i <= a.capacity; i += step) {
        if (i < a.capacity) saved[i] = a.free_ring[i];
        saved[a.capacity + i] = a.ref_count[i];
    }
    if (blockIdx.x > 0 || threadIdx.x >= 32) return;
    __shared__ i64 w[STATE_WORDS];
    load_words(a, w);
    __syncwarp();
    if (threadIdx.x == 0) {
        begin_op(a, w);
        for (int i = 0; i < SAVED; ++i) saved[2LL * a.capacity + 1 + i] = static_cast<int>(w[SAVED_WORDS[i]]);
        end_op(w, STATUS_OK);
    }
    post(a, w);
}

extern "C" __global__ void __launch_bounds__(256) restore_pool(const __grid_constant__ Args a) {
    const int* saved = reinterpret_cast<const int*>(a.seq.data);
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i <= a.capacity; i += step) {
        if (i < a.capacity) a.free_ring[i] = saved[i];
        a.ref_count[i] = saved[a.capacity + i];
    }
    if (blockIdx.x > 0 || threadIdx.x >= 32) return;
    __shared__ i64 w[STATE_WORDS];
    load_words(a, w);
    __syncwarp();
    if (threadIdx.x == 0) {
        begin_op(a, w);
        for (int i = 0; i < SAVED; ++i) w[SAVED_WORDS[i]] = saved[2LL * a.capacity + 1 + i];
        end_op(w, STATUS_OK);
    }
    post(a, w);
}

// An op that changes nothing: its mail is what the host wants.
extern "C" __global__ void __launch_bounds__(32) refresh_pool(const __grid_constant__ Args a) {
    __shared__ i64 w[STATE_WORDS];
    load_words(a, w);
    __syncwarp();
    if (threadIdx.x == 0) {
        begin_op(a, w);
        end_op(w, STATUS_OK);
    }
    post(a, w);
}

// Appends a queued array to the free group's buffer, whatever its dtype and stride.
extern "C" __global__ void __launch_bounds__(256) queue_entries(const __grid_constant__ Args a) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < a.n) reinterpret_cast<i64*>(a.out)[i] = a.seq.at(i);
}
