// What takes two launches: plans by several blocks, the slots of any plan, and whole pages.
#include "alloc.cuh"

// What a block finds out about its share of the batch, one request a thread.
struct Share {
    i64 pages_before, tokens_before;  // of the whole batch's requests before this thread's
    i64 pages, tokens;                // sums of the block's share
};

// The share that begins at request `base`. Lengths of all requests before it are read again: up to tens of thousands
// that costs less than waiting for other blocks.
__device__ __forceinline__ Share plan_share(const Args& a, i64 num_pages, i64 base, Breaches& breaches) {
    __shared__ i64 carry[2][32], carry_earlier[2][32];
    begin_breaches(breaches);
    const i64 i = base + threadIdx.x;
    Request r = {0, 0, -1, 0, true};
    if (i < a.n) r = load_request(a, i);
    i64 earlier_pages = 0, earlier_tokens = 0;
#pragma unroll 2
    for (i64 j = threadIdx.x; j < base; j += PLAN_THREADS) {
        const Request q = load_lengths(a, j);
        earlier_pages += new_pages(a, q);
        earlier_tokens += new_tokens(q);
    }
    // a table's last slots are found already
    const bool fine = is_fine<false>(a, num_pages, r) &&
                      (!a.table || r.padding || (row_in_table(a, r.row) && columns_in_table(a, r.seq)));
    Share share;
    share.pages_before = new_pages(a, r);
    share.tokens_before = new_tokens(r);
    block_exclusive(share.pages_before, share.tokens_before, carry, share.pages, share.tokens);
    if (base > 0) {
        i64 pages, tokens;
        block_exclusive(earlier_pages, earlier_tokens, carry_earlier, pages, tokens);
        share.pages_before += pages;
        share.tokens_before += tokens;
    }
    if (!fine) find_breach(a, num_pages, i, breaches);
    if (i < a.n) {
        a.plan_pages[i] = static_cast<int>(share.pages_before);
        a.plan_tokens[i] = static_cast<int>(share.tokens_before);
    }
    return share;
}

// What the last block to come finds: its own breaches and the other blocks'. False in all blocks before; what they
// wrote and read is then behind the last.
__device__ __forceinline__ bool last_block(const Args& a, Breaches& breaches) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 mine = 1;
        if (breaches.first != NO_BREACH) {
            mine += 1ULL << 32;
            atomicMin(&a.words[BREACH], breaches.first);
            if (breaches.refused) add_word(a, PLAN_REFUSED, 1);
        }
        const u64 before = take_ticket(reinterpret_cast<u64*>(&a.words[TICKET]), mine);
        last = static_cast<u32>(before) + 1 == gridDim.x;
        if (last && (before + mine) >> 32) breaches = {word_now(a, BREACH), word_now(a, PLAN_REFUSED) != 0};
    }
    __syncthreads();
    return last;
}

// A block for each 1,024 requests; the last one to add its sums decides for all.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_requests(const __grid_constant__ Args a) {
    __shared__ Breaches breaches;
    const Before b = load_before(a);
    Share share = plan_share(a, b.num_pages, static_cast<i64>(blockIdx.x) * PLAN_THREADS, breaches);
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) {
            add_word(a, PLAN_PAGES, share.pages);
            add_word(a, PLAN_TOKENS, share.tokens);
        }
        if (!last_block(a, breaches)) return;
    } else {
        __syncthreads();
    }
    if (word_lane() < 0) return;
    if (gridDim.x > 1) {
        share.pages = word_now(a, PLAN_PAGES);
        share.tokens = word_now(a, PLAN_TOKENS);
    }
    const Outcome o = outcome_of(a, b.free, share.pages, share.tokens, breaches.first, breaches.refused);
    commit(a, b, o, share.pages, share.tokens);
    if (word_lane() == 0) a.plan_tokens[a.n] = static_cast<int>(share.tokens);
}

// Last request that begins at or before `token`: all threads of the block look at once, each at the end of its share
// of what is left, since a binary search would be a chain of loads.
__device__ __forceinline__ u32 request_of_block(const Args& a, u32 token) {
    u32 low = 0, count = static_cast<u32>(a.n);
    while (count > 1) {
        const u32 share = (count + blockDim.x - 1) / blockDim.x, at = share * threadIdx.x;
        const int begun = __syncthreads_count(at < count && static_cast<u32>(a.plan_tokens[low + at]) <= token);
        const u32 skipped = share * (begun - 1);  // request `low` has always begun
        low += skipped;
        count = count - skipped < share ? count - skipped : share;
    }
    return low;
}

// What a plan in global memory has granted.
struct Granted {
    Front front;
    u32 tokens;
};

__device__ __forceinline__ Granted load_granted(const Args& a) {
    const i64 first = a.words[FIRST], tokens = a.words[TOKENS], ok = a.words[OK];
    return {{static_cast<u32>(first), nullptr, 0}, ok ? static_cast<u32>(tokens) : 0};
}

// Requests of a tile of the output that are looked up in shared memory: `low` and later ones, for `begin` and later
// tokens.
constexpr int TILE_REQUESTS = 2 * WRITE_THREADS;

struct Tile {
    u32 low, count;
    bool all;  // the batch ends with them

    __device__ __forceinline__ Tile(const Args& a, u32 begin, u32 granted) : low(0) {
        const u32 n = static_cast<u32>(a.n);
        if (n > TILE_REQUESTS && begin < granted) low = request_of_block(a, begin);
        all = n - low <= TILE_REQUESTS;
        count = all ? n - low : TILE_REQUESTS;
    }
};

__device__ __forceinline__ Planned all_planned(const Args& a) {
    return {a.plan_tokens, a.plan_pages, nullptr, 0, static_cast<u32>(a.n)};
}

// Tokens of a batch of which a tile's requests are only a part.
__device__ __noinline__ void write_far_tokens(const Args& a, const Granted& granted, u32 begin, u32 end) {
    const Part part = part_of(a, begin, end, threadIdx.x >> 5, WRITE_THREADS >> 5);
    write_tokens(a, granted.front, all_planned(a), granted.tokens, part);
}

// A tile of the output a block, so that one long request is spread over the whole GPU.
extern "C" __global__ void __launch_bounds__(WRITE_THREADS) write_slots(const __grid_constant__ Args a) {
    __shared__ int begins[TILE_REQUESTS + 1], pages_before[TILE_REQUESTS];
    __shared__ u32 rooms[TILE_REQUESTS];
    const u32 num_tokens = static_cast<u32>(a.num_tokens), quads = (num_tokens + 3) / 4;
    const u32 size = 4 * ((quads + gridDim.x - 1) / gridDim.x), begin = blockIdx.x * size;
    if (begin >= num_tokens) return;
    const u32 end = num_tokens - begin < size ? num_tokens : begin + size;
    const Granted granted = load_granted(a);
    const Tile tile(a, begin, granted.tokens);
    const Planned all = all_planned(a);
    for (u32 i = threadIdx.x; i <= tile.count; i += WRITE_THREADS) {
        begins[i] = a.plan_tokens[tile.low + i];
        if (i == tile.count) break;
        pages_before[i] = a.plan_pages[tile.low + i];
        rooms[i] = all.room(a, tile.low + i);
    }
    __syncthreads();
    const Planned plan = {begins, pages_before, rooms, tile.low, tile.count};
    u32 known = end;  // whatever lies behind what is granted, no request needs to be looked up for
    if (!tile.all && begin < granted.tokens && static_cast<u32>(begins[tile.count]) < end)
        known = begins[tile.count] & ~3u;
    const Part part = part_of(a, begin, known, threadIdx.x >> 5, WRITE_THREADS >> 5);
    write_tokens(a, granted.front, plan, granted.tokens, part);
    if (known < end) write_far_tokens(a, granted, known, end);
}

// The same for steps, which write a table, and for decodes: a token a thread.
extern "C" __global__ void __launch_bounds__(WRITE_THREADS) write_step(const __grid_constant__ Args a) {
    __shared__ int begins[TILE_REQUESTS];
    const u32 begin = blockIdx.x * WRITE_THREADS, token = begin + threadIdx.x;
    const Granted granted = load_granted(a);
    const bool one_each = one_token_each(a);
    u32 i = token;
    if (!one_each) {
        const Tile tile(a, begin, granted.tokens);
        for (u32 k = threadIdx.x; k < tile.count; k += WRITE_THREADS) begins[k] = a.plan_tokens[tile.low + k];
        __syncthreads();
        i = request_of(begins, token, 0u, tile.count - 1) + tile.low;
        if (!tile.all && i == tile.low + tile.count - 1)
            i = request_of(a.plan_tokens, token, i, static_cast<u32>(a.n) - 1);
    }
    if (token >= a.num_tokens) return;
    if (token >= granted.tokens) {
        put_slot(a, token, a.refused_slot);
        return;
    }
    const Request r = load_request(a, i);
    const i64 j = one_each ? 0 : token - a.plan_tokens[i];
    write_token(a, token, r, j, r.padding ? 0 : slot_of(a, r, granted.front, a.plan_pages[i], j));
}

// Whole pages for `alloc`: n pages, num_tokens = n * page_size slots.
extern "C" __global__ void __launch_bounds__(32) plan_pages(const __grid_constant__ Args a) {
    const Before b = load_before(a);
    commit(a, b, outcome_of(a, b.free, a.n, a.num_tokens, NO_BREACH, false), a.n, a.num_tokens);
}

// Slot t of whole pages that begin at ring position `first`; more than 2**31 of them are fine.
__device__ __forceinline__ void write_page_slot(const Args& a, i64 first, i64 t) {
    const i64 nth = div_page(a, t), offset = t - nth * a.page_size;
    const int page = a.free_ring[ring_position(a, first + nth)];
    if (offset == 0) a.ref_count[page] = 1;
    put_slot(a, t, static_cast<i64>(page) * a.page_size + offset);
}

extern "C" __global__ void __launch_bounds__(WRITE_THREADS) write_pages(const __grid_constant__ Args a) {
    const i64 t = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (t >= a.num_tokens) return;
    if (a.words[OK])
        write_page_slot(a, a.words[FIRST], t);
    else
        put_slot(a, t, a.refused_slot);
}

// Few pages: one block, one launch.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) alloc_pages_small(const __grid_constant__ Args a) {
    const Before b = load_before(a);
    const Outcome o = outcome_of(a, b.free, a.n, a.num_tokens, NO_BREACH, false);
    __syncthreads();  // all have read the words
    commit(a, b, o, a.n, a.num_tokens);
#pragma unroll 4
    for (i64 t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
        if (o.status == STATUS_OK)
            write_page_slot(a, b.head, t);
        else
            put_slot(a, t, a.refused_slot);
    }
}
