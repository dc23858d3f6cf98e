// Extends in one launch, and the plan by one block of those that take two.
#include "alloc.cuh"

constexpr int SCAN_REQUESTS = 4096;  // that a cluster can plan

// Tokens of an extend are cut to one too many, and pages with them: sums of what is cut stay below 2**32, and a batch
// with too many is found out by its sum.
__device__ __forceinline__ i64 pages_and_tokens(const Args& a, const Request& r) {
    const i64 too_many = a.num_tokens + 1, pages = new_pages(a, r), tokens = new_tokens(r);
    return (pages < too_many ? pages : too_many) << 32 | (tokens < too_many ? tokens : too_many);
}

// The exact sums over the batch.
__device__ __noinline__ void sum_lengths(const Args& a, i64& pages, i64& tokens) {
    __shared__ i64 carry[2][32];
    i64 my_pages = 0, my_tokens = 0;
    for (i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
        const Request r = load_lengths(a, i);
        my_pages += new_pages(a, r);
        my_tokens += new_tokens(r);
    }
    block_exclusive(my_pages, my_tokens, carry, pages, tokens);
}

// Extend by one block, a request a thread: the whole of it (WRITE), or only the plan, for `write_slots`.
template <bool TABLE, bool WRITE>
__device__ __forceinline__ void extend(const Args& a) {
    __shared__ int begins[PLAN_THREADS + 1], pages_before[PLAN_THREADS], pages[PLAN_THREADS];
    __shared__ i64 carry[32];
    __shared__ Breaches breaches;
    const int i = threadIdx.x;
    const bool mine = i < a.n;
    const Part part = part_of(a, 0, static_cast<u32>(a.num_tokens), i >> 5, blockDim.x >> 5);

    const i64 at = mine ? i : 0;
    const i64 prefix = TABLE ? a.prefix.at(at) : a.prefix.given(at), seq = TABLE ? a.seq.at(at) : a.seq.given(at);
    const i64 entry = TABLE ? a.rows.at(at) : a.last.given(at);
    const Before b = load_before(a);
    begin_breaches(breaches);
    const int fetched = !WRITE ? 0 : blockDim.x < a.capacity ? blockDim.x : a.capacity;
    if (i < fetched) pages[i] = a.free_ring[ring_position(a, b.head + i)];

    Request r = {prefix, seq, entry, 0, false};
    if (TABLE) r = make_request(a, prefix, seq, entry);
    const bool fine = is_fine<TABLE>(a, b.num_pages, r) || !mine;
    i64 all;
    const i64 before = block_exclusive(mine ? pages_and_tokens(a, r) : 0, carry, all);
    begins[i] = static_cast<int>(before & 0xffffffffLL);
    pages_before[i] = static_cast<int>(before >> 32);
    if (i + 1 == blockDim.x) begins[i + 1] = static_cast<int>(all & 0xffffffffLL);
    const bool odd = __syncthreads_or(!fine);
    if (odd) {
        if (!fine) find_breach(a, b.num_pages, i, breaches);
        __syncthreads();
    }
    i64 total = all >> 32, tokens = all & 0xffffffffLL;
    if (tokens > a.num_tokens) sum_lengths(a, total, tokens);
    const Outcome o = outcome_of(a, b.free, total, tokens, breaches.first, breaches.refused);
    if (odd) __syncthreads();  // all have read the offending value, before the table is written
    commit(a, b, o, total, tokens);
    const i64 granted = o.status == STATUS_OK ? tokens : 0;
    const Front front = {static_cast<u32>(b.head), pages, fetched, true};
    if constexpr (!WRITE) {
        if (mine) {
            a.plan_tokens[i] = begins[i];
            a.plan_pages[i] = pages_before[i];
        }
        if (i == 0) a.plan_tokens[a.n] = static_cast<int>(tokens);
    } else if constexpr (!TABLE) {
        const Planned plan = {begins, pages_before, nullptr, 0, static_cast<u32>(a.n)};
        write_tokens(a, front, plan, static_cast<u32>(granted), part);
    } else {
        for (i64 t = i; t < a.num_tokens; t += blockDim.x) {
            if (t >= granted) {
                put_slot(a, t, a.refused_slot);
                continue;
            }
            const i64 k = request_of<i64>(begins, t, 0, a.n - 1), j = t - begins[k];
            const Request q = load_request(a, k);
            write_token(a, t, q, j, q.padding ? 0 : slot_of(a, q, front, pages_before[k], j));
        }
    }
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) extend_small(const __grid_constant__ Args a) {
    extend<false, true>(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) extend_step_small(const __grid_constant__ Args a) {
    extend<true, true>(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_small(const __grid_constant__ Args a) {
    extend<false, false>(a);
}

#ifdef CLUSTERS
// Extend by a cluster, a tile of the output a block, up to SCAN_REQUESTS requests: each block plans the whole batch for
// itself, since any of it may lie in its tile, and validates a share.
extern "C" __global__ void __cluster_dims__(MOST_BLOCKS, 1, 1) __launch_bounds__(PLAN_THREADS)
    extend_cluster(const __grid_constant__ Args a) {
    __shared__ int begins[SCAN_REQUESTS + 1], pages_before[SCAN_REQUESTS];
    __shared__ i64 carry[32];
    __shared__ Exchange exchange;
    __shared__ Breaches breaches;
    const u32 n = static_cast<u32>(a.n), rank = blockIdx.x, share = (n + gridDim.x - 1) / gridDim.x;
    const u32 base = share * rank, end = base + share < n ? base + share : n;

    exchange.begin();
    begin_breaches(breaches);
    const Before b = load_before(a);
    const Part part = part_of(
        a, 0, static_cast<u32>(a.num_tokens), (rank * blockDim.x + threadIdx.x) >> 5, (blockDim.x * gridDim.x) >> 5
    );
    // The first of the share is asked for before anything is waited for.
    const u32 at = base + threadIdx.x;
    const bool mine = at < end;
    Request r = {0, 0, -1, 0, false};
    if (mine) r = {a.prefix.given(at), a.seq.given(at), a.last.given(at), 0, false};
#pragma unroll 2
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        const i64 sums = pages_and_tokens(a, {a.prefix.given(i), a.seq.given(i), -1, 0, false});
        begins[i] = static_cast<int>(sums & 0xffffffffLL);
        pages_before[i] = static_cast<int>(sums >> 32);
    }
    bool fine = !mine || is_fine<false>(a, b.num_pages, r);
    for (u32 i = at + blockDim.x; i < end; i += blockDim.x) {
        r = {a.prefix.given(i), a.seq.given(i), a.last.given(i), 0, false};
        fine = is_fine<false>(a, b.num_pages, r) && fine;
    }
    __syncthreads();
    const u32 each = (n + blockDim.x - 1) / blockDim.x, first = threadIdx.x * each;
    i64 sums = 0;
    for (u32 i = first; i < first + each && i < n; ++i)
        sums += static_cast<i64>(pages_before[i]) << 32 | static_cast<u32>(begins[i]);
    i64 all, before = block_exclusive(sums, carry, all);
    for (u32 i = first; i < first + each && i < n; ++i) {
        const i64 its = static_cast<i64>(pages_before[i]) << 32 | static_cast<u32>(begins[i]);
        begins[i] = static_cast<int>(before & 0xffffffffLL);
        pages_before[i] = static_cast<int>(before >> 32);
        before += its;
    }
    if (threadIdx.x == 0) begins[n] = static_cast<int>(all & 0xffffffffLL);
    exchange.open();
    const bool odd = __syncthreads_or(!fine);
    if (threadIdx.x < 32) exchange.tell(odd);
    exchange.hear();

    const u32 lane = threadIdx.x & 31;
    const bool trouble = __any_sync(FULL_WARP, lane < gridDim.x && exchange.told[lane]);
    Breaches found = {NO_BREACH, 0};
    if (trouble) found = breaches_in_cluster(a, b.num_pages, base, end, fine, breaches);
    i64 total = all >> 32, tokens = all & 0xffffffffLL;
    if (tokens > a.num_tokens) sum_lengths(a, total, tokens);
    const Outcome o = outcome_of(a, b.free, total, tokens, found.first, found.refused);
    if (trouble) cluster_sync();
    if (rank == gridDim.x - 1) commit(a, b, o, total, tokens);
    const Front front = {static_cast<u32>(b.head), nullptr, 0, true};
    const u32 granted = o.status == STATUS_OK ? static_cast<u32>(tokens) : 0;
    write_tokens(a, front, {begins, pages_before, nullptr, 0, n}, granted, part);
}
#endif
