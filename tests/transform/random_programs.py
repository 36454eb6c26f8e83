"""Makes random valid ranking programs over the transform's rule families and exports them.

A program is a list of steps. Each step applies one operator to values made before; it is tried on example tensors while
the program is made, and left out where the operator refuses them. Everything is float64, so that a wrong rewrite shows
as a large error and rounding does not. Request-only inputs are called `user_*` and `hist_*`; a packed program has one
matrix `X` whose first columns are request-only.

usage: random_programs.py OUT_DIR --count N [--seed S] [--jobs J]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import warnings
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F

BATCH = 6
LENGTH = 5
WIDTH = 4
VOCABULARY = 11
PACKED_COLUMNS = 9
PACKED_USER_COLUMNS = 5
MAX_ELEMENTS = 20_000

Step = tuple[Callable[..., torch.Tensor], list[int]]


class Program(torch.nn.Module):
    """Replays a list of steps; parameters of the steps are registered under their position."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.steps: list[Step] = []
        self.outputs: list[int] = []
        self.weights = torch.nn.ParameterList()
        self.layers = torch.nn.ModuleList()

    def forward(self, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values = read_inputs(x, self.packed)
        for function, arguments in self.steps:
            values.append(function(*[values[a] for a in arguments]))
        return tuple(values[o] for o in self.outputs)


def read_inputs(x: dict[str, torch.Tensor], packed: bool) -> list[torch.Tensor]:
    if packed:
        matrix = x["X"]
        return [matrix[:, i : i + 2] for i in range(0, PACKED_COLUMNS - 1, 2)] + [matrix]
    return list(x.values())


def example_inputs(packed: bool, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, shape, generator=generator)

    if packed:
        return {"X": normal(BATCH, PACKED_COLUMNS)}
    return {
        "user_dense": normal(BATCH, WIDTH),
        "user_id": ids(BATCH),
        "hist_ids": ids(BATCH, LENGTH),
        "hist_dense": normal(BATCH, LENGTH, WIDTH),
        "item_dense": normal(BATCH, WIDTH),
        "item_id": ids(BATCH),
        "item_tags": ids(BATCH, 3),
    }


class Maker:
    """Draws steps until a program is long enough."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.packed = self.random.random() < 0.2
        self.program = Program(self.packed)
        self.example = example_inputs(self.packed, torch.Generator().manual_seed(seed))
        self.values = read_inputs(self.example, self.packed)
        self.recent: list[int] = []

    # ---- choosing operands ----
    def floats(self, rank: int | None = None) -> list[int]:
        return [
            i for i, v in enumerate(self.values) if v.is_floating_point() and (rank is None or v.dim() == rank) and v.dim() > 0
        ]

    def pick(self, candidates: list[int]) -> int:
        if not candidates:
            raise LookupError
        late = candidates[-6:]
        return self.random.choice(late if self.random.random() < 0.6 else candidates)

    def add(self, function: Callable[..., torch.Tensor], arguments: list[int]) -> int:
        result = function(*[self.values[a] for a in arguments])
        if not isinstance(result, torch.Tensor) or result.numel() > MAX_ELEMENTS or result.numel() == 0:
            raise ValueError("no tensor of a useful size")
        if result.is_floating_point():
            if not torch.isfinite(result).all() or result.abs().max() > 1e4:
                raise ValueError("values leave the useful range")
        self.program.steps.append((function, arguments))
        self.values.append(result)
        return len(self.values) - 1

    def parameter(self, *shape: int) -> torch.nn.Parameter:
        weight = torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64) / max(1, shape[-1]) ** 0.5)
        self.program.weights.append(weight)
        return weight

    def layer(self, module: torch.nn.Module) -> torch.nn.Module:
        module = module.double().eval()
        for p in list(module.parameters()) + [b for b in module.buffers() if b.is_floating_point()]:
            with torch.no_grad():
                p.add_(torch.rand_like(p) * 0.3)
        self.program.layers.append(module)
        return module

    # ---- operator families ----
    def pointwise(self) -> None:
        functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
            torch.relu, torch.sigmoid, torch.tanh, torch.neg, torch.abs, torch.square, torch.sin, F.gelu, F.silu,
            lambda v: F.leaky_relu(v, 0.1), lambda v: v.clamp(-1.0, 1.0), lambda v: torch.exp(-v.abs()), torch.clone,
            lambda v: v.contiguous(), lambda v: F.dropout(v, 0.3, training=False), lambda v: 1.5 - v,
            lambda v: v * 0.5 + 1.0, lambda v: v.float().double(), lambda v: torch.where(v > 0, v, -v),
            lambda v: v.masked_fill(v < 0, 0.25), lambda v: torch.log1p(v.abs()), lambda v: v.pow(2),
        ]  # fmt: skip
        self.add(self.random.choice(functions), [self.pick(self.floats())])

    def binary(self) -> None:
        functions: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
            torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda a, b: a / (b.abs() + 1.0),
            lambda a, b: torch.where(a > b, a, b * 0.5), lambda a, b: torch.add(a, b, alpha=2), lambda a, b: a - b,
            lambda a, b: torch.lerp(a, b, 0.3),
        ]  # fmt: skip
        a = self.pick(self.floats())
        shape = self.values[a].shape
        same = [i for i in self.floats() if self.values[i].shape == shape]
        other = self.pick(self.floats() if self.random.random() < 0.2 else same)
        self.add(self.random.choice(functions), [a, other] if self.random.random() < 0.5 else [other, a])

    def spread(self) -> None:
        """A row vector against a sequence: (B, D) with (B, L, D), as attention over a history does."""
        row = self.pick([i for i in self.floats(2) if self.values[i].shape[0] == BATCH])
        sequence = self.pick([i for i in self.floats(3) if self.values[i].shape[0] == BATCH])
        length = self.values[sequence].shape[1]
        if self.random.random() < 0.5:
            function = self.random.choice([torch.add, torch.sub, torch.mul])
            self.add(lambda r, s: function(r.unsqueeze(1), s), [row, sequence])
            return
        wide = self.add(lambda r: r.unsqueeze(1).expand(-1, length, -1), [row])
        if self.random.random() < 0.5:
            self.add(lambda r, s: torch.cat([r, s, r - s, r * s], dim=-1), [wide, sequence])

    def concatenate(self) -> None:
        first = self.pick(self.floats())
        rank = self.values[first].dim()
        axis = self.random.randrange(0 if self.random.random() < 0.03 else min(1, rank - 1), rank)
        fits = [
            i
            for i in self.floats(rank)
            if all(self.values[i].shape[d] == self.values[first].shape[d] for d in range(rank) if d != axis)
        ]
        chosen = [first] + [self.pick(fits) for _ in range(self.random.randrange(1, 4))]
        self.random.shuffle(chosen)
        if self.random.random() < 0.2 and all(self.values[i].shape == self.values[first].shape for i in chosen):
            self.add(lambda *v: torch.stack(v, dim=axis), chosen)
        else:
            negative = axis - rank if self.random.random() < 0.5 else axis
            self.add(lambda *v: torch.cat(v, dim=negative), chosen)

    def tower(self) -> None:
        """The first layers of almost every ranking model: rows of both sides side by side, then a linear layer."""
        rows = [i for i in self.floats(2) if self.values[i].shape[0] == BATCH]
        chosen = [self.random.choice(rows) for _ in range(self.random.randrange(2, 5))]
        if self.random.random() < 0.4:
            same = [i for i in rows if self.values[i].shape[1] == self.values[chosen[0]].shape[1]]
            a, b = self.random.choice(same), self.random.choice(same)
            chosen.append(self.add(torch.sub if self.random.random() < 0.5 else torch.add, [a, b]))
        if self.random.random() < 0.3:  # embeddings stacked as fields, then flattened
            fields = [i for i in rows if self.values[i].shape[1] == WIDTH]
            chosen = [self.random.choice(fields) for _ in range(self.random.randrange(2, 5))]
            wide = self.add(lambda *v: torch.cat([x.unsqueeze(1) for x in v], dim=1).flatten(1), chosen)
        else:
            wide = self.add(lambda *v: torch.cat(v, dim=-1), chosen)
        if self.random.random() < 0.3:
            wide = self.add(self.random.choice([torch.relu, torch.tanh, torch.clone]), [wide])
        result = self.add(self.layer(torch.nn.Linear(self.values[wide].shape[1], WIDTH)), [wide])
        if self.random.random() < 0.4:  # as multi-layer perceptrons are written
            result = self.add(self.layer(torch.nn.BatchNorm1d(WIDTH, affine=self.random.random() < 0.7)), [result])
        result = self.add(self.random.choice([torch.relu, torch.sigmoid, torch.tanh, F.silu]), [result])
        if self.random.random() < 0.4:
            self.add(self.layer(torch.nn.Dropout(0.5).eval()), [result])

    def unit(self) -> None:
        """DIN's attention unit: a small network on [q, k, q - k, q * k] for every entry of a history."""
        row = self.pick([i for i in self.floats(2) if self.values[i].shape[0] == BATCH])
        width = self.values[row].shape[1]
        fits = [i for i in self.floats(3) if self.values[i].shape[0] == BATCH and self.values[i].shape[2] == width]
        sequence = self.pick(fits)
        length = self.values[sequence].shape[1]
        layer = self.layer(torch.nn.Linear(4 * width, 3))
        flat = self.random.random() < 0.5

        def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            q = q.unsqueeze(1).expand(-1, length, -1)
            x = torch.cat([q, k, q - k, q * k], dim=-1)
            y = layer(x.view(-1, 4 * width)).view(-1, length, 3) if flat else layer(x)
            return (torch.sigmoid(y).sum(-1, keepdim=True) * k).sum(1)

        self.add(attend, [row, sequence])

    def fields(self) -> None:
        """Fields of both sides in one tensor (B, F, W), and what interactions between fields do with them."""
        rows = [i for i in self.floats(2) if self.values[i].shape == (BATCH, WIDTH)]
        chosen = [self.random.choice(rows) for _ in range(self.random.randrange(2, 6))]
        stacked = self.add(lambda *v: torch.cat([x.unsqueeze(1) for x in v], dim=1), chosen)
        layer, norm = self.layer(torch.nn.Linear(WIDTH, WIDTH)), self.layer(torch.nn.LayerNorm(WIDTH))
        for _ in range(self.random.randrange(1, 4)):
            stacked = self.interact(stacked, layer, norm)
        self.add(lambda v: v.flatten(1), [stacked])

    def interact(self, stacked: int, layer: torch.nn.Module, norm: torch.nn.Module) -> int:
        """One step over fields; returns what the next one starts from."""
        count = self.values[stacked].shape[1]
        scale, shift = self.parameter(count, 1), self.parameter(count, WIDTH)
        picks = torch.tensor([self.random.randrange(count) for _ in range(self.random.randrange(1, 5))])
        keep = self.random.random() < 0.5
        same_shape: list[Callable[[torch.Tensor], torch.Tensor]] = [
            layer, norm, lambda v: v * scale, lambda v: v + shift, lambda v: torch.relu(layer(v)) + v, lambda v: v * v,
            lambda v: v.softmax(-1), lambda v: v[:, picks], lambda v: v.index_select(1, picks), lambda v: v @ shift[:1].t() * v,
            lambda v: v.transpose(1, 2).transpose(1, 2), lambda v: torch.where(v > 0, v, v * 0.1), lambda v: v.clamp(-1.0, 1.0),
            lambda v: torch.cat([layer(p) * v[:, :1] for p in v.split(1, 1)], 1), lambda v: torch.stack(v.unbind(1)[::-1], 1),
            lambda v: torch.cat(v.split([1, WIDTH - 1], -1)[::-1], -1), lambda v: torch.cat(v.chunk(2, 1)[::-1], 1),
        ]  # fmt: skip
        ends: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda v: v.sum(1, keepdim=keep), lambda v: v.mean(1, keepdim=keep), lambda v: v.sum((1, 2), keepdim=keep),
            lambda v: (v.sum(1).square() - v.square().sum(1)) * 0.5, lambda v: v.amax(1), lambda v: v.mean(-1, keepdim=keep),
            lambda v: v.transpose(1, 2).sum(-1), lambda v: torch.bmm(v, v.transpose(1, 2)),
        ]  # fmt: skip
        if self.random.random() < 0.4:
            self.add(self.random.choice(ends), [stacked])
            return stacked
        return self.add(self.random.choice(same_shape), [stacked])

    def reshape(self) -> None:
        i = self.pick(self.floats())
        v = self.values[i]
        rank = v.dim()
        last = v.shape[-1]
        choices: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda t: t.unsqueeze(-1), lambda t: t.unsqueeze(1), lambda t: t.unsqueeze(0).squeeze(0),
        ]  # fmt: skip
        if rank >= 2:
            at = self.random.randrange(v.shape[1])
            choices += [
                lambda t: t.flatten(1), lambda t: t.reshape(-1, last), lambda t: t.transpose(1, rank - 1),
                lambda t: t.reshape(t.shape[0], -1), lambda t: t[:, at], lambda t: t[..., : max(1, last // 2)],
                lambda t: torch.split(t, 1, dim=1)[at], lambda t: torch.chunk(t, 2, dim=-1)[0],
                lambda t: t.unbind(1)[at], lambda t: t.repeat(1, *([2] * (rank - 1))), lambda t: t.flip(1),
                lambda t: F.pad(t, (1, 0)), lambda t: t.repeat_interleave(2, dim=1),
            ]  # fmt: skip
        if rank == 2 and v.shape[0] == BATCH * LENGTH:
            choices += [lambda t: t.view(-1, LENGTH, last)] * 4
        if rank == 2 and last % 2 == 0:
            choices += [lambda t: t.reshape(t.shape[0], 2, last // 2)] * 2
        if rank == 3:
            choices += [lambda t: t.permute(0, 2, 1), lambda t: t.permute(1, 0, 2), lambda t: t.transpose(0, 1)]
        if self.random.random() < 0.05:
            choices = [lambda t: t.repeat_interleave(2, dim=0), lambda t: t.squeeze()]
        self.add(self.random.choice(choices), [i])

    def reduce(self) -> None:
        i = self.pick([j for j in self.floats() if self.values[j].dim() >= 2])
        axis = self.random.randrange(0 if self.random.random() < 0.04 else 1, self.values[i].dim())
        keep = self.random.random() < 0.5
        functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda v: v.sum(axis, keepdim=keep), lambda v: v.mean(axis, keepdim=keep), lambda v: v.amax(axis, keepdim=keep),
            lambda v: torch.logsumexp(v, axis, keepdim=keep), lambda v: v.softmax(axis), lambda v: v.log_softmax(axis),
            lambda v: v.cumsum(axis), lambda v: v.sort(axis).values, lambda v: v.topk(1, axis).values,
            lambda v: v.max(axis, keepdim=keep).values, lambda v: v.var(axis, keepdim=keep, unbiased=False),
            lambda v: torch.linalg.vector_norm(v, dim=axis, keepdim=keep),
        ]  # fmt: skip
        self.add(self.random.choice(functions), [i])

    def linear(self) -> None:
        i = self.pick([j for j in self.floats() if self.values[j].dim() >= 2])
        width = self.values[i].shape[-1]
        kind = self.random.random()
        if kind < 0.75:
            layer = self.layer(torch.nn.Linear(width, self.random.choice([1, 3, WIDTH]), bias=self.random.random() < 0.8))
            result = self.add(layer, [i])
            if self.random.random() < 0.5:
                self.add(torch.relu, [result])
        elif kind < 0.9:
            weight = self.parameter(width, WIDTH)
            self.add(lambda v: v @ weight, [i])
        else:
            weight = self.parameter(3, width)
            self.add(lambda v: torch.einsum("...k,ok->...o" if v.dim() != 2 else "bk,ok->bo", v, weight), [i])

    def product(self) -> None:
        a = self.pick([i for i in self.floats(3) if self.values[i].shape[0] == BATCH])
        fits = [i for i in self.floats(3) if self.values[i].shape[0] == BATCH and self.values[i].shape[2] == self.values[a].shape[2]]
        b = self.pick(fits)
        kind = self.random.random()
        if kind < 0.35:
            self.add(lambda x, y: torch.matmul(x, y.transpose(1, 2)), [a, b])
        elif kind < 0.5:
            self.add(lambda x, y: torch.bmm(x, y.transpose(1, 2)), [a, b])
        elif kind < 0.7:
            self.add(lambda x, y: torch.einsum("bik,bjk->bij", x, y), [a, b])
        else:
            self.add(lambda x, y: F.scaled_dot_product_attention(x.unsqueeze(1), y.unsqueeze(1), y.unsqueeze(1)).squeeze(1), [a, b])

    def compress(self) -> None:
        """Rows of both sides in one stack, compressed by a weight that all rows share, as models write it."""
        rows = [i for i in self.floats() if self.values[i].shape[0] == BATCH and self.values[i].dim() in (2, 3)]
        width = self.values[self.random.choice(rows)].shape[-1]
        fits = [i for i in rows if self.values[i].shape[-1] == width]
        chosen = [self.random.choice(fits) for _ in range(self.random.randrange(2, 5))]
        if all(self.values[i].dim() == 2 for i in chosen) and self.random.random() < 0.5:
            stack = self.add(lambda *v: torch.stack(v, dim=1), chosen)
        else:
            stack = self.add(lambda *v: torch.cat([x.unsqueeze(1) if x.dim() == 2 else x for x in v], dim=1), chosen)
        if self.random.random() < 0.2:
            stack = self.add(self.random.choice([torch.relu, torch.tanh, torch.clone]), [stack])
        count = self.values[stack].shape[1]
        weight, layer = self.parameter(3, count), self.layer(torch.nn.Linear(count, 3))
        convolution = self.layer(torch.nn.Conv1d(count, 3, 1))
        functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda v: weight @ v, lambda v: torch.bmm(weight.expand(v.shape[0], -1, -1), v), convolution,
            lambda v: torch.einsum("mk,bkn->bmn", weight, v), lambda v: torch.einsum("bkn,mk->bnm", v, weight),
            lambda v: layer(v.transpose(1, 2)).transpose(1, 2), lambda v: v.permute(0, 2, 1) @ weight.t(),
        ]  # fmt: skip
        self.add(self.random.choice(functions), [stack])

    def target(self) -> None:
        """Rows attend over a sequence: with and without a mask, by an operator or written out."""
        sequence = self.random.choice([i for i in self.floats(3) if self.values[i].shape[0] == BATCH])
        width = self.values[sequence].shape[2]
        fits = [i for i in self.floats() if self.values[i].shape[0] == BATCH and self.values[i].shape[-1] == width]
        query = self.random.choice([i for i in fits if self.values[i].dim() in (2, 3)])
        length = self.values[sequence].shape[1]
        heads = 2 if width % 2 == 0 and self.random.random() < 0.5 else 1
        counts = [i for i, v in enumerate(self.values) if v.dtype == torch.int64 and v.shape == (BATCH,)]
        ids = [i for i, v in enumerate(self.values) if v.dtype == torch.int64 and v.shape == (BATCH, length)]
        kind = self.random.random()

        def split(v: torch.Tensor) -> torch.Tensor:
            v = v.unsqueeze(1) if v.dim() == 2 else v
            return v.unflatten(2, (heads, -1)).transpose(1, 2)

        def attend(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            mask = None if mask is None else mask[:, None, None, :]
            return F.scaled_dot_product_attention(split(q), split(k), split(k.tanh()), mask).transpose(1, 2).flatten(2)

        if kind < 0.2:
            self.add(lambda q, k: attend(q, k, None), [query, sequence])
        elif kind < 0.4:
            self.add(lambda q, k: ((split(q) @ split(k).mT * 0.7).softmax(-1) @ split(k)).transpose(1, 2).flatten(2),
                     [query, sequence])  # fmt: skip
        elif kind < 0.7 and counts:
            self.add(lambda q, k, n: attend(q, k, torch.arange(length) < n.unsqueeze(1)), [query, sequence, self.pick(counts)])
        elif ids:
            limit = self.random.randrange(VOCABULARY)
            self.add(lambda q, k, i: attend(q, k, i > limit), [query, sequence, self.pick(ids)])

    def normalise(self) -> None:
        i = self.pick([j for j in self.floats() if self.values[j].dim() in (2, 3)])
        v = self.values[i]
        kind = self.random.random()
        if kind < 0.4:
            self.add(self.layer(torch.nn.LayerNorm(v.shape[-1])), [i])
        elif kind < 0.8:
            self.add(self.layer(torch.nn.BatchNorm1d(v.shape[1])), [i])
        elif kind < 0.85:
            self.add(lambda t: F.batch_norm(t, None, None, training=True), [i])
        elif v.dim() == 3:
            self.add(self.layer(torch.nn.Conv1d(v.shape[1], 2, 2, padding=1)), [i])
        else:
            weight = self.parameter(v.shape[-1])
            self.add(lambda t: F.prelu(t, weight.abs()), [i])

    def lookup(self) -> None:
        ids = [i for i, v in enumerate(self.values) if v.dtype == torch.int64]
        kind = self.random.random()
        if ids and kind < 0.4:
            self.add(self.layer(torch.nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)), [self.pick(ids)])
        elif ids and kind < 0.6:  # both sides in one lookup, of a table whose rows are numbers too
            rows = [i for i in ids if self.values[i].shape == (BATCH,)]
            lists = [i for i in ids if self.values[i].dim() == 2 and self.values[i].shape[0] == BATCH]
            both = self.add(lambda h, i: torch.cat([h, i.unsqueeze(1)], 1), [self.pick(lists), self.pick(rows)])
            table = self.parameter(VOCABULARY, WIDTH)
            looked_up = self.add(lambda t: table[t], [both])
            self.add(lambda v: v[:, :-1] * v[:, -1:], [looked_up])
        elif ids and kind < 0.7:
            self.add(lambda t: F.one_hot(t, VOCABULARY).double(), [self.pick(ids)])
        elif kind < 0.8:
            i = self.pick([j for j in self.floats(3) if self.values[j].shape[0] == BATCH])
            self.add(lambda v: torch.gather(v, 1, v.argsort(1)), [i])
        elif kind < 0.9:
            i = self.pick([j for j in self.floats() if self.values[j].dim() >= 2])
            index = torch.tensor([0, self.values[i].shape[1] - 1])
            self.add(lambda v: v.index_select(1, index), [i])
        else:
            i = self.pick([j for j in self.floats(2)])
            embedding = self.layer(torch.nn.Embedding(max(2, self.values[i].shape[1]), WIDTH))
            self.add(lambda v: embedding(v.argmax(1)), [i])

    def create(self) -> None:
        i = self.pick([j for j in self.floats(2) if self.values[j].shape[0] == BATCH])
        width = self.values[i].shape[1]
        bias = self.parameter(1, width)
        functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda v: v + torch.zeros(v.shape[0], width, dtype=v.dtype),
            lambda v: torch.cat([v, v.new_ones(v.shape[0], 2)], dim=1),
            lambda v: v * bias.expand(v.shape[0], -1),
            lambda v: torch.cat([v, bias.repeat(v.shape[0], 1)], dim=1),
            lambda v: v + torch.arange(width, dtype=v.dtype),
            lambda v: torch.ones_like(v) - v,
        ]
        self.add(self.random.choice(functions), [i])

    def recur(self) -> None:
        i = self.pick([j for j in self.floats(3) if self.values[j].shape[0] == BATCH])
        gru = self.layer(torch.nn.GRU(self.values[i].shape[2], 3, batch_first=True))
        self.add(lambda v: gru(v)[0], [i])

    def mix(self) -> None:
        """Rows that really depend on each other, or numbers that depend on the batch size."""
        i = self.pick(self.floats())
        functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda v: v - v.mean(0, keepdim=True), lambda v: v.softmax(0), lambda v: v.flip(0), lambda v: v.cumsum(0),
            lambda v: v / v.shape[0], lambda v: v + v.sum(), lambda v: v.roll(1, 0),
        ]  # fmt: skip
        self.add(self.random.choice(functions), [i])

    # ---- a whole program ----
    def make(self) -> Program:
        families = (
            [self.pointwise] * 3 + [self.binary] * 3 + [self.concatenate] * 5 + [self.reshape] * 4 + [self.reduce] * 2
            + [self.linear] * 5 + [self.spread] * 3 + [self.product, self.normalise, self.normalise, self.lookup]
            + [self.lookup] * 2 + [self.create, self.recur] + [self.tower] * 4 + [self.unit] * 2 + [self.compress] * 3 + [self.target] * 5
            + [self.fields] * 4
        )  # fmt: skip
        target = self.random.randrange(6, 26)
        for _ in range(400):
            if len(self.program.steps) >= target:
                break
            family = self.mix if self.random.random() < 0.015 else self.random.choice(families)
            try:
                family()
            except (LookupError, ValueError, RuntimeError, IndexError, TypeError):
                continue
        self.finish()
        return self.program

    def finish(self) -> None:
        """Outputs: everything that keeps the batch in front, summed to a row a candidate, and a few values as they are."""
        rows = [i for i in self.floats() if self.values[i].shape[0] == BATCH]
        item = next(i for i in rows if self.packed and i == len(self.example) + 3 or not self.packed and i == 4)

        def score(*values: torch.Tensor) -> torch.Tensor:
            return torch.stack([v.reshape(v.shape[0], -1).mean(1) for v in values], dim=1)

        chosen = sorted(set(rows[-4:] + [self.pick(rows), item]))
        self.program.outputs.append(self.add(score, chosen))
        extra = [i for i in rows[-3:] if self.values[i].is_contiguous()]
        if extra and self.random.random() < 0.4:
            self.program.outputs.append(self.random.choice(extra))


def export(seed: int, path: Path) -> str:
    """Exports the program of a seed; returns what stood in the way, or nothing."""
    warnings.filterwarnings("ignore")
    maker = Maker(seed)
    program = maker.make().eval()
    batch = torch.export.Dim("batch", min=2)
    try:
        with torch.no_grad():
            exported = torch.export.export(
                program, (maker.example,), dynamic_shapes=({k: {0: batch} for k in maker.example},), strict=False
            )
            if seed % 3 == 0:  # the form that users are told to save; the raw one differs in batch norms and the like
                exported = exported.run_decompositions({})
    except Exception as error:  # noqa: BLE001 - a program that does not export is no program
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    torch.export.save(exported, path)
    return ""


def work(task: tuple[int, Path]) -> tuple[int, str]:
    torch.set_num_threads(1)
    seed, path = task
    if path.is_file():  # of an earlier run into the same folder
        return seed, ""
    part = path.with_suffix(".part.pt2")
    problem = export(seed, part)
    if not problem:
        part.replace(path)
    return seed, problem


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.out.glob("*.part.pt2"):
        part.unlink()
    made, refused, seed = 0, 0, options.seed * 1_000_000
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        while made < options.count:
            wanted = options.count - made
            tasks = [(s, options.out / f"program_{s}.pt2") for s in range(seed, seed + wanted + wanted // 4)]
            seed += len(tasks)
            for number, problem in pool.imap_unordered(work, tasks, chunksize=4):
                if problem:
                    refused += 1
                elif made == options.count:
                    (options.out / f"program_{number}.pt2").unlink()
                else:
                    made += 1
                    if made % 50 == 0:
                        print(f"{made} programs", file=sys.stderr, flush=True)
    (options.out / "count.json").write_text(json.dumps({"programs": made, "not exported": refused}))
    print(f"{made} programs in {options.out} ({refused} did not export)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
