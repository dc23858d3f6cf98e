// Decodes: a token for each request, in one launch.
#include "alloc.cuh"

// A decode's request from its entries; the last slot of one with a table is not looked up.
template <bool TABLE>
__device__ __forceinline__ Request decode_request(const Args& a, i64 seq, i64 entry) {
    Request r = {seq - (seq > -INT32_LARGEST), seq, entry, entry, false};
    if (TABLE) {
        r.padding = entry == a.pad_row;
        r.prefix = r.padding ? 0 : seq;
        r.seq = r.padding ? 1 : seq < INT32_LARGEST + 1LL ? seq + 1 : seq;
        r.last = -1;
    }
    return r;
}

// Whether a decode's request begins a page, whatever else is wrong with it: a quiet launch tells of a short pool first.
__device__ __forceinline__ bool begins_page(const Args& a, const Request& r) {
    return !r.padding && lengths_hold(r.prefix, r.seq) && offset_of(a, r.prefix) == 0;
}

// Writes a decode's slot: at the begin of `page`, where the request takes one.
template <bool TABLE>
__device__ __forceinline__ void write_decoded(
    const Args& a, const Outcome& o, const Request& r, i64 i, bool takes, int page
) {
    i64 slot = r.last + 1;
    if (o.status != STATUS_OK) {
        slot = a.refused_slot;
    } else if (TABLE && r.padding) {
        slot = 0;
    } else {
        if (takes) {
            a.ref_count[page] = 1;
            slot = static_cast<i64>(page) * a.page_size;
        }
        if (TABLE) write_cell(a, r, r.prefix, slot);
    }
    put_slot(a, i, slot);
}

// Decode by one block, a request a thread.
template <bool TABLE>
__device__ __forceinline__ void decode(const Args& a) {
    __shared__ int pages[PLAN_THREADS], takers[32];
    __shared__ Breaches breaches;
    const int i = threadIdx.x, lane = i & 31, warp = i >> 5, warps = blockDim.x >> 5;
    const bool mine = i < a.n;

    // All that needs no answer is asked for first, without a branch: the batch is not empty.
    const i64 at = mine ? i : 0;
    const i64 seq = a.seq.given(at), entry = TABLE ? a.rows.given(at) : a.last.given(at);
    const Before b = load_before(a);
    begin_breaches(breaches);
    const int fetched = blockDim.x < a.capacity ? blockDim.x : a.capacity;
    int front = 0;
    if (i < fetched) front = a.free_ring[ring_position(a, b.head + i)];

    Request r = decode_request<TABLE>(a, seq, entry);
    const bool fine = is_fine<TABLE>(a, b.num_pages, r) || !mine;
    const bool takes = mine && begins_page(a, r);
    const u32 taking = __ballot_sync(FULL_WARP, takes);
    if (lane == 0) takers[warp] = __popc(taking);
    if (i < fetched) pages[i] = front;
    const bool odd = __syncthreads_or(!fine);

    const int here = lane < warps ? takers[lane] : 0;
    const i64 total = warp_sum(here);
    const int before = __popc(taking & ((1u << lane) - 1)) + warp_sum(lane < warp ? here : 0);
    if (odd) {
        if (!fine) find_breach(a, b.num_pages, i, breaches);
        __syncthreads();
    }
    const Outcome o = outcome_of(a, b.free, total, a.n, breaches.first, breaches.refused);
    if (odd) __syncthreads();  // all have read the offending value, before `out`, which may be last_loc, is written
    commit(a, b, o, total, a.n);
    if (mine) write_decoded<TABLE>(a, o, r, i, takes, takes ? pages[before] : 0);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) decode_small(const __grid_constant__ Args a) {
    decode<false>(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) decode_step_small(const __grid_constant__ Args a) {
    decode<true>(a);
}

#ifdef CLUSTERS
constexpr int MOST_ROUNDS = 8;  // requests a thread
constexpr int ODD = 1 << 30;

// Decode by a cluster, which is the whole grid: each block has a share of the batch, thread after thread, round after
// round, and tells the others how many pages it takes and whether it found a breach.
template <bool TABLE>
__device__ __forceinline__ void decode_in_cluster(const Args& a) {
    __shared__ int takers[32 * MOST_ROUNDS];
    __shared__ Exchange exchange;
    __shared__ Breaches breaches;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const u32 n = static_cast<u32>(a.n), rank = blockIdx.x, share = (n + gridDim.x - 1) / gridDim.x;
    const u32 base = share * rank, end = base + share < n ? base + share : n;

    exchange.begin();
    begin_breaches(breaches);
    const Before b = load_before(a);
    bool fine = true;
    u32 taken = 0;  // a bit for each of the thread's requests
    int rounds = 0;
    Request r;
#pragma unroll 2
    for (u32 first = base; first < end; first += blockDim.x, ++rounds) {
        const bool mine = first + threadIdx.x < end;
        const i64 at = mine ? first + threadIdx.x : base;
        r = decode_request<TABLE>(a, a.seq.given(at), TABLE ? a.rows.given(at) : a.last.given(at));
        fine = (is_fine<TABLE>(a, b.num_pages, r) || !mine) && fine;
        const bool takes = mine && begins_page(a, r);
        taken |= static_cast<u32>(takes) << rounds;
        const u32 taking = __ballot_sync(FULL_WARP, takes);
        if (lane == 0) takers[rounds * warps + warp] = __popc(taking);
    }
    exchange.open();
    const bool odd = __syncthreads_or(!fine);
    if (warp == 0) {
        int sum = 0;
        for (int k = lane; k < rounds * warps; k += 32) sum += takers[k];
        exchange.tell(warp_sum(sum) | (odd ? ODD : 0));
    }
    exchange.hear();

    const int theirs = lane < gridDim.x ? exchange.told[lane] : 0, takes_there = theirs & (ODD - 1);
    const i64 total = warp_sum(takes_there);
    u32 before = warp_sum(lane < rank ? takes_there : 0);
    const bool trouble = __any_sync(FULL_WARP, theirs & ODD);
    Breaches found = {NO_BREACH, 0};
    if (trouble) found = breaches_in_cluster(a, b.num_pages, base, end, fine, breaches);
    const Outcome o = outcome_of(a, b.free, total, n, found.first, found.refused);
    if (trouble) cluster_sync();  // all have read the offending value, before `out`, which may be last_loc, is written
    if (rank == gridDim.x - 1) commit(a, b, o, total, n);

    const int last_round = rounds - 1;
    rounds = 0;
    for (u32 first = base; first < end; first += blockDim.x, ++rounds) {
        const u32 i = first + threadIdx.x;
        const bool takes = taken >> rounds & 1;
        const u32 taking = __ballot_sync(FULL_WARP, takes);
        const int here = lane < warps ? takers[rounds * warps + lane] : 0;
        const u32 mine = before + warp_sum(lane < warp ? here : 0) + __popc(taking & ((1u << lane) - 1));
        before += warp_sum(here);
        if (i >= end) continue;
        Request q = r;  // of the last round
        if (rounds < last_round) {
            q = decode_request<TABLE>(a, a.seq.given(i), TABLE ? a.rows.given(i) : a.last.given(i));
            if (TABLE && o.status == STATUS_OK && !takes && !q.padding) q.last = last_in_table(a, q.row, q.prefix);
        }
        const bool granted = takes && o.status == STATUS_OK;
        write_decoded<TABLE>(a, o, q, i, takes, granted ? a.free_ring[ring_position(a, b.head + mine)] : 0);
    }
}

extern "C" __global__ void __cluster_dims__(MOST_BLOCKS, 1, 1) __launch_bounds__(PLAN_THREADS)
    decode_cluster(const __grid_constant__ Args a) {
    decode_in_cluster<false>(a);
}

extern "C" __global__ void __cluster_dims__(MOST_BLOCKS, 1, 1) __launch_bounds__(PLAN_THREADS)
    decode_step_cluster(const __grid_constant__ Args a) {
    decode_in_cluster<true>(a);
}
#endif
