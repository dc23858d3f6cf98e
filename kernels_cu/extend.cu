// Extends in one launch.
#include "alloc.cuh"

constexpr u32 MANY = 4;  // requests that a thread of `extend_tiles_many` can plan

// Tokens of an extend are cut to one too many, and pages with them: sums of what is cut stay below 2**32, and a batch
// with too many is found out by its sum.
__device__ __forceinline__ i64 pages_and_tokens(const Args& a, const Request& r) {
    const i64 too_many = a.num_tokens + 1, pages = new_pages(a, r), tokens = new_tokens(r);
    return (pages < too_many ? pages : too_many) << 32 | (tokens < too_many ? tokens : too_many);
}

// The same of a request without a table, in 32 bits, and whether nothing is wrong with it. Owners of its last page are
// looked at only if they matter.
__device__ __forceinline__ bool count_request(const Args& a, i64 num_pages, const Request& r, i64& pages_and_tokens) {
    pages_and_tokens = 0;
    if (!lengths_hold(r.prefix, r.seq)) return false;
    const u32 too_many = static_cast<u32>(a.num_tokens) + 1, size = static_cast<u32>(a.page_size);
    const u32 prefix = static_cast<u32>(r.prefix), seq = static_cast<u32>(r.seq);
    const u32 full = full_pages(a, prefix), full_after = full_pages(a, seq), offset = prefix - full * size;
    const u32 pages = full_after + (seq != full_after * size) - full - (offset != 0), tokens = seq - prefix;
    pages_and_tokens = static_cast<i64>(pages < too_many ? pages : too_many) << 32;
    pages_and_tokens |= tokens < too_many ? tokens : too_many;
    if (offset == 0 || tokens == 0) return true;
    const i64 page = r.last < 0 ? 0 : div_page(a, r.last);
    return is_page(page, num_pages) && a.ref_count[page] == 1 && r.last + 1 - page * size == offset;
}

// The sum over the warp of pages and tokens.
__device__ __forceinline__ i64 warp_sums(i64 pages_and_tokens) {
    const int tokens = static_cast<int>(pages_and_tokens & 0xffffffffLL);
    const u32 pages = static_cast<u32>(warp_sum(static_cast<int>(pages_and_tokens >> 32)));
    return static_cast<i64>(static_cast<u64>(pages) << 32 | static_cast<u32>(warp_sum(tokens)));
}

// Pages and tokens of the requests of all threads before this one, and of all: a sum over few warps is cheaper than a
// scan of theirs.
__device__ __forceinline__ i64 sums_before(i64 pages_and_tokens, i64* carry, i64& all) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const i64 inclusive = warp_inclusive(pages_and_tokens);
    if (lane == 31) carry[warp] = inclusive;
    __syncthreads();
    const i64 sums = lane < warps ? carry[lane] : 0;
    all = warp_sums(sums);
    return warp_sums(lane < warp ? sums : 0) + inclusive - pages_and_tokens;
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

// Extend by one block, a request a thread.
template <bool TABLE>
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
    const int fetched = blockDim.x < a.capacity ? blockDim.x : a.capacity;
    if (i < fetched) pages[i] = a.free_ring[ring_position(a, b.head + i)];

    Request r = {prefix, seq, entry, 0, false};
    if (TABLE) r = make_request(a, prefix, seq, entry);
    bool fine;
    i64 counted, all;
    if constexpr (TABLE) {
        fine = is_fine<TABLE>(a, b.num_pages, r);
        counted = pages_and_tokens(a, r);
    } else {
        fine = count_request(a, b.num_pages, r, counted);
    }
    fine = fine || !mine;
    const i64 before = sums_before(mine ? counted : 0, carry, all);
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
    const Front front = {static_cast<u32>(b.head), pages, static_cast<u32>(fetched)};
    if constexpr (!TABLE) {
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
    extend<false>(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) extend_step_small(const __grid_constant__ Args a) {
    extend<true>(a);
}

// Extend by any number of blocks that know nothing of each other: each plans and validates the whole batch for itself,
// then writes a tile of the output and owns the pages that begin there. None has to wait until all have read the owners
// of last pages: a block that counts owners has found every last page owned, so no such page is new, and had it been
// wrong, because another had counted owners before, that one would have been wrong first. The words, which all read, are
// changed by the last block to say that it has.
template <u32 EACH>  // requests that a thread can plan
__device__ __forceinline__ void extend_tile(const Args& a) {
    __shared__ int begins[EACH * PLAN_THREADS + 1], pages_before[EACH * PLAN_THREADS];
    __shared__ i64 carry[EACH][32], head, free;
    __shared__ Breaches breaches;
    const u32 n = static_cast<u32>(a.n), lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const u32 writers = warps - 1;  // the last warp keeps the words

    Request r[EACH];
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        const u32 i = k * blockDim.x + threadIdx.x;
        r[k] = {0, 0, -1, 0, false};
        if (i < n) r[k] = {a.prefix.given(i), a.seq.given(i), a.last.given(i), 0, false};
    }
    const i64 num_pages = a.words[NUM_PAGES];
    Before b = {0, 0, 0, 0, 0, 0, 0, 0};
    u32 counted = 0;  // not looked at before it must have come
    if (warp == writers) {
        b = load_before(a);
        __syncwarp();
        if (lane == 0) {
            head = b.head;
            free = b.free;
            counted = count_reader(a, b.head, b.free);
        }
    }
    begin_breaches(breaches);
    const Part part =
        part_of(a, 0, static_cast<u32>(a.num_tokens), blockIdx.x * writers + warp, gridDim.x * writers);

    i64 before[EACH];
    u32 wrong = 0;  // a bit for each of this thread's requests
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        before[k] = 0;
        if (k * blockDim.x >= n) continue;
        i64 mine;
        if (!count_request(a, num_pages, r[k], mine)) wrong |= 1u << k;
        const i64 inclusive = warp_inclusive(mine);
        if (lane == 31) carry[k][warp] = inclusive;
        before[k] = inclusive - mine;
    }
    __syncthreads();
    i64 all = 0;
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        const u32 i = k * blockDim.x + threadIdx.x;
        if (k * blockDim.x >= n) continue;
        const i64 sums = lane < warps ? carry[k][lane] : 0;
        before[k] += all + warp_sums(lane < warp ? sums : 0);
        all += warp_sums(sums);
        if (i >= n) continue;
        begins[i] = static_cast<int>(before[k] & 0xffffffffLL);
        pages_before[i] = static_cast<int>(before[k] >> 32);
        if (wrong >> k & 1) find_breach(a, num_pages, i, breaches);
    }
    if (threadIdx.x == 0) begins[n] = static_cast<int>(all & 0xffffffffLL);
    __syncthreads();
    i64 total = all >> 32, tokens = all & 0xffffffffLL;
    if (tokens > a.num_tokens) sum_lengths(a, total, tokens);
    const Outcome o = outcome_of(a, free, total, tokens, breaches.first, breaches.refused);
    if (warp == writers) {
        if (__shfl_sync(FULL_WARP, counted, 0) + 1 == gridDim.x) commit(a, b, o, total, tokens);
        return;
    }
    const Front front = {static_cast<u32>(head), nullptr, 0};
    const u32 granted = o.status == STATUS_OK ? static_cast<u32>(tokens) : 0;
    write_tokens(a, front, {begins, pages_before, nullptr, 0, n}, granted, part);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1) extend_tiles(const __grid_constant__ Args a) {
    extend_tile<1>(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1) extend_tiles_many(const __grid_constant__ Args a) {
    extend_tile<MANY>(a);
}
