// Runs a grid: blocks one after another, or each in an OS thread, as those of a cluster always do; the threads of a
// block as fibers of one OS thread.
// Compiled without the sanitizers' instrumentation and linked to them, so that they see the kernels only.
#include <link.h>
#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cuda_host.h"

#ifdef CUDA_HOST_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
extern "C" __attribute__((weak, visibility("hidden"))) char __start_cuda_shared[], __stop_cuda_shared[];
constexpr bool DIRECT = false;  // ASan wants the bounds of the stack that a switch leads to: here only two kinds
#else
constexpr bool DIRECT = true;
#endif
#ifdef CUDA_HOST_TSAN
#include <sanitizer/tsan_interface.h>
constexpr bool TSAN = true;
// TSan has room for 8,128, but each takes 0.8 MB, and the work grows with the square of their number.
constexpr unsigned MOST_FIBERS = 4096, MOST_IN_A_GRID = 3072;
#else
constexpr bool TSAN = false;
constexpr unsigned MOST_FIBERS = ~0u, MOST_IN_A_GRID = ~0u;
static void* __tsan_get_current_fiber() { return nullptr; }
static void* __tsan_create_fiber(unsigned) { return nullptr; }
static void __tsan_destroy_fiber(void*) {}
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

#ifdef CUDA_HOST_TSAN
// A volatile access orders nothing but is no data race: to TSan it is a relaxed atomic one.
#define VOLATILE(bytes, bits)                                                                         \
    extern "C" uint##bits##_t __tsan_atomic##bits##_load(const volatile void* p, int order);          \
    extern "C" uint##bits##_t __tsan_atomic##bits##_fetch_or(volatile void* p, uint##bits##_t x, int order); \
    extern "C" void __tsan_volatile_read##bytes(void* p) { __tsan_atomic##bits##_load(p, __ATOMIC_RELAXED); } \
    extern "C" void __tsan_volatile_write##bytes(void* p) {                                           \
        __tsan_atomic##bits##_fetch_or(p, 0, __ATOMIC_RELAXED);                                       \
    }
VOLATILE(1, 8)
VOLATILE(2, 16)
VOLATILE(4, 32)
VOLATILE(8, 64)
#endif

// void cuda_host_switch(void** from, void* to): the registers that a call must keep, then the stack pointer.
extern "C" void cuda_host_switch(void** from, void* to);
asm(R"(
    .text
    .globl cuda_host_switch
    .hidden cuda_host_switch
    .type cuda_host_switch, @function
cuda_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size cuda_host_switch, .-cuda_host_switch
)");

namespace cuda_host {

__thread Here* here;

namespace {

#define INLINED __attribute__((always_inline)) inline
constexpr unsigned PAGE_BYTES = 4096;
constexpr size_t STACK_BYTES = 256 << 10;  // generous, for the sanitizers' reports; only what is touched costs
constexpr unsigned char GARBAGE = 0xb5;
constexpr uint64_t GARBAGE_WORD = 0xb5b5b5b5b5b5b5b5;

const char* const OP_NAMES[] = {
    "__cluster_barrier_wait", "__syncthreads", "__syncthreads_or", "__syncthreads_and", "__syncthreads_count", "__syncwarp", "__shfl_sync",
    "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync", "__ballot_sync", "__any_sync", "__all_sync",
    "__match_any_sync", "__match_all_sync", "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync",
};

enum Order { ASCENDING, DESCENDING, RANDOM };

struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15 + 0x2545f4914f6cdd1d) {
        for (int i = 0; i < 4; ++i) below(2);
    }
    unsigned below(unsigned n) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<unsigned>(((state >> 32) * n) >> 32);
    }
};

struct Call {
    Op op;
    Site site;
    bool operator==(const Call& c) const {
        return op == c.op && site.line() == c.site.line() && site.column() == c.site.column() &&
               (site.file_name() == c.site.file_name() || !strcmp(site.file_name(), c.site.file_name()));
    }
    std::string text() const {
        return std::string(OP_NAMES[static_cast<int>(op)]) + " at " + site.file_name() + ":" +
               std::to_string(site.line());
    }
};

// A warp collective that some of the lanes in its mask have reached.
struct Open {
    Call call;
    unsigned mask, arrived, number;
};

struct Fiber;

struct Warp {
    Fiber* lanes;
    unsigned alive, ready;  // masks
    Open open[32];
    unsigned open_count, begun;
    char order[64];  // addresses that stand for the moments at which lanes met
};

struct Barrier {
    Call call;
    unsigned first, arrived, count;
    int any, all, result[2];
    unsigned phase;
    char order[2];  // two, so that a thread ahead does not pass its later work to one that still leaves
};

struct Block;

struct Fiber : Here {
    void* stack_pointer;
    char* stack;
    void* fake_stack;
    void* tsan;
    Block* block_state;
    Warp* warp;
    unsigned lane;
    bool done;
    // what it waits in
    Call call;
    unsigned mask;
    uint64_t value, result;
    unsigned argument;
    int width;
};

// Where the blocks of a cluster wait for each other.
struct Meeting {
    std::mutex mutex;
    std::condition_variable changed;
    unsigned members = 0, waiting = 0, phase = 0;
    bool over = false;
    char order[2];

    void wait_for_all() {
        std::unique_lock<std::mutex> lock(mutex);
        if (++waiting >= members) return open();
        const unsigned before = phase;
        changed.wait(lock, [&] { return over || phase != before; });
    }

    void leave() {  // whoever has returned is not waited for
        std::lock_guard<std::mutex> lock(mutex);
        members -= 1;
        if (waiting && waiting >= members) open();
    }

    void give_up() {
        std::lock_guard<std::mutex> lock(mutex);
        over = true;
        changed.notify_all();
    }

  private:
    void open() {
        waiting = 0;
        phase += 1;
        changed.notify_all();
    }
};

struct Launch {
    const Kernel* kernel;
    const void* args;
    unsigned grid, block;
    Order order;
    uint64_t seed;
    std::atomic<bool> failed;
    std::mutex mutex;
    std::string error;
    Meeting cluster;

    void fail(const std::string& why) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (!failed) error = std::string("kernel ") + kernel->name + ": " + why;
            failed = true;
        }
        cluster.give_up();
    }
};

[[noreturn]] void fiber_main();

// One OS thread's place to run blocks in, with the fibers of the largest block so far.
struct Block {
    Launch* launch;
    unsigned index, threads, finished;
    bool failed;
    Random random{0};
    std::vector<std::unique_ptr<Fiber[]>> chunks;
    std::vector<Warp> warps;
    Barrier barrier;
    void* stack_pointer;
    void* fake_stack;
    const void* stack_bottom;
    size_t stack_size;
    void* tsan;
    char begin_order, end_order, fence_order;
    char* shared;  // an address in this OS thread's __shared__ variables, the same in each
    unsigned cluster_phase;

    Block() = default;
    Block(const Block&) = delete;
    ~Block() {
        for (unsigned i = 0; i < chunks.size() * 32; ++i) {
            __tsan_destroy_fiber(fiber(i).tsan);
            munmap(fiber(i).stack - PAGE_BYTES, STACK_BYTES + PAGE_BYTES);
        }
    }

    Fiber& fiber(unsigned i) { return chunks[i / 32][i % 32]; }

    void grow(unsigned n) {
        while (chunks.size() * 32 < n) {
            const unsigned first = chunks.size() * 32;
            chunks.emplace_back(new Fiber[32]());
            for (unsigned i = first; i < first + 32; ++i) make(i);
        }
        if (warps.size() * 32 < n) warps.resize((n + 31) / 32);
    }

    void make(unsigned i) {
        Fiber& f = fiber(i);
        void* stack = mmap(nullptr, STACK_BYTES + PAGE_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack, PAGE_BYTES, PROT_NONE)) {
            perror("cuda_host: no memory for a fiber's stack");
            abort();
        }
        f.stack = static_cast<char*>(stack) + PAGE_BYTES;
        f.block_state = this;
        f.lane = i % 32;
        prepare(f, i);
    }

    // An entry into fiber_main on an empty stack. Tops are staggered, or all stacks would share the same cache sets.
    void prepare(Fiber& f, unsigned i) {
#ifdef CUDA_HOST_ASAN
        __asan_unpoison_memory_region(f.stack, STACK_BYTES);
#endif
        void** top = reinterpret_cast<void**>(f.stack + STACK_BYTES - 64 - i * 192 % PAGE_BYTES);
        *--top = nullptr;  // the entry's return address: none
        *--top = reinterpret_cast<void*>(fiber_main);
        for (int k = 0; k < 6; ++k) *--top = nullptr;
        f.stack_pointer = top;
        f.fake_stack = nullptr;
        if (f.tsan) __tsan_destroy_fiber(f.tsan);
        f.tsan = __tsan_create_fiber(0);
    }

    void run(Launch& l, unsigned block_index) {
        launch = &l;
        index = block_index;
        threads = l.block;
        finished = 0;
        failed = false;
        random = Random(l.seed + block_index * 1000003ull);
        tsan = __tsan_get_current_fiber();
        grow(threads);
        fill_shared();
        shared = reinterpret_cast<char*>(&here);
        cluster_phase = 0;
        barrier.count = threads;
        barrier.arrived = barrier.phase = 0;
        barrier.any = 0;
        barrier.all = 1;
        for (unsigned w = 0; w * 32 < threads; ++w) begin_warp(w);
        __tsan_release(&begin_order);
        while (finished < threads && !failed)
            if (!sweep()) report_deadlock();
        if (failed) abandon();
        if (l.kernel->cluster) l.cluster.leave();
        __tsan_acquire(&end_order);
    }

    // What the fibers did until they got stuck comes before whatever the caller does next.
    void abandon() {
        for (unsigned i = 0; i < threads; ++i) {
            Fiber& f = fiber(i);
            if (f.done) continue;
            __tsan_switch_to_fiber(f.tsan, 1);
            __tsan_release(&end_order);
            __tsan_switch_to_fiber(tsan, 1);
            prepare(f, i);
        }
    }

    void begin_warp(unsigned w) {
        Warp& warp = warps[w];
        const unsigned lanes = threads - w * 32 < 32 ? threads - w * 32 : 32;
        warp.lanes = chunks[w].get();
        warp.alive = warp.ready = lanes == 32 ? ~0u : (1u << lanes) - 1;
        warp.open_count = warp.begun = 0;
        for (unsigned k = 0; k < lanes; ++k) {
            Fiber& f = warp.lanes[k];
            f.thread = {w * 32 + k, 0, 0};
            f.block = {index, 0, 0};
            f.block_dim = {threads, 1, 1};
            f.grid_dim = {launch->grid, 1, 1};
            f.warp = &warp;
            f.done = false;
        }
    }

    static void fill_shared();

    // Each order is one of priorities, so that a warp runs as far as it can before another one does: what lacks a
    // barrier then shows. False if nothing could run.
    bool sweep() {
        const unsigned n = (threads + 31) / 32;
        if (launch->order == RANDOM) return sweep_random(n);
        bool ran = false;
        for (unsigned i = 0; i < n && !failed; ++i) {
            Warp& w = warps[launch->order == ASCENDING ? i : n - 1 - i];
            while (w.ready && !failed) {
                ran = true;
                resume(w, next_lane(w));
            }
        }
        return ran;
    }

    bool sweep_random(unsigned n) {
        const unsigned start = random.below(n);
        for (unsigned i = 0; i < n; ++i) {
            Warp& w = warps[start + i < n ? start + i : start + i - n];
            if (!w.ready) continue;
            for (unsigned steps = 1 + random.below(64); steps && w.ready && !failed; --steps) {
                const unsigned turn = random.below(32);
                const unsigned turned = w.ready >> turn | w.ready << ((32 - turn) & 31);
                resume(w, (__builtin_ctz(turned) + turn) & 31);
            }
            return true;
        }
        return false;
    }

    unsigned next_lane(const Warp& w) const {
        return launch->order == ASCENDING ? __builtin_ctz(w.ready) : 31 - __builtin_clz(w.ready);
    }

    void resume(Warp& w, unsigned lane) {
        Fiber& f = w.lanes[lane];
        w.ready &= ~(1u << lane);
        here = &f;
#ifdef CUDA_HOST_ASAN
        __sanitizer_start_switch_fiber(&fake_stack, f.stack, STACK_BYTES);
#endif
        __tsan_switch_to_fiber(f.tsan, 1);  // 1: a switch orders nothing
        cuda_host_switch(&stack_pointer, f.stack_pointer);
#ifdef CUDA_HOST_ASAN
        __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
    }

    INLINED void leave(Fiber& f) {
        Warp& w = *f.warp;
        if (DIRECT && w.ready && launch->order != RANDOM && !failed) {  // what the sweep would do next
            Fiber& next = w.lanes[next_lane(w)];
            w.ready &= ~(1u << next.lane);
            here = &next;
            __tsan_switch_to_fiber(next.tsan, 1);
            cuda_host_switch(&f.stack_pointer, next.stack_pointer);
            return;
        }
#ifdef CUDA_HOST_ASAN
        __sanitizer_start_switch_fiber(&f.fake_stack, stack_bottom, stack_size);
#endif
        __tsan_switch_to_fiber(tsan, 1);
        cuda_host_switch(&f.stack_pointer, stack_pointer);
#ifdef CUDA_HOST_ASAN
        __sanitizer_finish_switch_fiber(f.fake_stack, &stack_bottom, &stack_size);
#endif
    }

    void fail(const std::string& why) {
        failed = true;
        launch->fail("block " + std::to_string(index) + ": " + why);
    }

    [[noreturn]] void fail_in(Fiber& f, const std::string& why) {
        fail("thread " + std::to_string(f.thread.x) + ": " + why);
        leave(f);
        __builtin_unreachable();
    }

    void open_barrier() {
        Barrier& b = barrier;
        if (b.call.op == Op::CLUSTER_WAIT) {
            launch->cluster.wait_for_all();
            cluster_phase += 1;
            if (launch->failed) failed = true;
        }
        const unsigned phase = b.phase++;
        b.result[phase & 1] = b.call.op == Op::SYNCTHREADS_OR    ? b.any
                              : b.call.op == Op::SYNCTHREADS_AND ? b.all
                                                                 : static_cast<int>(b.count);
        b.arrived = b.count = 0;
        b.any = 0;
        b.all = 1;
        for (unsigned w = 0; w * 32 < threads; ++w) warps[w].ready |= warps[w].alive;
    }

    INLINED int arrive(Fiber& f, Call call, bool predicate) {
        Barrier& b = barrier;
        if (b.arrived == 0) {
            b.call = call;
            b.first = f.thread.x;
            b.count = 0;
        } else if (!(b.call == call)) {
            fail_in(f, "divergent barrier: it reached " + call.text() + " while thread " + std::to_string(b.first) +
                           " waits in " + b.call.text());
        }
        b.arrived += 1;
        b.count += predicate;
        b.any |= predicate;
        b.all &= predicate;
        const unsigned phase = b.phase & 1, met = cluster_phase & 1;
        const bool of_cluster = call.op == Op::CLUSTER_WAIT;
        if (!of_cluster) __tsan_release(&b.order[phase]);
        f.call = call;
        f.mask = 0;
        if (b.arrived + finished == threads) {
            open_barrier();
            f.warp->ready &= ~(1u << f.lane);
            if (failed) {  // another block of the cluster did
                leave(f);
                __builtin_unreachable();
            }
        } else {
            leave(f);
        }
        __tsan_acquire(of_cluster ? &launch->cluster.order[met] : &b.order[phase]);
        return b.result[phase];
    }

    INLINED uint64_t meet(Fiber& f, Call call, unsigned mask, uint64_t value, unsigned argument, int width) {
        Warp& w = *f.warp;
        if (!(mask >> f.lane & 1)) fail_in(f, call.text() + ": its own lane is not in the mask");
        if (width < 1 || width > 32 || (width & (width - 1))) fail_in(f, call.text() + ": width is no power of two");
        Open* open = w.open;
        while (open < w.open + w.open_count && open->mask != mask) ++open;
        if (open == w.open + w.open_count) {
            *open = {call, mask, 0, w.begun++ % 64};
            w.open_count += 1;
        } else if (!(open->call == call)) {
            const unsigned other = w.lanes[__builtin_ctz(open->arrived)].thread.x;
            fail_in(f, "divergent warp: it reached " + call.text() + " while thread " + std::to_string(other) +
                           " waits in " + open->call.text());
        }
        open->arrived |= 1u << f.lane;
        f.call = call;
        f.mask = mask;
        f.value = value;
        f.argument = argument;
        f.width = width;
        void* const moment = &w.order[open->number];
        if (call.op == Op::SYNCWARP) __tsan_release(moment);
        if (mask & w.alive & ~open->arrived) {
            leave(f);
        } else {
            finish(w, *open);
            w.ready &= ~(1u << f.lane);
        }
        if (call.op == Op::SYNCWARP) __tsan_acquire(moment);  // votes and shuffles order no memory
        return f.result;
    }

    static void finish(Warp& w, Open& open) {
        uint64_t sum = 0;
        const unsigned arrived = open.arrived;
        for (unsigned rest = arrived; rest; rest &= rest - 1) {
            Fiber& f = w.lanes[__builtin_ctz(rest)];
            sum = rest == arrived ? first_of(open.call.op, f) : join(open.call.op, sum, f);
        }
        for (unsigned rest = arrived; rest; rest &= rest - 1) {
            Fiber& f = w.lanes[__builtin_ctz(rest)];
            f.result = result_for(w, open.call.op, f, arrived, sum);
        }
        w.ready |= arrived;
        open = w.open[--w.open_count];
    }

    static uint64_t first_of(Op op, const Fiber& f) { return op == Op::BALLOT ? f.value << f.lane : f.value; }

    static uint64_t join(Op op, uint64_t sum, const Fiber& f) {
        const int64_t x = static_cast<int64_t>(f.value), y = static_cast<int64_t>(sum);
        switch (op) {
            case Op::BALLOT: return sum | f.value << f.lane;
            case Op::ANY:
            case Op::REDUCE_OR: return sum | f.value;
            case Op::ALL:
            case Op::REDUCE_AND: return sum & f.value;
            case Op::REDUCE_XOR: return sum ^ f.value;
            case Op::REDUCE_ADD: return sum + f.value;
            case Op::REDUCE_MIN: return x < y ? x : y;
            case Op::REDUCE_MAX: return x > y ? x : y;
            default: return sum;
        }
    }

    static uint64_t result_for(const Warp& w, Op op, const Fiber& f, unsigned arrived, uint64_t sum) {
        const unsigned first = f.lane & ~(f.width - 1u), last = first + f.width - 1;
        unsigned same = 0, from = f.lane;
        switch (op) {
            case Op::MATCH_ANY:
            case Op::MATCH_ALL:
                for (unsigned rest = arrived; rest; rest &= rest - 1)
                    if (w.lanes[__builtin_ctz(rest)].value == f.value) same |= rest & -rest;
                return op == Op::MATCH_ANY || same == arrived ? same : 0;
            case Op::SHFL: from = first + (f.argument & (f.width - 1u)); break;
            case Op::SHFL_UP:
                if (f.argument <= f.lane - first) from = f.lane - f.argument;
                break;
            case Op::SHFL_DOWN:
                if (f.argument <= last - f.lane) from = f.lane + f.argument;
                break;
            case Op::SHFL_XOR:
                if ((f.lane ^ f.argument) <= last) from = f.lane ^ f.argument;
                break;
            default: return sum;
        }
        return arrived >> from & 1 ? w.lanes[from].value : GARBAGE_WORD;
    }

    // A thread that has returned counts as arrived wherever the others wait for it.
    void exit_thread(Fiber& f) {
        Warp& w = *f.warp;
        f.done = true;
        finished += 1;
        w.alive &= ~(1u << f.lane);
        for (unsigned i = 0; i < w.open_count;)
            if (w.open[i].mask & w.alive & ~w.open[i].arrived)
                ++i;
            else
                finish(w, w.open[i]);
        if (barrier.arrived && barrier.arrived + finished == threads) open_barrier();
    }

    void report_deadlock() {
        std::string why = "deadlock:";
        std::vector<bool> told(threads);
        for (unsigned i = 0; i < threads; ++i) {
            const Fiber& f = fiber(i);
            if (f.done || told[i]) continue;
            unsigned count = 0;
            for (unsigned j = i; j < threads; ++j) {
                const Fiber& g = fiber(j);
                if (g.done || !(g.call == f.call) || g.mask != f.mask || (f.mask && g.warp != f.warp)) continue;
                told[j] = true;
                ++count;
            }
            char mask[32] = "";
            if (f.mask) snprintf(mask, sizeof mask, " with mask 0x%08x", f.mask);
            why += (why.back() == ':' ? " " : "; ") + std::to_string(count) + " threads, the first is " +
                   std::to_string(i) + ", wait in " + f.call.text() + mask;
            if (why.size() > 2000) break;
        }
        fail(why);
    }
};

#ifdef CUDA_HOST_ASAN
void Block::fill_shared() {
    for (volatile char* p = __start_cuda_shared; p < __stop_cuda_shared; ++p) *p = static_cast<char>(GARBAGE);
}
#else
struct Tls {
    ptrdiff_t from_here = 0;
    size_t size = 0;
};

// This library's thread-local block, relative to `here`, which lies in it.
int find_tls(dl_phdr_info* info, size_t, void* out) {
    const char* const mine = reinterpret_cast<const char*>(&here);
    const char* const data = static_cast<const char*>(info->dlpi_tls_data);
    for (int i = 0; i < info->dlpi_phnum && data; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type != PT_TLS || mine < data || mine >= data + header.p_memsz) continue;
        *static_cast<Tls*>(out) = {data - mine, header.p_memsz};
        return 1;
    }
    return 0;
}

// All thread-local storage of this library is __shared__ variables, but for `here`.
void Block::fill_shared() {
    static const Tls tls = [] {
        Tls found;
        here = nullptr;
        dl_iterate_phdr(find_tls, &found);
        return found;
    }();
    here = nullptr;
    memset(reinterpret_cast<char*>(&here) + tls.from_here, GARBAGE, tls.size);
    here = nullptr;
}
#endif

// Not inlined, these two: a fiber that runs again may do so in another OS thread, where `here` has another address.
__attribute__((noinline)) Fiber& self() { return *static_cast<Fiber*>(here); }

__attribute__((noinline)) void end_thread(Fiber& f) {
    f.block_state->exit_thread(f);
    f.block_state->leave(f);
}

void fiber_main() {
    Fiber& f = self();
    Block& b = *f.block_state;
#ifdef CUDA_HOST_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &b.stack_bottom, &b.stack_size);
#endif
    for (;;) {
        __tsan_acquire(&b.begin_order);
        b.launch->kernel->invoke(b.launch->args);
        __tsan_release(&b.end_order);
        end_thread(f);
    }
}

char fence_order;
auto& places = *new std::vector<std::unique_ptr<Block>>;  // never destroyed: the process's end is quicker
std::mutex launching;
std::string last_error;

std::vector<unsigned> block_order(const Launch& l) {
    std::vector<unsigned> order(l.grid);
    std::iota(order.begin(), order.end(), 0u);
    if (l.order == DESCENDING) std::iota(order.rbegin(), order.rend(), 0u);
    Random random(l.seed);
    for (unsigned i = l.grid; l.order == RANDOM && i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    return order;
}

unsigned fibers(unsigned block) { return (block + 31) / 32 * 32; }

void make_places(unsigned count, unsigned block) {
    unsigned sum = count * fibers(block);
    for (unsigned i = 0; i < places.size(); ++i) {
        const unsigned had = places[i]->chunks.size() * 32;
        sum += i >= count ? had : had > fibers(block) ? had - fibers(block) : 0;
    }
    if (sum > MOST_FIBERS) places.clear();
    while (places.size() < count) places.emplace_back(new Block());
}

// TSan gets an OS thread and fibers of its own for each block: only what the program orders is in order then.
void run_grid(Launch& l, bool concurrent) {
    const bool cluster = l.kernel->cluster;
    l.cluster.members = l.grid;
    const unsigned workers = !concurrent && !cluster ? 1 : TSAN || cluster || l.grid < 4 ? l.grid : 4;
    make_places(workers, l.block);
    const std::vector<unsigned> order = block_order(l);
    std::atomic<unsigned> arrived{0};
    auto work = [&](unsigned worker) {
        arrived += 1;
        while (arrived < workers) std::this_thread::yield();
        for (unsigned i = worker; i < l.grid && !l.failed; i += workers)
            places[worker]->run(l, cluster ? worker : order[i]);
    };
    if (workers == 1) return work(0);
    std::vector<std::thread> threads;
    for (unsigned w = 0; w < workers; ++w) threads.emplace_back(work, w);
    for (auto& t : threads) t.join();
}

std::string launch(const char* name, unsigned grid, unsigned block, const void* args, size_t args_size, int order,
                   uint64_t seed, bool concurrent) {
    const Kernel* kernel = kernels;
    while (kernel < kernels + kernel_count && strcmp(kernel->name, name)) ++kernel;
    if (kernel == kernels + kernel_count) return std::string("no kernel named ") + name;
    const std::string who = std::string("kernel ") + name + ": ";
    if (args_size != kernel->args_size)
        return who + "its arguments have " + std::to_string(kernel->args_size) + " bytes, not " +
               std::to_string(args_size);
    if (grid < 1 || block < 1) return who + "an empty grid or block";
    if (block > kernel->max_threads)
        return who + "too many threads: " + std::to_string(block) + " a block, bound " +
               std::to_string(kernel->max_threads);
    if (kernel->cluster && grid > kernel->cluster)
        return who + "one cluster is all that can be run here: " + std::to_string(kernel->cluster) + " blocks";
    if (kernel->cluster && grid > 1 && !DIRECT)
        return who + "an ASan build has one copy of each __shared__ variable: no cluster but one of one block";
    if (TSAN && static_cast<uint64_t>(grid) * fibers(block) > MOST_IN_A_GRID)
        return who + "too many threads for ThreadSanitizer: the whole grid may have " +
               std::to_string(MOST_IN_A_GRID);
    Launch l{kernel, args, grid, block, static_cast<Order>(order), seed, {}, {}, {}, {}};
    run_grid(l, concurrent || TSAN);
    return l.error;
}

}  // namespace

int barrier(Op op, bool predicate, Site site) {
    Fiber& f = self();
    return f.block_state->arrive(f, {op, site}, predicate);
}

uint64_t collective(Op op, unsigned mask, uint64_t value, unsigned argument, int width, Site site) {
    Fiber& f = self();
    return f.block_state->meet(f, {op, site}, mask, value, argument, width);
}

// A fence passes on all that earlier fences have: more than the hardware promises, but a missing one shows.
void fence(bool whole_device) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    char* const order = whole_device ? &fence_order : &self().block_state->fence_order;
    __tsan_acquire(order);
    __tsan_release(order);
}

void cluster_arrive(bool release) {
    Block& b = *self().block_state;
    if (release) __tsan_release(&b.launch->cluster.order[b.cluster_phase & 1]);
}

void* cluster_map(const void* p, unsigned rank, Site site) {
    Block& b = *self().block_state;
    if (rank >= b.launch->grid) stop("__cluster_map_shared_rank of a block that is not there", site);
    return places[rank]->shared + (static_cast<const char*>(p) - b.shared);
}

void stop(const char* why, Site site) {
    Fiber& f = self();
    f.block_state->fail_in(f, std::string(why) + " at " + site.file_name() + ":" + std::to_string(site.line()));
}

}  // namespace cuda_host

extern "C" __attribute__((visibility("default"))) const char* cuda_host_launch(
    const char* name, unsigned grid, unsigned block, const void* args, size_t args_size, int order, uint64_t seed,
    int concurrent) {
    std::lock_guard<std::mutex> lock(cuda_host::launching);
    cuda_host::last_error =
        cuda_host::launch(name, grid, block, args, args_size, order, seed, concurrent != 0);
    return cuda_host::last_error.empty() ? nullptr : cuda_host::last_error.c_str();
}
