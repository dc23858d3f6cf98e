"""A small LLM engine in torch: continuous batching over a paged KV cache, in one file.

::

    python examples/torch_engine.py            on a GPU, where decode steps are CUDA graphs, or on the CPU

    waiting --admit--> prefill, a chunk a step --> decode, a token a step --> finished
       ^      shares the pages of known prefixes             |
       '-------------- retract: the pool is full ------------'

It checks itself: each answer must be that of the same model, alone with a contiguous cache, token by token.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import dataclass, field

import torch
from tiny_model import DTYPE, HEAD_DIM, KV_HEADS, LAYERS, MAX_CONTEXT, VOCAB, Model, answer_alone
from torch import Tensor

import cupaged

PAGE_SIZE, NUM_PAGES = 8, 36
MAX_REQUESTS = 6  # rows of the request table
CHUNK = 32  # tokens that one step prefills at most
BATCH_SIZES = (1, 2, 4, 6)  # a decode batch is padded to one of these; each has a graph of its own


@dataclass
class Request:
    """A prompt, and how far it is. With one token left to cache a request decodes, with more it prefills."""

    prompt: list[int]
    new_tokens: int
    tokens: list[int] = field(init=False)  # prompt and answer so far
    cached: int = 0  # tokens whose K and V are in the cache
    row: int = -1  # of the request table
    prefix: list[tuple[int, ...]] = field(default_factory=list)  # keys of its pages that the prefix cache holds
    shared: int = 0  # tokens that were cached already when it was admitted
    doing: str = "."  # in this step
    history: str = ""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def answer(self) -> list[int]:
        """What the model has said so far."""
        return self.tokens[len(self.prompt) :]


class Engine:
    """Requests in, answers out. `pool` says which slot each token gets; `table` holds the slots of each request."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device = model, device
        self.pool = cupaged.PagedTokenToKVPoolAllocator(NUM_PAGES * PAGE_SIZE, PAGE_SIZE, device=device)
        self.table = torch.zeros(MAX_REQUESTS, MAX_CONTEXT, dtype=torch.int32, device=device)
        # A page more than the pool has: page 0 is where padding is written.
        shape = (2, LAYERS, (NUM_PAGES + 1) * PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.keys, self.values = torch.zeros(shape, dtype=DTYPE, device=device)
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []  # oldest first
        self.free_rows = list(range(MAX_REQUESTS))
        # Full pages by the tokens up to their end, least recently used first. The cache is one owner of each.
        self.prefixes: dict[tuple[int, ...], Tensor] = {}
        self.decode_steps = {size: DecodeStep(self, size) for size in BATCH_SIZES}

    def run(self, requests: list[Request]) -> None:
        """Answer them all."""
        most = min(MAX_CONTEXT, NUM_PAGES * PAGE_SIZE)  # so that the oldest request, alone, always fits
        for r in requests:
            if not r.prompt or r.new_tokens < 1 or len(r.prompt) + r.new_tokens > most:
                raise ValueError(f"a request must have a prompt, an answer, and at most {most} tokens in all")
        self.waiting.extend(requests)
        while self.waiting or self.active:
            self.admit()
            self.decode()
            self.prefill()
            for request in (*self.active, *self.waiting):
                request.history, request.doing = request.history + request.doing, "."
            self.release([r for r in self.active if len(r.answer) == r.new_tokens])

    def forward(self, tokens: Tensor, positions: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Logits after new tokens, which have their slots; padding reads row 0, and nobody its logits."""
        contexts = self.table[rows.clamp(min=0)]
        return self.model(tokens, positions, PagedCache(self.keys, self.values, slots, contexts))

    # ---- one step --------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Take in waiting requests while there is a row, and room for all their tokens."""
        while self.waiting and self.free_rows:
            request = self.waiting[0]
            request.prefix = self.known_prefix(request.tokens)
            request.cached = len(request.prefix) * PAGE_SIZE
            self.active.append(request)
            if not self.make_room(pages_to_go(self.active)):
                self.active.pop()
                return
            self.waiting.popleft()
            request.row = self.free_rows.pop()
            self.share_prefix(request)

    def decode(self) -> None:
        """One token for each request that is prefilled; where pages are short, the youngest requests give way."""
        while not self.make_room(pages_to_go(batch := self.decoding())):
            self.retract(self.active[-1])
        if batch:
            step = self.decode_steps[next(size for size in BATCH_SIZES if size >= len(batch))]
            for request, token in zip(batch, step(batch), strict=False):  # padding is cut off
                request.cached += 1
                request.tokens.append(token)
                request.doing = "d"

    def decoding(self) -> list[Request]:
        """Requests with one token to cache."""
        return [r for r in self.active if len(r.tokens) - r.cached == 1]

    def prefill(self) -> None:
        """Cache the next chunk: tokens of one request, or of several."""
        batch, budget = [], CHUNK
        for request in self.active:
            end = min(len(request.tokens), request.cached + budget)
            if len(request.tokens) - request.cached > 1 and end > request.cached:
                batch.append((request, request.cached, end))
                budget -= end - request.cached
        if not batch or not self.make_room(sum(pages_for(end) - pages_for(begin) for _, begin, end in batch)):
            return  # those that decode will make room
        requests, begins, ends = zip(*batch, strict=True)
        rows, counts = [r.row for r in requests], [end - begin for _, begin, end in batch]
        slots = self.pool.extend_step(self.table, rows, begins, ends, sum(counts))
        assert slots is not None, "make_room has seen to that"
        inputs = [(r.tokens[i], i, r.row) for r, begin, end in batch for i in range(begin, end)]
        logits = self.forward(*torch.tensor(inputs, device=self.device).T, slots)
        last_of_each = torch.tensor(counts, device=self.device).cumsum(0) - 1
        for request, end, token in zip(requests, ends, logits[last_of_each].argmax(-1).tolist(), strict=True):
            request.cached, request.doing = end, "P"
            self.remember_prefix(request)
            if end == len(request.tokens):
                request.tokens.append(token)

    def retract(self, request: Request) -> None:
        """Send a request back to wait; what it has said so far is prefilled again with its prompt."""
        self.release([request])
        self.waiting.appendleft(request)
        request.doing = "x"

    def release(self, requests: list[Request]) -> None:
        """Give back pages and rows: each page loses one owner, and is free if that was its last."""
        if requests:
            self.pool.release(self.table, [r.row for r in requests], [r.cached for r in requests])
        for request in requests:
            self.active.remove(request)
            self.free_rows.append(request.row)

    def make_room(self, pages: int) -> bool:
        """Whether so many pages are free, at the cost, if need be, of prefixes that no request uses."""
        if pages * PAGE_SIZE <= self.pool.available_at_least():  # a bound: nothing is waited for
            return True
        short = pages - self.pool.available_size() // PAGE_SIZE  # exact
        in_use = {key for request in self.active for key in request.prefix}
        unused = [key for key in self.prefixes if key not in in_use]
        if short > 0 and short <= len(unused):
            self.pool.free_page_ids(torch.cat([self.prefixes.pop(key) for key in unused[:short]]))
        return short <= len(unused)

    # ---- prefixes --------------------------------------------------------------------------------------------------

    def known_prefix(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """Keys of the cached pages that these tokens begin with; one token at least is left to compute."""
        keys = []
        for key in page_keys(tokens[:-1]):
            if key not in self.prefixes:
                break
            keys.append(key)
        self.touch(keys)
        return keys

    def share_prefix(self, request: Request) -> None:
        """Make a request an owner of the pages that it shares, and put their slots into its row."""
        if request.prefix:
            pages = torch.cat([self.prefixes[key] for key in request.prefix])
            self.pool.retain(pages)
            slots = pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=self.device)
            self.table[request.row, : request.cached] = slots.flatten()
            request.shared += request.cached

    def remember_prefix(self, request: Request) -> None:
        """Let later requests share the full pages of what is prefilled."""
        request.prefix = page_keys(request.tokens[: request.cached])
        pages = self.table[request.row, : request.cached : PAGE_SIZE] // PAGE_SIZE
        new = [i for i, key in enumerate(request.prefix) if key not in self.prefixes]
        if new:
            self.pool.retain(pages[new])
            self.prefixes |= {request.prefix[i]: pages[i : i + 1] for i in new}
        self.touch(request.prefix)

    def touch(self, keys: list[tuple[int, ...]]) -> None:
        """Use pages now, the first one last: so none is older, and evicted sooner, than a page that follows it."""
        for key in reversed(keys):
            self.prefixes[key] = self.prefixes.pop(key)

    def forget_prefixes(self) -> None:
        """Give back what the prefix cache owns."""
        if self.prefixes:
            self.pool.free_page_ids(torch.cat(list(self.prefixes.values())))
            self.prefixes.clear()


@dataclass
class PagedCache:
    """K and V by slot, of all requests, shape (LAYERS, slots, KV_HEADS, HEAD_DIM), as n tokens of one step see it."""

    keys: Tensor
    values: Tensor
    slots: Tensor  # (n,): where each token is written
    contexts: Tensor  # (n, MAX_CONTEXT): slots of its request's tokens

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens and gather what each may look at; attention kernels read pages in place."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.slots], values[self.slots] = k, v
        return keys[self.contexts], values[self.contexts]


class DecodeStep:
    """A decode step at one batch size, in buffers of its own: captured once on a GPU, then replayed."""

    def __init__(self, engine: Engine, size: int) -> None:
        self.engine, self.size = engine, size
        self.padding = (engine.pool.pad_row, 0, 0)
        self.inputs = torch.tensor([self.padding] * size, device=engine.device).T.contiguous()
        self.rows, self.lengths, self.tokens = self.inputs
        self.slots, self.next_tokens = self.inputs.new_zeros(2, size)
        self.graph = None
        if engine.device.type == "cuda":
            self.compute()  # a warm-up: a batch of nothing but padding takes no page
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.compute()

    def compute(self) -> None:
        """Find slots, write the table, run the model: all in fixed buffers, so that it can be captured."""
        engine = self.engine
        granted = engine.pool.decode_step(engine.table, self.rows, self.lengths, out=self.slots)
        assert granted is not None, "make_room has seen to that"
        self.next_tokens.copy_(engine.forward(self.tokens, self.lengths, self.rows, self.slots).argmax(-1))

    def __call__(self, batch: list[Request]) -> list[int]:
        """Next token of each request, then of the padding."""
        real = [(r.row, r.cached, r.tokens[-1]) for r in batch]
        self.inputs.copy_(torch.tensor(real + [self.padding] * (self.size - len(batch))).T)
        if self.graph is None:
            self.compute()
        else:
            self.graph.replay()
            self.engine.pool.note_replay(pages_to_go(batch))  # the host cannot see what a replay takes
        return self.next_tokens.tolist()


def pages_for(tokens: int) -> int:
    """Pages that so many tokens need."""
    return -(-tokens // PAGE_SIZE)


def pages_to_go(requests: list[Request]) -> int:
    """Pages that these requests will take until all their tokens are cached."""
    return sum(pages_for(len(r.tokens)) - pages_for(r.cached) for r in requests)


def page_keys(tokens: list[int]) -> list[tuple[int, ...]]:
    """Name each full page by all tokens up to its end, since its K and V depend on all of them."""
    return [tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)]


def workload(count: int = 14) -> list[Request]:
    """Make up requests, two in three of which begin with one of two long instructions."""
    rng = random.Random(1)

    def words(n: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(n)]

    openings = [words(27), words(40), []]
    return [Request(openings[i % 3] + words(rng.randint(4, 36)), rng.randint(12, 32)) for i in range(count)]


def main() -> int:
    """Run the engine, print what it did, and compare."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # on the CPU, for so small a model, more threads only wait for each other
    model, requests = Model(device), workload()
    engine = Engine(model, device)
    engine.run(requests)
    stats = engine.pool.stats()
    engine.forget_prefixes()
    engine.pool.check()  # what only the device could see raises here
    engine.pool.check_integrity()

    steps = "CUDA graphs" if device.type == "cuda" else "eager"
    print(
        f"{NUM_PAGES} pages of {PAGE_SIZE} slots on {engine.pool.device}, by the {engine.pool.backend.name} backend"
    )
    print(f"{MAX_REQUESTS} requests at a time, decode batches padded to one of {BATCH_SIZES}: {steps}\n")
    print("request  prompt  shared  answer  equal  . waits   P prefills   d decodes   x is retracted")
    wrong, closest = 0, torch.inf
    for i, r in enumerate(requests):
        expected, lead = answer_alone(model, r.prompt, r.new_tokens, device)
        wrong, closest = wrong + (r.answer != expected), min(closest, lead)
        equal = "yes" if r.answer == expected else "NO"
        print(f"{i:7}{len(r.prompt):8}{r.shared:8}{len(r.answer):8}{equal:>7}  {r.history}")
    free = engine.pool.available_size() // PAGE_SIZE
    print(
        f"\n{stats.pages_allocated} pages handed out, {stats.peak_pages} at the peak; {free} of {NUM_PAGES} free now"
    )
    print(
        f"{sum(r.history.count('x') for r in requests)} retractions, {sum(r.shared for r in requests)} tokens shared"
    )
    print(f"{len(requests) - wrong} of {len(requests)} answers equal those of a contiguous cache, token by token")
    print(f"(the best token's logit led by {closest:.1e} where it was closest)")
    return 1 if wrong or free != NUM_PAGES else 0


if __name__ == "__main__":
    sys.exit(main())
