// Allocation: one block plans (validates, scans, decides all or nothing, commits), a second kernel writes slots.
#include "common.cuh"

struct Request {
    i64 prefix, seq, last;
};

__device__ __forceinline__ Request load_request(const Args& a, i64 i) {
    Request r;
    r.seq = a.seq.at(i);
    r.prefix = a.kind == KIND_DECODE ? r.seq - (r.seq > -INT32_LARGEST) : a.prefix.at(i);
    r.last = a.last.at(i);
    return r;
}

// Room left in the request's last page that this op writes.
__device__ __forceinline__ i64 old_page_tokens(const Args& a, const Request& r) {
    const i64 room_ends = up_pages(a, r.prefix) * a.page_size;
    return (r.seq < room_ends ? r.seq : room_ends) - r.prefix;
}

// The breach of one request, or BREACH_NONE; `carry_on` where the classic kernels' behaviour harms nobody.
__device__ __forceinline__ int breach_of(const Args& a, const Request& r, bool& carry_on) {
    carry_on = false;
    if (r.prefix < 0 || r.seq < r.prefix || r.seq > INT32_LARGEST) return BREACH_LENGTH;
    const i64 tokens = old_page_tokens(a, r);
    if (tokens == 0) return BREACH_NONE;
    if (r.last < 0) return BREACH_RANGE;
    const i64 page = div_page(a, r.last);
    if (!is_page(a, page)) return BREACH_RANGE;
    const i64 next = r.last + 1 - page * a.page_size;
    const int owners = a.ref_count[page];
    if (owners == 0) return BREACH_FREE_PAGE;
    if (owners > 1) return BREACH_SHARED_PAGE;
    const i64 offset = r.prefix - div_page(a, r.prefix) * a.page_size;
    if (next != offset) {
        carry_on = !a.strict && next + tokens <= a.page_size;
        return BREACH_MISALIGNED;
    }
    return BREACH_NONE;
}

__device__ __forceinline__ i64 breach_value(const Request& r, int breach) {
    return breach == BREACH_LENGTH ? r.seq : r.last;
}

// Thread 0 decides: all or nothing. The whole plan's sums come in; nothing has been written yet but scratch.
__device__ __forceinline__ bool decide(const Args& a, i64 pages, i64 tokens, i64 first_breach, bool refused) {
    i64* w = a.words;
    begin_op(a);
    int status = STATUS_OK;
    if (first_breach != NO_BREACH) {
        const i64 index = first_breach >> 8;
        const int breach = static_cast<int>(first_breach & 255);
        record(a, breach, index, breach_value(load_request(a, index), breach));
        if (refused) status = STATUS_REFUSED;
    }
    if (status == STATUS_OK && tokens != a.num_tokens) {
        record(a, BREACH_SUM, WHOLE_BATCH, tokens);
        if (a.strict || tokens > a.num_tokens) status = STATUS_REFUSED;
    }
    if (status == STATUS_OK && pages > w[FREE]) {
        if (!a.quiet) record(a, BREACH_SHORT, WHOLE_BATCH, pages);
        status = STATUS_SHORT;
    }
    if (status == STATUS_OK) {
        take_pages(a, pages);
        w[TOKENS] = tokens;
        w[RET] = (pages << 32) | tokens;
    } else {
        w[REFUSALS] += 1;
        if (status == STATUS_REFUSED || !a.quiet) w[RET] = 0;
    }
    end_op(a, status);
    return status == STATUS_OK;
}

// Plans the batch in one block; returns whether it was granted. With at most ITEMS requests a thread, `pages_before`
// holds the new pages of the requests before each of this thread's.
template <int ITEMS>
__device__ __forceinline__ bool plan(const Args& a, i64 (&pages_before)[ITEMS]) {
    __shared__ i64 page_carry[2][32], token_carry[2][32], first_breach;
    __shared__ int refused, granted;
    if (threadIdx.x == 0) {
        first_breach = NO_BREACH;
        refused = 0;
    }
    __syncthreads();
    i64 pages_done = 0, tokens_done = 0;
    int turn = 0;
    for (i64 base = 0; base < a.n; base += static_cast<i64>(blockDim.x) * ITEMS, turn ^= 1) {
        const i64 first = base + static_cast<i64>(threadIdx.x) * ITEMS;
        Request r[ITEMS];
#pragma unroll
        for (int j = 0; j < ITEMS; ++j)
            if (first + j < a.n) r[j] = load_request(a, first + j);
        i64 pages[ITEMS], tokens[ITEMS], my_pages = 0, my_tokens = 0;
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            pages[j] = tokens[j] = 0;
            if (first + j >= a.n) continue;
            bool carry_on;
            const int breach = breach_of(a, r[j], carry_on);
            if (breach != BREACH_NONE) {
                atomicMin(&first_breach, ((first + j) << 8) | breach);
                if (!carry_on) atomicExch(&refused, 1);
            }
            if (breach != BREACH_LENGTH) {
                pages[j] = up_pages(a, r[j].seq) - up_pages(a, r[j].prefix);
                tokens[j] = r[j].seq - r[j].prefix;
            }
            my_pages += pages[j];
            my_tokens += tokens[j];
        }
        i64 pages_sum, tokens_sum;
        i64 page_at = pages_done + block_exclusive(my_pages, page_carry[turn], pages_sum);
        i64 token_at = tokens_done + block_exclusive(my_tokens, token_carry[turn], tokens_sum);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            pages_before[j] = page_at;
            if (first + j < a.n) {
                a.plan_pages[first + j] = static_cast<int>(page_at);
                a.plan_tokens[first + j] = static_cast<int>(token_at);
            }
            page_at += pages[j];
            token_at += tokens[j];
        }
        pages_done += pages_sum;
        tokens_done += tokens_sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) granted = decide(a, pages_done, tokens_done, first_breach, refused);
    __syncthreads();
    return granted;
}

// The slot of token j of a request whose new pages start at `pages_before` in this op's share of the ring.
__device__ __forceinline__ i64 slot_of(const Args& a, const Request& r, i64 pages_before, i64 j) {
    const i64 old_tokens = old_page_tokens(a, r);
    if (j < old_tokens) return r.last + 1 + j;
    const i64 k = j - old_tokens;
    const i64 nth = div_page(a, k);
    const i64 offset = k - nth * a.page_size;
    const int page = a.free_ring[ring_position(a, a.words[FIRST] + pages_before + nth)];
    if (offset == 0) a.ref_count[page] = 1;
    return static_cast<i64>(page) * a.page_size + offset;
}

// Up to 1,024 decode requests: plan and write in the same block, one request a thread.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) decode_small(const Args a) {
    i64 pages_before[1];
    const bool granted = plan<1>(a, pages_before);
    const i64 i = threadIdx.x;
    if (i < a.n) put_slot(a, i, granted ? slot_of(a, load_request(a, i), pages_before[0], 0) : a.refused_slot);
    if (threadIdx.x < 32) post(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_requests(const Args a) {
    if (a.n <= PLAN_THREADS) {
        i64 pages_before[1];
        plan<1>(a, pages_before);
    } else {
        i64 pages_before[4];
        plan<4>(a, pages_before);
    }
    if (threadIdx.x < 32) post(a);
}

// Last request in [low, high] whose first token is not after `token`; requests without tokens lie before it.
__device__ __forceinline__ i64 request_of(const Args& a, i64 token, i64 low, i64 high) {
    while (low < high) {
        const i64 middle = (low + high + 1) >> 1;
        if (a.plan_tokens[middle] <= token)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// A tile of the output a block, so that one long request is spread over the whole GPU.
extern "C" __global__ void __launch_bounds__(256) write_slots(const Args a) {
    __shared__ i64 low, high;
    const i64 begin = static_cast<i64>(blockIdx.x) * blockDim.x;
    const i64 granted = a.words[OK] ? a.words[TOKENS] : 0;
    const i64 end = begin + blockDim.x < granted ? begin + blockDim.x : granted;
    if (begin < end) {
        if (threadIdx.x == 0) low = request_of(a, begin, 0, a.n - 1);
        if (threadIdx.x == 32) high = request_of(a, end - 1, 0, a.n - 1);
    }
    __syncthreads();
    const i64 token = begin + threadIdx.x;
    if (token >= a.num_tokens) return;
    if (token >= granted) {
        put_slot(a, token, a.refused_slot);
        return;
    }
    const i64 i = request_of(a, token, low, high);
    put_slot(a, token, slot_of(a, load_request(a, i), a.plan_pages[i], token - a.plan_tokens[i]));
}

// Whole pages for `alloc`: n pages, num_tokens = n * page_size slots.
extern "C" __global__ void __launch_bounds__(32) plan_pages(const Args a) {
    if (threadIdx.x == 0) decide(a, a.n, a.num_tokens, NO_BREACH, false);
    post(a);
}

extern "C" __global__ void __launch_bounds__(256) write_pages(const Args a) {
    const i64 token = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (token >= a.num_tokens) return;
    const Request whole = {0, a.num_tokens, -1};
    put_slot(a, token, a.words[OK] ? slot_of(a, whole, 0, token) : a.refused_slot);
}
