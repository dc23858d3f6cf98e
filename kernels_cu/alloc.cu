// Allocation: plan (validate, scan, decide all or nothing, commit), then write slots. Decodes and small extends do both
// in one launch; for the others a second kernel writes, so that no block commits what another still reads.
#include "common.cuh"

constexpr int WRITE_THREADS = 256;
constexpr int SCAN_REQUESTS = 4096;  // that `extend_at_once` can plan

struct Request {
    i64 prefix, seq, last, row;
    bool padding;
};

// Slot of a request's last cached token as its table tells it; the caller has checked row and columns.
__device__ __forceinline__ i64 last_in_table(const Args& a, i64 row, i64 prefix) {
    const i64 cell = a.table[row * a.table_stride + cell_of(a, prefix - 1)];
    if (!a.table_pages || cell < 0) return cell;
    return cell * a.page_size + offset_of(a, prefix - 1);
}

__device__ __forceinline__ bool one_token_each(const Args& a) {
    return a.kind == KIND_DECODE || a.kind == KIND_DECODE_STEP;
}

// A request from its entries, `entry` being its row where there is a table, else its last slot.
__device__ __forceinline__ Request make_request(const Args& a, i64 prefix, i64 seq, i64 entry) {
    Request r = {prefix, seq, entry, 0, false};
    if (a.kind == KIND_DECODE)
        r.prefix = seq - (seq > -INT32_LARGEST);
    else if (a.kind == KIND_DECODE_STEP)
        r.prefix = seq, r.seq += seq < INT32_LARGEST + 1LL;
    if (!a.table) return r;
    r.last = -1;
    r.row = entry;
    r.padding = r.row == a.pad_row;
    if (r.padding) {
        // whatever its lengths say: no pages, and as many tokens as they leave room for in the output
        i64 tokens = r.seq - r.prefix;
        if (!lengths_hold(r.prefix, r.seq)) tokens = a.kind == KIND_DECODE_STEP;
        r.prefix = 0;
        r.seq = tokens;
    }
    return r;
}

// A request's lengths and row; its last slot is not looked up.
__device__ __forceinline__ Request load_lengths(const Args& a, i64 i) {
    const i64 prefix = one_token_each(a) ? 0 : a.prefix.at(i), seq = a.seq.at(i);
    return make_request(a, prefix, seq, a.table ? a.rows.at(i) : -1);
}

// All entries are asked for before any is looked at.
__device__ __forceinline__ Request load_request(const Args& a, i64 i) {
    const i64 prefix = one_token_each(a) ? 0 : a.prefix.at(i), seq = a.seq.at(i);
    Request r = make_request(a, prefix, seq, a.table ? a.rows.at(i) : a.last.at(i));
    if (a.table && !r.padding && row_in_table(a, r.row) && lengths_hold(r.prefix, r.seq) &&
        columns_in_table(a, r.seq) && r.prefix > 0 && r.seq > r.prefix)
        r.last = last_in_table(a, r.row, r.prefix);
    return r;
}

__device__ __forceinline__ i64 new_pages(const Args& a, const Request& r) {
    return r.padding || !lengths_hold(r.prefix, r.seq) ? 0 : up_pages(a, r.seq) - up_pages(a, r.prefix);
}

__device__ __forceinline__ i64 new_tokens(const Request& r) {
    return lengths_hold(r.prefix, r.seq) ? r.seq - r.prefix : 0;
}

// Room left in the request's last page that this op writes.
__device__ __forceinline__ i64 old_page_tokens(const Args& a, const Request& r) {
    const i64 room_ends = up_pages(a, r.prefix) * a.page_size;
    return (r.seq < room_ends ? r.seq : room_ends) - r.prefix;
}

// The breach of one request, or BREACH_NONE; `carry_on` where the classic kernels' behaviour harms nobody. The owners
// of its last page are asked for at once, before it is clear that they matter.
__device__ __forceinline__ int breach_of(const Args& a, i64 num_pages, const Request& r, bool& carry_on) {
    carry_on = false;
    const i64 page = r.last < 0 ? 0 : div_page(a, r.last);
    const bool owned_page = is_page(page, num_pages);
    const int owners = owned_page ? a.ref_count[page] : 0;
    if (r.padding) return BREACH_NONE;
    if (a.table && !row_in_table(a, r.row)) return BREACH_ROW;
    if (!lengths_hold(r.prefix, r.seq)) return BREACH_LENGTH;
    if (a.table && !columns_in_table(a, r.seq)) return BREACH_COLUMN;
    const i64 tokens = old_page_tokens(a, r);
    if (tokens == 0) return BREACH_NONE;
    if (!owned_page) return BREACH_RANGE;
    const i64 next = r.last + 1 - page * a.page_size;
    if (owners == 1 && next == offset_of(a, r.prefix)) return BREACH_NONE;
    if (owners == 0) return BREACH_FREE_PAGE;
    if (owners > 1) return BREACH_SHARED_PAGE;
    carry_on = !a.strict && next + tokens <= a.page_size;
    return BREACH_MISALIGNED;
}

// Whether a request has no breach, without a word about which: what every request pays. Finds its last slot in its
// table row, if it has one, and asks for that page's owners before it is clear that they matter.
template <bool TABLE>
__device__ __forceinline__ bool is_fine(const Args& a, i64 num_pages, Request& r) {
    const bool holds = lengths_hold(r.prefix, r.seq);
    bool reachable = true;
    if (TABLE) {
        reachable = holds && row_in_table(a, r.row) && columns_in_table(a, r.seq);
        if (!r.padding && reachable && r.prefix > 0 && r.seq > r.prefix) r.last = last_in_table(a, r.row, r.prefix);
    }
    const i64 page = r.last < 0 ? 0 : div_page(a, r.last);
    int owners = 0;
    if (is_page(page, num_pages)) owners = a.ref_count[page];
    if (r.padding) return true;
    if (!holds || !reachable) return false;
    const u32 offset = offset_of(a, r.prefix);
    return offset == 0 || r.seq == r.prefix || (owners == 1 && r.last + 1 - page * a.page_size == offset);
}

__device__ __forceinline__ i64 breach_value(const Request& r, int breach) {
    if (breach == BREACH_ROW) return r.row;
    return breach == BREACH_LENGTH || breach == BREACH_COLUMN ? r.seq : r.last;
}

// What a plan comes to. `breach` is recorded, whatever the status.
struct Outcome {
    int status, breach;
    i64 index, value;
};

// Of a plan that did not simply go well. Not inlined: what is seldom needed must not be fetched.
__device__ __noinline__ Outcome outcome_in_trouble(
    const Args& a, i64 free, i64 pages, i64 tokens, i64 first_breach, bool refused
) {
    Outcome o = {STATUS_OK, BREACH_NONE, WHOLE_BATCH, 0};
    if (a.quiet && pages > free) {
        o.status = STATUS_SHORT;  // told as None, whatever else is wrong
        return o;
    }
    if (first_breach != NO_BREACH) {
        o.index = first_breach >> 8;
        o.breach = static_cast<int>(first_breach & 255);
        o.value = breach_value(load_request(a, o.index), o.breach);
        if (refused) o.status = STATUS_REFUSED;
    }
    if (o.status == STATUS_OK && tokens != a.num_tokens) {
        if (o.breach == BREACH_NONE) o.breach = BREACH_SUM, o.value = tokens;
        if (a.strict || tokens > a.num_tokens) o.status = STATUS_REFUSED;
    }
    if (o.status == STATUS_OK && pages > free) {
        if (o.breach == BREACH_NONE) o.breach = BREACH_SHORT, o.value = pages;
        o.status = STATUS_SHORT;
    }
    return o;
}

// All or nothing: from the whole plan's sums, before any state has changed.
__device__ __forceinline__ Outcome outcome_of(
    const Args& a, i64 free, i64 pages, i64 tokens, i64 first_breach, bool refused
) {
    if (first_breach != NO_BREACH || tokens != a.num_tokens || pages > free)
        return outcome_in_trouble(a, free, pages, tokens, first_breach, refused);
    return {STATUS_OK, BREACH_NONE, WHOLE_BATCH, 0};
}

// What every thread knows of the pool before an allocation. The last warp, lane L of which also holds word L, knows
// what `commit` needs.
struct Before {
    i64 head, free, num_pages, word, op, staged, error_code, error_op;
};

__device__ __forceinline__ Before load_before(const Args& a) {
    Before b = {a.words[HEAD], a.words[FREE], a.words[NUM_PAGES], 0, 0, 0, 0, 0};
    const int lane = word_lane();
    if (lane < 0) return b;
    b.op = a.words[OP];
    b.staged = a.words[STAGED];
    b.error_code = a.words[ERROR_CODE];
    b.error_op = a.words[ERROR_OP];
    if (lane < NUM_WORDS) b.word = a.words[lane];
    return b;
}

// Changes the words and posts them: the last warp, each lane its own word, since one thread would take them in turn.
__device__ __forceinline__ void commit(const Args& a, const Before& b, const Outcome& o, i64 pages, i64 tokens) {
    const int lane = word_lane();
    if (lane < 0) return;
    i64 word = b.word;
    const i64 op = b.op + 1;
    const bool told = b.error_op <= a.error_ack, free_to_record = told || b.error_code == 0;
    const bool ok = o.status == STATUS_OK;
    if (lane == OP) word = op;
    if (lane == HOST_OP && a.host_op) word = a.host_op;
    if (lane == STATUS) word = o.status;
    if (lane == OK) word = ok;
    if (lane == ERROR_CODE && told) word = 0;
    if (o.breach != BREACH_NONE && free_to_record) {
        if (lane == ERROR_CODE) word = (a.kind << 8) | o.breach;
        if (lane == ERROR_OP) word = op;
        if (lane == ERROR_INDEX) word = o.index;
        if (lane == ERROR_VALUE) word = o.value;
    }
    if (ok) {
        const i64 free = b.free - pages, owned = b.num_pages - free - b.staged;
        if (lane == FREE) word = free;
        if (lane == HEAD) word = ring_position(a, b.head + pages);
        if (lane == ALLOCATED) word += pages;
        if (lane == PEAK && owned > word) word = owned;
        if (lane == FIRST) word = b.head;
        if (lane == TOKENS) word = tokens;
        if (lane == RET) word = (pages << 32) | (tokens & 0xffffffffLL);
    } else {
        if (lane == REFUSALS) word += 1;
        if (lane == RET && (o.status == STATUS_REFUSED || !a.quiet)) word = 0;
    }
    if (lane >= NUM_WORDS) word = lane == BREACH ? NO_BREACH : 0;
    __syncwarp();  // every lane has read the words
    post_word(a, lane, word, op);
}

// The breaches of a block's requests, in shared memory.
struct Breaches {
    i64 first;  // lowest `index << 8 | breach`
    int refused;
};

__device__ __forceinline__ void begin_breaches(Breaches& breaches) {
    if (threadIdx.x == 0) breaches = {NO_BREACH, 0};
}

__device__ __forceinline__ void add_breach(Breaches& breaches, i64 i, int breach, bool carry_on) {
    atomicMin(&breaches.first, (i << 8) | breach);
    if (!carry_on) atomicExch(&breaches.refused, 1);
}

__device__ __noinline__ void find_breach(const Args& a, i64 num_pages, i64 i, Breaches& breaches) {
    bool carry_on;
    const int breach = breach_of(a, num_pages, load_request(a, i), carry_on);
    if (breach != BREACH_NONE) add_breach(breaches, i, breach, carry_on);
}

// The pages at the front that an allocation gets: in the ring from `first` on, the first `fetched` in shared memory too.
struct Front {
    u32 first;
    const int* pages;
    int fetched;
    bool take;  // count the owner of a page where its first token is written

    __device__ __forceinline__ int at(const Args& a, u32 rank) const {
        return rank < static_cast<u32>(fetched) ? pages[rank] : a.free_ring[ring_position(a, first + rank)];
    }

    // The first slot of that page; where the caller writes it, its owner is counted.
    __device__ __forceinline__ i64 slot(const Args& a, u32 rank, bool writes_first) const {
        const int page = at(a, rank);
        if (take && writes_first) a.ref_count[page] = 1;
        return static_cast<i64>(page) * a.page_size;
    }
};

struct alignas(16) TwoSlots {
    i64 x, y;
};

struct alignas(16) FourSlots {
    int x, y, z, w;
};

// Tokens whose slots fill 16 bytes: what a thread stores at once, next to its neighbours' lanes, since a store of less
// than 32 bytes in one place costs as much as one of 32.
__device__ __forceinline__ u32 tokens_at_once(const Args& a) { return a.wide_out ? 2 : 4; }

// Slots s, s + 1 and so on, of which those from `room` on lie at `next`, to the output from t on.
__device__ __forceinline__ void put_at_once(const Args& a, u32 t, i64 s, u32 room, i64 next) {
    if (a.wide_out) {
        *reinterpret_cast<TwoSlots*>(reinterpret_cast<i64*>(a.out) + t) = {s, room > 1 ? s + 1 : next + 1};
        return;
    }
    int slots[4];
#pragma unroll
    for (u32 k = 0; k < 4; ++k) slots[k] = static_cast<int>((k < room ? s : next) + k);
    *reinterpret_cast<FourSlots*>(reinterpret_cast<int*>(a.out) + t) = {slots[0], slots[1], slots[2], slots[3]};
}

// The plan of requests `low` to `low + count - 1` of a batch without a table. Their tokens end where `begins[count]`
// says.
struct Planned {
    const int *begins, *pages_before;
    const u32* rooms;  // null: from the lengths
    u32 low, count;

    // Tokens that its last page had room for.
    __device__ __forceinline__ u32 room(const Args& a, u32 i) const {
        if (rooms) return rooms[i];
        const u32 used = offset_of(a, a.prefix.given(low + i));
        return used == 0 ? 0 : static_cast<u32>(a.page_size) - used;
    }
};

// A warp's part of the tokens from `begin` to `end`: rows that lie together, so that few of its tokens are another
// request's than the ones before. It takes a division: best asked for while something else is on its way.
struct Part {
    u32 begin, end;
};

__device__ __forceinline__ Part part_of(const Args& a, u32 begin, u32 end, u32 warp, u32 warps) {
    const u32 row = 32 * tokens_at_once(a), rows = (end - begin + row - 1) / row;
    const u64 chunk = row * ((rows + warps - 1) / warps), from = begin + chunk * warp;
    if (from >= end) return {end, end};
    return {static_cast<u32>(from), from + chunk < end ? static_cast<u32>(from + chunk) : end};
}

// A request of a plan while its tokens are written.
struct Run {
    u32 begin, begins_new, end, pages_before;
    i64 before_old;  // the slot of its last token, minus `begin`

    __device__ __forceinline__ Run() : begin(1), begins_new(1), end(0), pages_before(0), before_old(0) {}

    __device__ __forceinline__ bool has(u32 t, u32 many) const { return t >= begin && t + many <= end; }

    __device__ __forceinline__ void take(const Args& a, const Planned& plan, u32 i) {
        begin = plan.begins[i];
        end = plan.begins[i + 1];
        begins_new = begin + plan.room(a, i);
        pages_before = plan.pages_before[i];
        if (begins_new > begin) before_old = a.last.given(plan.low + i) - begin;
    }

    // The slot of token t, how many from there on lie in its page, and the rank of the page that comes then.
    __device__ __forceinline__ i64 slot(const Args& a, const Front& front, u32 t, u32& room, u32& next) const {
        if (t < begins_new) {
            room = begins_new - t;
            next = pages_before;
            return before_old + t + 1;
        }
        const u32 nth = full_pages(a, t - begins_new), offset = t - begins_new - nth * static_cast<u32>(a.page_size);
        room = static_cast<u32>(a.page_size) - offset;
        next = pages_before + nth + 1;
        return front.slot(a, next - 1, offset == 0) + offset;
    }
};

// Slots of a part of the tokens, which begins at a multiple of 4, and `refused_slot` for those that are not granted.
__device__ __forceinline__ void write_tokens(
    const Args& a, const Front& front, const Planned& plan, u32 granted, const Part& part
) {
    const u32 many = tokens_at_once(a);
    // at most two pages' slots are stored at once
    const bool at_once = static_cast<u32>(a.page_size) + 1 >= many && !(reinterpret_cast<u64>(a.out) & 15);
    Run run;
    u32 room, next;
    for (u32 t = part.begin + many * (threadIdx.x & 31); t < part.end; t += 32 * many) {
        if (!run.has(t, many) && t < granted) run.take(a, plan, request_of(plan.begins, t, 0u, plan.count - 1));
        if (at_once && run.has(t, many)) {
            const i64 first = run.slot(a, front, t, room, next);
            put_at_once(a, t, first, room, room < many ? front.slot(a, next, true) - room : 0);
            continue;
        }
        for (u32 k = t; k < t + many && k < part.end; ++k) {
            if (k < granted && !run.has(k, 1)) run.take(a, plan, request_of(plan.begins, k, 0u, plan.count - 1));
            put_slot(a, k, k < granted ? run.slot(a, front, k, room, next) : a.refused_slot);
        }
    }
}

// The slot of token j of a request.
__device__ __forceinline__ i64 slot_of(const Args& a, const Request& r, const Front& front, i64 pages_before, i64 j) {
    const i64 old_tokens = old_page_tokens(a, r);
    if (j < old_tokens) return r.last + 1 + j;
    const i64 k = j - old_tokens, offset = offset_of(a, k);
    return front.slot(a, static_cast<u32>(pages_before) + full_pages(a, k), offset == 0) + offset;
}

// Writes a token's slot, or the page that it begins, to the request's table row.
__device__ __forceinline__ void write_cell(const Args& a, const Request& r, i64 token, i64 slot) {
    int* cell = a.table + r.row * a.table_stride + cell_of(a, token);
    if (!a.table_pages)
        *cell = static_cast<int>(slot);
    else if (offset_of(a, token) == 0)
        *cell = static_cast<int>(div_page(a, slot));
}

// Writes token j of a request to the output, and to its table row where it has one.
__device__ __forceinline__ void write_token(const Args& a, i64 at, const Request& r, i64 j, i64 slot) {
    if (r.padding) {
        put_slot(a, at, 0);
        return;
    }
    put_slot(a, at, slot);
    if (a.table) write_cell(a, r, r.prefix + j, slot);
}

__device__ __forceinline__ void add_word(const Args& a, int word, i64 value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&a.words[word]), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ i64 word_now(const Args& a, int word) { return static_cast<volatile i64*>(a.words)[word]; }

// Adds to a counter of the whole device: what this thread knows of is before it for all who add later.
__device__ __forceinline__ u64 take_ticket(u64* ticket, u64 value) {
#ifdef __CUDA_ARCH__
    u64 before;
    asm volatile("atom.add.acq_rel.gpu.u64 %0, [%1], %2;" : "=l"(before) : "l"(ticket), "l"(value) : "memory");
    return before;
#else
    __threadfence();
    const u64 before = atomicAdd(ticket, value);
    __threadfence();
    return before;
#endif
}

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
// Of a batch that blocks of a cluster validated in shares: all that they found, each thread's own being known from
// `fine`. Their shared memory may be left behind a `cluster_sync`.
__device__ __forceinline__ Breaches breaches_in_cluster(
    const Args& a, i64 num_pages, u32 base, u32 end, bool fine, Breaches& breaches
) {
    if (!fine)
        for (u32 i = base + threadIdx.x; i < end; i += blockDim.x) find_breach(a, num_pages, i, breaches);
    cluster_sync();
    Breaches found = {NO_BREACH, 0};
    for (u32 k = 0; k < gridDim.x; ++k) {
        const Breaches* other = static_cast<Breaches*>(__cluster_map_shared_rank(&breaches, k));
        if (other->first < found.first) found.first = other->first;
        found.refused |= other->refused;
    }
    return found;
}

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
    return {{static_cast<u32>(first), nullptr, 0, true}, ok ? static_cast<u32>(tokens) : 0};
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
    u32 known = end;
    if (!tile.all && static_cast<u32>(begins[tile.count]) < end) known = begins[tile.count] & ~3u;
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
