// What the kernels of allocations share. An allocation plans (validates, scans, decides all or nothing, commits), then
// writes slots: in one launch, by one block (`small`), by a cluster of them or by any number (`tiles`), or in two.
#pragma once
#include "common.cuh"

constexpr int WRITE_THREADS = 256;

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

// The breach of one request, or BREACH_NONE; `carry_on` where the classic kernels' behaviour harms nobody.
__device__ __forceinline__ int breach_of(const Args& a, i64 num_pages, const Request& r, bool& carry_on) {
    carry_on = false;
    if (r.padding) return BREACH_NONE;
    if (a.table && !row_in_table(a, r.row)) return BREACH_ROW;
    if (!lengths_hold(r.prefix, r.seq)) return BREACH_LENGTH;
    if (a.table && !columns_in_table(a, r.seq)) return BREACH_COLUMN;
    const i64 tokens = old_page_tokens(a, r);
    if (tokens == 0) return BREACH_NONE;
    const i64 page = r.last < 0 ? 0 : div_page(a, r.last);
    if (!is_page(page, num_pages)) return BREACH_RANGE;
    const int owners = a.ref_count[page];
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
    post_word(a, lane, word, op, lane != NUM_PAGES);  // which other blocks may be reading
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
    u32 fetched;

    __device__ __forceinline__ int at(const Args& a, u32 rank) const {
        return rank < fetched ? pages[rank] : a.free_ring[ring_position(a, first + rank)];
    }

    // The first slot of that page; where the caller writes it, its owner is counted.
    __device__ __forceinline__ i64 slot(const Args& a, u32 rank, bool writes_first) const {
        const int page = at(a, rank);
        if (writes_first) a.ref_count[page] = 1;
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

    // The last request that begins at or before a token: the whole warp looks at once, since a search by halves would be
    // a chain of loads.
    __device__ __forceinline__ u32 request_of_warp(u32 token) const {
        u32 first = 0, left = count;
        while (left > 1) {
            const u32 share = (left + 31) >> 5, at = share * (threadIdx.x & 31);
            const u32 begun = __ballot_sync(FULL_WARP, at < left && static_cast<u32>(begins[first + at]) <= token);
            const u32 skipped = share * (__popc(begun) - 1);  // request `first` has always begun
            first += skipped;
            left = left - skipped < share ? left - skipped : share;
        }
        return first;
    }

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
    u32 request, begin, begins_new, end, pages_before;
    i64 before_old;  // the slot of its last token, minus `begin`

    // None yet, but what is looked for is `low` or later.
    __device__ __forceinline__ explicit Run(u32 low)
        : request(low), begin(1), begins_new(1), end(0), pages_before(0), before_old(0) {}

    __device__ __forceinline__ bool has(u32 t, u32 many) const { return t >= begin && t + many <= end; }

    // The request of token t, which is most often one of the next.
    __device__ __forceinline__ void find(const Args& a, const Planned& plan, u32 t) {
        u32 i = request, step = 1;
        for (; i + step < plan.count && static_cast<u32>(plan.begins[i + step]) <= t; step *= 2) i += step;
        const u32 past = i + step < plan.count ? i + step : plan.count;
        i = request_of(plan.begins, t, i, past - 1);
        request = i;
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
    if (part.begin >= part.end) return;
    Run run(part.begin < granted ? plan.request_of_warp(part.begin) : 0);
    u32 room, next;
    for (u32 t = part.begin + many * (threadIdx.x & 31); t < part.end; t += 32 * many) {
        if (!run.has(t, many) && t < granted) run.find(a, plan, t);
        if (at_once && run.has(t, many)) {
            const i64 slot = run.slot(a, front, t, room, next);
            put_at_once(a, t, slot, room, room < many ? front.slot(a, next, true) - room : 0);
            continue;
        }
        for (u32 k = t; k < t + many && k < part.end; ++k) {
            if (k < granted && !run.has(k, 1)) run.find(a, plan, k);
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
    return __atomic_fetch_add(ticket, value, __ATOMIC_ACQ_REL);
#endif
}

// Counts a block that has read the words, two of which it gives as proof: a number made of them can not be sent before
// they are there. No fence, as nothing is handed over: the last block may then store what the others have read. How many
// were counted before.
__device__ __forceinline__ u32 count_reader(const Args& a, i64 head, i64 free) {
    u64* ticket = reinterpret_cast<u64*>(&a.words[TICKET]);
    const u64 one = 1 + (static_cast<u64>(head | free) >> 63);  // neither is negative
#ifdef __CUDA_ARCH__
    u64 before;
    asm volatile("atom.add.relaxed.gpu.u64 %0, [%1], %2;" : "=l"(before) : "l"(ticket), "l"(one) : "memory");
    return static_cast<u32>(before);
#else
    return static_cast<u32>(take_ticket(ticket, one));  // C++ knows no order by what a number is made of
#endif
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
#endif
