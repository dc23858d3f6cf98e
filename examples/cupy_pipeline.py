"""Many questions about one document, without torch: a model in array operations over a paged KV cache.

::

    python examples/cupy_pipeline.py           in CuPy where it sees a GPU, else in NumPy

    row 0   | document, 9 full pages | tail |                         computed once
    row 1   | the same 9 pages       | tail, question 0, answer 0 |   pages with one owner more, then pages of its own
    row 2   | the same 9 pages       | tail, question 1, answer 1 |
    ...

It checks itself: each answer must be that of the same model, alone with a contiguous cache, token by token.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import cupaged

PAGE_SIZE, NUM_PAGES = 16, 40  # page 0, where padding would go, is one of them
ROWS, MAX_CONTEXT = 9, 240  # of the request table: the document's row, and those of 8 questions
DOCUMENT, ANSWER = 150, 20  # tokens

VOCAB, DIM, LAYERS, HEADS, HEAD_DIM = 256, 64, 2, 4, 16
# In float64 the order of additions moves a logit by some 1e-14, far less than the lead of the best one, which is
# printed. So rounding cannot change a token, and answers can be compared.
DTYPE = np.float64
SHARPNESS = (
    4  # of the attention: with less, an answer hardly depends on one token of its context, or on one wrong slot
)


def array_library() -> tuple[Any, str]:
    """CuPy where it sees a GPU, else NumPy; and the device to give to cupaged."""
    try:
        import cupy
    except ImportError:
        return np, "cpu"
    return (cupy, "cuda") if cupy.cuda.is_available() else (np, "cpu")


# ---- the model -----------------------------------------------------------------------------------------------------


class Model:
    """A transformer with random weights and learned positions, in the operations that NumPy and CuPy share."""

    def __init__(self, xp: Any) -> None:
        rng = np.random.default_rng(0)

        def weights(rows: int, columns: int) -> Any:
            return xp.asarray(rng.standard_normal((rows, columns)).astype(DTYPE) / rows**0.5)

        self.xp = xp
        self.embedding, self.positions = (weights(n, DIM) * n**0.5 for n in (VOCAB, MAX_CONTEXT))
        self.layers = [
            (weights(DIM, 3 * DIM), weights(DIM, DIM), weights(DIM, 4 * DIM), weights(4 * DIM, DIM))
            for _ in range(LAYERS)
        ]
        self.unembedding = weights(DIM, VOCAB)

    def __call__(self, tokens: Any, positions: Any, cache: Any) -> Any:
        """Logits after each of n tokens, shape (n, VOCAB); their K and V go into the cache."""
        x = self.embedding[tokens] + self.positions[positions]
        for i, (qkv, out, up, down) in enumerate(self.layers):
            q, k, v = (norm(x) @ qkv).reshape(-1, 3, HEADS, HEAD_DIM).transpose(1, 0, 2, 3)
            x = x + self.attend(q, *cache.append(i, k, v), positions) @ out
            x = x + self.xp.maximum(norm(x) @ up, 0) @ down
        return norm(x) @ self.unembedding

    def attend(self, q: Any, keys: Any, values: Any, positions: Any) -> Any:
        """Let each token look at its request, shape (n, context, HEADS, HEAD_DIM), up to its own position."""
        xp = self.xp
        scores = xp.einsum("nhd,nchd->nhc", q, keys) * (SHARPNESS / HEAD_DIM**0.5)
        later = xp.arange(keys.shape[1]) > positions[:, None]
        scores = xp.where(later[:, None], -np.inf, scores)
        shares = xp.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return xp.einsum("nhc,nchd->nhd", shares, values).reshape(-1, DIM)


def norm(x: Any) -> Any:
    """Bring each token to a mean square of 1."""
    return x / ((x * x).mean(-1, keepdims=True) + 1e-6) ** 0.5


# ---- the pipeline --------------------------------------------------------------------------------------------------


class Pipeline:
    """One document, many questions. `kv` says which slot each token gets, and keeps the pages of each row."""

    def __init__(self, model: Model, device: str) -> None:
        self.model, self.xp = model, model.xp
        self.kv = cupaged.KVAllocator(NUM_PAGES * PAGE_SIZE, device, ROWS, MAX_CONTEXT, PAGE_SIZE)
        shape = (2, LAYERS, NUM_PAGES * PAGE_SIZE, HEADS, HEAD_DIM)
        self.keys, self.values = self.xp.zeros(shape, DTYPE)
        self.batches: list[int] = []  # questions that were answered together

    def read(self, document: list[int]) -> None:
        """Cache the document in row 0."""
        slots = self.kv.alloc(0, len(document), 0)
        if slots is None:
            raise SystemExit("the pool is too small for the document")
        self.document = document
        self.forward(np.array(document), np.arange(len(document)), np.zeros(len(document), np.int64), slots)

    def answer(self, questions: list[list[int]]) -> list[list[int]]:
        """Answer as many questions at a time as there are rows and pages for."""
        answers: list[list[int]] = []
        while len(answers) < len(questions):
            batch: list[list[int]] = []
            pages = self.kv.available_size()
            for question in questions[len(answers) : len(answers) + ROWS - 1]:
                pages -= self.own_pages(question)
                if pages < 0:
                    break
                batch.append(question)
            if not batch:
                raise SystemExit("the pool is too small for a question")
            answers += self.answer_together(batch)
            self.batches.append(len(batch))
        return answers

    def own_pages(self, question: list[int]) -> int:
        """Pages that a question takes besides those of the document; its last token is never cached."""
        tokens = len(self.document) + len(question) + ANSWER - 1
        return -(-tokens // PAGE_SIZE) - len(self.document) // PAGE_SIZE

    def answer_together(self, questions: list[list[int]]) -> list[list[int]]:
        """Decode the answers in step: one token for every question at each."""
        kv, n = self.kv, len(questions)
        rows = np.arange(1, n + 1)

        # Full pages of the document are shared. Its tail lies in a page that will be written: each has its own.
        full = len(self.document) // PAGE_SIZE
        pages = kv.req_to_page[0, :full]
        kv.retain(self.xp.tile(pages, n))  # n owners more
        kv.req_to_page[1 : n + 1, :full] = pages
        before = np.full(n, full * PAGE_SIZE)
        prompts = [self.document[full * PAGE_SIZE :] + question for question in questions]

        counts = np.array([len(prompt) for prompt in prompts])
        granted = kv.alloc_batch(rows, counts, before)
        assert granted is not None, "own_pages has seen to that"
        slots, offsets = granted
        positions = np.concatenate([np.arange(b, b + count) for b, count in zip(before, counts, strict=True)])
        logits = self.forward(np.concatenate(prompts), positions, np.repeat(rows, counts), slots)
        steps = [logits[self.xp.asarray(offsets[1:] - 1)].argmax(-1)]  # after the last token of each

        lengths = before + counts
        for _ in range(ANSWER - 1):  # the tokens stay on the device: nothing is waited for
            slots = kv.decode_step(kv.req_to_page, rows, lengths)
            assert slots is not None, "own_pages has seen to that"
            steps.append(self.forward(steps[-1], lengths, rows, slots).argmax(-1))
            lengths += 1

        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            kv.free_req_cache(row, length)  # queued
        kv.free_group_end()  # one launch; each page loses one owner, and is free if that was its last
        return self.xp.stack(steps, 1).tolist()

    def close(self) -> None:
        """Give back the document's pages."""
        self.kv.free_req_cache(0, len(self.document))
        self.kv.free_group_end()

    def forward(self, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, slots: Any) -> Any:
        """Logits after new tokens, which have their slots; each reads the pages of its row, up to itself."""
        pages = self.kv.block_table(self.kv.req_to_page, rows, positions + 1, self.kv.max_page_num)
        cache = PagedCache(self.keys, self.values, slots, pages)
        return self.model(self.xp.asarray(tokens), self.xp.asarray(positions), cache)


class PagedCache:
    """K and V by slot, of all requests, shape (LAYERS, slots, HEADS, HEAD_DIM), as n tokens of one step see it."""

    def __init__(self, keys: Any, values: Any, slots: Any, pages: Any) -> None:
        self.keys, self.values = keys, values
        self.slots = slots  # (n,): where each token is written
        self.pages = pages  # (n, pages of a row): those of its request, 0 past its end

    def append(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Write the new tokens and gather what each may look at; attention kernels read pages in place."""
        self.keys[layer][self.slots], self.values[layer][self.slots] = k, v
        return self.gather(self.keys[layer]), self.gather(self.values[layer])

    def gather(self, by_slot: Any) -> Any:
        """Put the pages of each token's request in a row."""
        by_page = by_slot.reshape(-1, PAGE_SIZE, HEADS, HEAD_DIM)
        return by_page[self.pages].reshape(len(self.pages), -1, HEADS, HEAD_DIM)


# ---- the check -----------------------------------------------------------------------------------------------------


class ContiguousCache:
    """K and V of one request, by position: what the paged cache is compared with."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.layers = [(xp.zeros((0, HEADS, HEAD_DIM), DTYPE),) * 2 for _ in range(LAYERS)]

    def append(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Put the new tokens behind the others; each may look at all."""
        keys, values = self.layers[layer]
        self.layers[layer] = keys, values = self.xp.concatenate([keys, k]), self.xp.concatenate([values, v])
        return tuple(self.xp.broadcast_to(x, (len(k), *x.shape)) for x in (keys, values))


def answer_alone(model: Model, prompt: list[int]) -> tuple[list[int], float]:
    """Answer one question with a contiguous cache; also, by how much the best logit led where it was closest."""
    cache, tokens, closest = ContiguousCache(model.xp), list(prompt), np.inf
    for i in range(ANSWER):
        begin = len(tokens) - 1 if i else 0
        positions = model.xp.arange(begin, len(tokens))
        logits = model(model.xp.asarray(tokens[begin:]), positions, cache)[-1]
        second, best = model.xp.sort(logits)[-2:].tolist()
        closest = min(closest, best - second)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], closest


def workload() -> tuple[list[int], list[list[int]]]:
    """Make up a document and questions of several lengths."""
    rng = np.random.default_rng(1)
    document = rng.integers(VOCAB, size=DOCUMENT).tolist()
    return document, [rng.integers(VOCAB, size=n).tolist() for n in rng.integers(5, 60, 14)]


def main() -> int:
    """Answer, compare, and print what happened."""
    xp, device = array_library()
    document, questions = workload()
    model = Model(xp)
    pipeline = Pipeline(model, device)
    pipeline.read(document)
    answers = pipeline.answer(questions)
    pipeline.close()
    kv = pipeline.kv
    kv.check()  # what only the device could see raises here
    kv.check_integrity()

    print(f"{xp.__name__} on {kv.device}, {kv.backend.name} backend: {NUM_PAGES - 1} pages of {PAGE_SIZE} slots")
    print(f"a document of {DOCUMENT} tokens, its {DOCUMENT // PAGE_SIZE} full pages shared by all questions;")
    print(f"answered at a time, as the pool allows: {pipeline.batches}\n")
    print("question  tokens  own pages  equal  answer")
    wrong, closest = 0, np.inf
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        expected, lead = answer_alone(model, document + question)
        wrong, closest = wrong + (answer != expected), min(closest, lead)
        equal = "yes" if answer == expected else "NO"
        words = " ".join(f"{token:3}" for token in answer[:12])
        print(f"{i:8}{len(question):8}{pipeline.own_pages(question):11}{equal:>7}  {words} ...")
    stats, free = kv.stats(), kv.available_size()
    unshared = sum(pipeline.own_pages(q) + DOCUMENT // PAGE_SIZE for q in questions)
    print(f"\n{stats.pages_allocated} pages handed out; without sharing {unshared}")
    print(f"{stats.peak_pages} at the peak; {free} of {NUM_PAGES - 1} free now")
    print(f"{len(questions) - wrong} of {len(questions)} answers equal those of a contiguous cache, token by token")
    print(f"(the best token's logit led by {closest:.1e} where it was closest)")
    return 1 if wrong or free != NUM_PAGES - 1 else 0


if __name__ == "__main__":
    sys.exit(main())
