"""A tiny transformer with random weights, and the cache that needs no pages: what torch_engine.py is checked with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 64, 3, 4, 2, 16
MAX_CONTEXT = 112  # tokens of one request
# The order of additions depends on the batch. In float64 that moves a logit by some 1e-14, far less than the lead of
# the best one, which torch_engine.py prints: so rounding cannot change a token, and answers can be compared.
DTYPE = torch.float64
SHARPNESS = (
    4  # of the attention: with less, an answer hardly depends on one token of its context, or on one wrong slot
)


class Model:
    """A transformer with random weights: RMS norm, grouped-query attention, rotary positions, gated MLP."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def weights(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=generator, dtype=DTYPE) / rows**0.5).to(device)

        shapes = {
            "q": (DIM, HEADS * HEAD_DIM),
            "k": (DIM, KV_HEADS * HEAD_DIM),
            "v": (DIM, KV_HEADS * HEAD_DIM),
            "o": (HEADS * HEAD_DIM, DIM),
            "gate": (DIM, 4 * DIM),
            "up": (DIM, 4 * DIM),
            "down": (4 * DIM, DIM),
        }
        self.embedding, self.unembedding = weights(VOCAB, DIM) * VOCAB**0.5, weights(DIM, VOCAB)
        self.layers = [{name: weights(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
        self.frequencies = 1e4 ** (-torch.arange(0, HEAD_DIM, 2, dtype=DTYPE, device=device) / HEAD_DIM)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Logits after each of n tokens, shape (n, VOCAB); their K and V go into the cache."""
        x = self.embedding[tokens]
        angles = positions[:, None, None] * self.frequencies
        for i, layer in enumerate(self.layers):
            h = norm(x)
            q = rotate((h @ layer["q"]).view(-1, HEADS, HEAD_DIM), angles)
            k = rotate((h @ layer["k"]).view(-1, KV_HEADS, HEAD_DIM), angles)
            v = (h @ layer["v"]).view(-1, KV_HEADS, HEAD_DIM)
            x = x + attend(q, *cache.append(i, k, v), positions) @ layer["o"]
            h = norm(x)
            x = x + (torch.nn.functional.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
        return norm(x) @ self.unembedding


def norm(x: Tensor) -> Tensor:
    """Bring each token to a mean square of 1."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of channels by its token's position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Let each token look at its request's tokens, shape (n, context, KV_HEADS, HEAD_DIM), up to its own position."""
    q = q.view(-1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    scores = torch.einsum("nhgd,nchd->nhgc", q, keys) * (SHARPNESS / HEAD_DIM**0.5)
    later = torch.arange(keys.shape[1], device=q.device) > positions[:, None]
    scores = scores.masked_fill(later[:, None, None], -torch.inf)
    return torch.einsum("nhgc,nchd->nhgd", scores.softmax(-1), values).flatten(1)


@dataclass
class ContiguousCache:
    """K and V of one request, by position: what the paged cache is compared with."""

    keys: Tensor  # (LAYERS, MAX_CONTEXT, KV_HEADS, HEAD_DIM)
    values: Tensor
    begin: int = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens behind the others; each may look at all."""
        end = self.begin + len(k)
        self.keys[layer, self.begin : end], self.values[layer, self.begin : end] = k, v
        keys, values = self.keys[layer, :end], self.values[layer, :end]
        return keys.expand(len(k), -1, -1, -1), values.expand(len(k), -1, -1, -1)


def answer_alone(model: Model, prompt: list[int], new_tokens: int, device: torch.device) -> tuple[list[int], float]:
    """Answer one request with a contiguous cache; also, by how much the best logit led where it was closest."""
    keys, values = torch.zeros(2, LAYERS, MAX_CONTEXT, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    cache, tokens, closest = ContiguousCache(keys, values), list(prompt), torch.inf
    for _ in range(new_tokens):
        positions = torch.arange(cache.begin, len(tokens), device=device)
        logits = model(torch.tensor(tokens[cache.begin :], device=device), positions, cache)[-1]
        best, second = logits.topk(2).values.tolist()
        cache.begin, closest = len(tokens), min(closest, best - second)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], closest
