"""The examples run, and what they answer is right: compared with models in NumPy that have no cache at all."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cupaged import backends
from tests.documents import ROOT

torch = pytest.importorskip("torch")

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (backends.probe("cupy").works and torch.cuda.is_available()),
        reason="needs CuPy, torch for CUDA and a GPU",
    ),
]


def example(name: str) -> Any:
    """An example as a module."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def run(*command: str, **environment: str) -> list[str]:
    """Lines that a Python program of its own prints; it must end well."""
    there = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=there, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def pages_of(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


# ---- the engine in torch ------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What an engine asked of its pool."""

    chunks: list[int] = field(default_factory=list)  # tokens of each prefill
    decoded: int = 0  # tokens
    begins: list[int] = field(default_factory=list)  # tokens that a request found in the cache
    released: list[int] = field(default_factory=list)  # tokens
    replays: int = 0
    eager_steps: int = 0
    most_owners: int = 0


def watch(engine) -> Seen:
    """Listen to the calls of an engine's pool, by what they are given alone."""
    pool, seen, fresh = engine.pool, Seen(), set(range(len(engine.table)))
    extend_step, decode_step, release, note_replay = (
        pool.extend_step,
        pool.decode_step,
        pool.release,
        pool.note_replay,
    )

    def began(row, prefix):
        if row in fresh:
            fresh.remove(row)
            seen.begins.append(prefix)

    def extend(table, rows, before, after, n, **options):
        for row, prefix in zip(rows, before, strict=True):
            began(row, prefix)
        seen.chunks.append(sum(after) - sum(before))
        return extend_step(table, rows, before, after, n, **options)

    def decode(table, rows, lengths, **options):
        seen.eager_steps += 1
        return decode_step(table, rows, lengths, **options)

    def free(table, rows, lengths):
        seen.most_owners = max(seen.most_owners, int(pool.pool.snapshot()[1][1:].max()))
        fresh.update(rows)
        seen.released += lengths
        return release(table, rows, lengths)

    def replayed(pages):
        seen.replays += 1
        return note_replay(pages)

    pool.extend_step, pool.decode_step, pool.release, pool.note_replay = extend, decode, free, replayed

    def watched(step):
        def call(batch):
            for request in batch:
                began(request.row, request.cached)
            seen.decoded += len(batch)
            return step(batch)

        return call

    engine.decode_steps = {size: watched(step) for size, step in engine.decode_steps.items()}
    return seen


def serve(module, device, pages: int | None = None):
    """Run the example's workload, and return all that can be asked about it."""
    model, requests = module.Model(torch.device(device)), module.workload()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NUM_PAGES", pages or module.NUM_PAGES)
        engine = module.Engine(model, torch.device(device))
        steps = list(engine.decode_steps.values())
        seen = watch(engine)
        engine.run(requests)
    engine.pool.check()
    engine.pool.check_integrity()
    return engine, requests, seen, steps


@pytest.fixture(scope="module")
def module():
    torch.set_num_threads(1)
    return example("torch_engine")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=GPU)])
def served(request, module):
    return serve(module, request.param)


def without_cache(model, tokens: list[int]) -> list[int]:
    """The next token after each, in NumPy: the whole sequence at once, a head at a time."""
    tiny = example("tiny_model")
    layers = [{name: weight.cpu().numpy() for name, weight in layer.items()} for layer in model.layers]
    size, group = tiny.HEAD_DIM, tiny.HEADS // tiny.KV_HEADS
    x = model.embedding.cpu().numpy()[tokens]
    angles = np.arange(len(tokens))[:, None] / 10000.0 ** (np.arange(0, size, 2) / size)
    turn = np.exp(1j * angles)
    for layer in layers:
        h = unit(x)
        q, k, v = h @ layer["q"], h @ layer["k"], h @ layer["v"]
        heads = []
        for head in range(tiny.HEADS):
            mine = slice(head * size, (head + 1) * size)
            theirs = slice(head // group * size, (head // group + 1) * size)
            scores = turned(q[:, mine], turn) @ turned(k[:, theirs], turn).T * tiny.SHARPNESS / size**0.5
            heads.append(causal(scores) @ v[:, theirs])
        x = x + np.concatenate(heads, 1) @ layer["o"]
        gate = unit(x) @ layer["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (unit(x) @ layer["up"])) @ layer["down"]
    return (unit(x) @ model.unembedding.cpu().numpy()).argmax(1).tolist()


def causal(scores: np.ndarray) -> np.ndarray:
    """Softmax over each row up to its diagonal."""
    shares = np.tril(np.exp(scores - np.tril(scores).max(1, keepdims=True)))
    return shares / shares.sum(1, keepdims=True)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6)


def turned(x: np.ndarray, turn: np.ndarray) -> np.ndarray:
    half = x.shape[1] // 2
    pairs = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([pairs.real, pairs.imag], 1)


def check_answers(engine, requests) -> None:
    """Each token of an answer is the one that the model says after all before it."""
    for r in requests:
        assert len(r.answer) == r.new_tokens
        assert r.tokens[: len(r.prompt)] == r.prompt
        assert without_cache(engine.model, r.tokens)[len(r.prompt) - 1 : -1] == r.answer


def test_answers_are_those_of_a_model_without_a_cache(served):
    engine, requests, _, _ = served
    check_answers(engine, requests)
    assert len({tuple(r.answer[:8]) for r in requests}) == len(requests)  # the model does not say the same to all


def test_prefixes_are_shared(served):
    engine, requests, seen, _ = served
    assert engine.pool.page_size == 8
    assert seen.begins.count(0) < len(seen.begins)
    assert all(begin % 8 == 0 for begin in seen.begins)
    assert sum(seen.begins) == sum(r.shared for r in requests) > 0
    assert seen.most_owners >= 3  # two requests and the prefix cache
    # What was found in the cache was not computed again, and no page was taken for it.
    assert sum(seen.chunks) + seen.decoded == sum(seen.released) - sum(seen.begins)
    taken = sum(pages_of(n, 8) for n in seen.released) - sum(seen.begins) // 8
    assert engine.pool.stats().pages_allocated == taken


def test_the_pool_was_full_and_requests_were_retracted(served, module):
    engine, requests, seen, _ = served
    retractions = "".join(r.history for r in requests).count("x")
    assert retractions == len(seen.released) - len(requests) > 0
    assert engine.pool.stats().peak_pages == module.NUM_PAGES
    for r in requests:  # the last one in each history ended the request: its last token is never cached
        assert len(r.prompt) + r.new_tokens - 1 in seen.released
        assert r.history.count("d") >= r.new_tokens - 1 - r.history.count("x")


def test_prompts_are_prefilled_in_chunks(served, module):
    _, requests, seen, _ = served
    assert max(seen.chunks) == module.CHUNK < max(len(r.prompt) for r in requests)
    for r in requests:
        if len(r.prompt) - r.shared > module.CHUNK + 1:  # a last token alone is decoded
            assert r.history.count("P") >= 2, r
    assert "PPP" in "".join(r.history for r in requests)


def test_whoever_waits_longest_comes_first(served):
    _, requests, _, _ = served
    starts = [len(r.history) - len(r.history.lstrip(".")) for r in requests]
    assert starts == sorted(starts)
    for r in requests:
        for step in (i for i, did in enumerate(r.history) if did == "x"):
            back = step + 1 + len(r.history[step + 1 :]) - len(r.history[step + 1 :].lstrip("."))
            assert not any(step < start < back for start in starts), r


def test_no_prefix_is_evicted_before_what_follows_it(served):
    order = {key: age for age, key in enumerate(reversed(served[0].prefixes))}
    followers = [key for key in order if len(key) > 8]
    assert len(followers) >= 10
    assert all(order[key[:-8]] < order[key] for key in followers)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_prompt_that_is_cached_whole(module, device):
    prompt = module.workload()[1].prompt[:40]
    engine = module.Engine(module.Model(torch.device(device)), torch.device(device))
    first, again = module.Request(prompt, 9), module.Request(prompt, 9)
    engine.run([first])
    engine.run([again])
    assert (first.shared, again.shared) == (0, 32)  # the last page has a token that must be computed
    check_answers(engine, [first, again])
    engine.pool.check()


@pytest.mark.parametrize(("prompt", "new_tokens"), [(0, 5), (5, 0), (100, 13), (113, 1)])
def test_a_request_that_can_never_be_answered_is_told(module, prompt, new_tokens):
    engine = module.Engine(module.Model(torch.device("cpu")), torch.device("cpu"))
    with pytest.raises(ValueError, match="at most 112 tokens in all"):
        engine.run([module.Request([1] * prompt, new_tokens)])
    longest = module.Request([1] * 100, 12)
    engine.run([longest])
    check_answers(engine, [longest])


def test_every_page_comes_back(served, module):
    engine, _, _, _ = served
    owned = engine.pool.stats().owned_pages
    assert owned == len(engine.prefixes) > 0
    engine.forget_prefixes()
    assert engine.pool.available_size() == module.NUM_PAGES * module.PAGE_SIZE


def test_decode_steps_are_replays_on_a_gpu(served):
    engine, _, seen, steps = served
    if engine.device.type == "cuda":
        assert all(step.graph is not None for step in steps)
        assert (seen.replays > 0, seen.eager_steps) == (True, 0)
    else:
        assert all(step.graph is None for step in steps)
        assert (seen.replays, seen.eager_steps > 0) == (0, True)


def test_a_larger_pool_retracts_nobody_and_says_the_same(module):
    engine, requests, seen, _ = serve(module, "cpu", pages=200)
    check_answers(engine, requests)
    assert len(seen.released) == len(requests)


def test_without_sharing_more_is_computed_and_the_same_said(module, served, monkeypatch):
    monkeypatch.setattr(module.Engine, "known_prefix", lambda self, tokens: [])
    engine, requests, seen, _ = serve(module, "cpu")
    check_answers(engine, requests)
    assert sum(seen.begins) == 0
    assert engine.pool.stats().pages_allocated > served[0].pool.stats().pages_allocated


def wrong_prefix(self, request):
    """Let the second token of a shared prefix be read where the first one is."""
    self.honest_share(request)
    if request.prefix:
        self.table[request.row, 1] = self.table[request.row, 0]


def forgets(self, requests):
    """Lose the pages of requests that end."""
    for request in requests:
        self.active.remove(request)
        self.free_rows.append(request.row)


@pytest.mark.parametrize(
    ("name", "fault", "pages"),
    [("share_prefix", wrong_prefix, 36), ("release", forgets, 400)],
    ids=["answer", "pages"],
)
def test_the_engine_notices_its_own_faults(module, monkeypatch, capsys, name, fault, pages):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "NUM_PAGES", pages)
    monkeypatch.setattr(module.Engine, "honest_share", module.Engine.share_prefix, raising=False)
    monkeypatch.setattr(module.Engine, name, fault)
    assert module.main() == 1
    assert (" NO " in capsys.readouterr().out) == (name == "share_prefix")


def test_the_engine_from_the_command_line():
    lines = run(str(ROOT / "examples" / "torch_engine.py"), CUDA_VISIBLE_DEVICES="")
    assert "36 of 36 free now" in "\n".join(lines)
    assert sum(line.split()[4:5] == ["yes"] for line in lines) == 14
    assert "14 of 14 answers equal those of a contiguous cache, token by token" in lines


# ---- the pipeline without torch -----------------------------------------------------------------------------------


def use_numpy(pipeline, monkeypatch):
    monkeypatch.setattr(pipeline, "array_library", lambda: (np, "cpu"))


@pytest.fixture(scope="module")
def pipeline():
    return example("cupy_pipeline")


def without_pages(module, model, tokens: list[int]) -> list[int]:
    """The next token after each: the whole sequence at once, a head at a time."""
    size = module.HEAD_DIM
    x = model.embedding[tokens] + model.positions[: len(tokens)]
    for qkv, out, up, down in model.layers:
        q, k, v = np.split(unit(x) @ qkv, 3, axis=1)
        heads = []
        for head in range(module.HEADS):
            mine = slice(head * size, (head + 1) * size)
            heads.append(causal(q[:, mine] @ k[:, mine].T * module.SHARPNESS / size**0.5) @ v[:, mine])
        x = x + np.concatenate(heads, 1) @ out
        x = x + (unit(x) @ up).clip(0) @ down
    return (unit(x) @ model.unembedding).argmax(1).tolist()


def arrays_on(device: str):
    if device == "cpu":
        return np
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_pipeline_says_what_a_model_without_a_cache_says(pipeline, device):
    document, questions = pipeline.workload()
    one = pipeline.Pipeline(pipeline.Model(arrays_on(device)), device)
    one.read(document)
    kv, owners = one.kv, []
    assert kv.available_size() == 39 - 10  # 150 tokens in pages of 16
    decode_step = kv.decode_step

    def spy(table, rows, lengths):
        owners.append(kv.pool.snapshot()[1][1:11].tolist())
        return decode_step(table, rows, lengths)

    kv.decode_step = spy
    answers = one.answer(questions)
    reference = pipeline.Model(np)
    for question, answer in zip(questions, answers, strict=True):
        assert len(answer) == pipeline.ANSWER
        said = without_pages(pipeline, reference, document + question + answer)
        assert said[150 + len(question) - 1 : -1] == answer
    # The nine full pages have an owner for each question, the tail's has one.
    assert sum(one.batches) == len(questions)
    assert owners == [[n + 1] * 9 + [1] for n in one.batches for _ in range(pipeline.ANSWER - 1)]
    own = [pages_of(150 + len(question) + pipeline.ANSWER - 1, 16) - 9 for question in questions]
    assert kv.stats().pages_allocated == 10 + sum(own)
    # As many at a time as the pool allows: one more would not have fitted.
    ends = np.cumsum(one.batches)
    for begin, end in zip([0, *ends], ends, strict=False):
        assert sum(own[begin:end]) <= 29
        assert sum(own[begin : end + 1]) > 29 or end == len(own)
    one.close()
    kv.check()
    kv.check_integrity()
    assert kv.available_size() == 39


def test_the_pipeline_notices_its_own_faults(pipeline, monkeypatch, capsys):
    use_numpy(pipeline, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.Pipeline, "close", lambda self: None)
        assert pipeline.main() == 1
    printed = capsys.readouterr().out
    assert "29 of 39 free now" in printed
    assert " NO " not in printed
    gather = pipeline.PagedCache.gather
    monkeypatch.setattr(pipeline.PagedCache, "gather", lambda self, x: np.roll(gather(self, x), 1, axis=1))
    assert pipeline.main() == 1
    assert capsys.readouterr().out.count(" NO ") >= 10


@pytest.mark.parametrize(("slots", "what"), [(9, "document"), (12, "question")])
def test_a_pool_that_is_too_small_is_told(pipeline, monkeypatch, slots, what):
    use_numpy(pipeline, monkeypatch)
    monkeypatch.setattr(pipeline, "NUM_PAGES", slots)
    with pytest.raises(SystemExit, match=f"the pool is too small for {'the' if what == 'document' else 'a'} {what}"):
        pipeline.main()


def test_the_pipeline_from_the_command_line_without_torch_or_cupy(tmp_path):
    path = str(ROOT / "examples" / "cupy_pipeline.py")
    block = "import runpy, sys; sys.modules |= {'torch': None, 'cupy': None}"
    lines = run("-c", f"{block}; runpy.run_path({path!r}, run_name='__main__')")
    assert lines[0] == "numpy on cpu, numba backend: 39 pages of 16 slots"
    assert "14 of 14 answers equal those of a contiguous cache, token by token" in lines


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch_engine", "cupy_pipeline"])
def test_the_examples_from_the_command_line_on_a_gpu(name):
    if not (backends.probe("cupy").works and torch.cuda.is_available()):
        pytest.skip("needs CuPy, torch for CUDA and a GPU")
    lines = run(str(ROOT / "examples" / f"{name}.py"))
    assert "cuda:0" in lines[0]
    assert "cupy" in lines[0]
    assert "14 of 14 answers equal those of a contiguous cache, token by token" in lines
