"""Random programs: their inputs, and steps that apply one operator of PyTorch's to values made before.

A program is a list of steps. Each is tried on example tensors while the program is made, and left out where the operator
refuses them. Everything is float64, so that a wrong rewrite shows as a large error and rounding does not. Request-only
inputs are called `user_*` and `hist_*`. There are five kinds: `rows` (one batch for all inputs), `bags` (the same, and bags of
many lengths given as values and offsets), `packed` (one matrix `X`
whose first columns are request-only), `single` (request-only inputs have a batch of 1, which the program spreads itself)
and `looked up` (they have a batch of their own, and an input `owner` says which row belongs to a candidate).
"""

from __future__ import annotations

import random
from typing import Callable

import torch
import torch.nn.functional as F

BATCH = 6
LENGTH = 5
WIDTH = 4
VOCABULARY = 11
USERS = 3  # rows of request-only inputs that are looked up
PACKED_COLUMNS = 9
PACKED_USER_COLUMNS = 5
MAX_ELEMENTS = 20_000

Step = tuple[Callable[..., torch.Tensor], list[int]]


class Program(torch.nn.Module):
    """Replays a list of steps; parameters of the steps are registered under their position."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.steps: list[Step] = []
        self.outputs: list[int] = []
        self.weights = torch.nn.ParameterList()
        self.layers = torch.nn.ModuleList()

    def forward(self, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values = read_inputs(x, self.kind)
        for function, arguments in self.steps:
            values.append(function(*[values[a] for a in arguments]))
        return tuple(values[o] for o in self.outputs)


def read_inputs(x: dict[str, torch.Tensor], kind: str) -> list[torch.Tensor]:
    if kind == "packed":
        matrix = x["X"]
        return [matrix[:, i : i + 2] for i in range(0, PACKED_COLUMNS - 1, 2)] + [matrix]
    return list(x.values())


def example_inputs(kind: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, shape, generator=generator)

    if kind == "packed":
        return {"X": normal(BATCH, PACKED_COLUMNS)}
    users = {"single": 1, "looked up": USERS}.get(kind, BATCH)
    inputs = {
        "user_dense": normal(users, WIDTH),
        "user_id": ids(users),
        "hist_ids": ids(users, LENGTH),
        "hist_dense": normal(users, LENGTH, WIDTH),
        "item_dense": normal(BATCH, WIDTH),
        "item_id": ids(BATCH),
        "item_tags": ids(BATCH, 3),
    }
    if kind == "looked up":
        inputs["owner"] = torch.randint(0, USERS, (BATCH,), generator=generator)
    if kind == "bags":  # the last position is where the last bag ends: for hist_offsets alone
        bounds = torch.tensor([0, 0, 2, 5, 5, 6, 9])
        inputs |= {"hist_values": ids(9), "hist_offsets": bounds, "item_values": ids(9), "item_offsets": bounds[:-1].clone()}
    return inputs


class Steps:
    """The program so far, and one method for each family of operators, which adds a few steps to it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        drawn = self.random.random()
        self.kind = "packed" if drawn < 0.2 else "single" if drawn < 0.35 else "looked up" if drawn < 0.45 else "bags" if drawn < 0.55 else "rows"
        self.program = Program(self.kind)
        self.example = example_inputs(self.kind, torch.Generator().manual_seed(seed))
        self.values = read_inputs(self.example, self.kind)
        self.owner = len(self.values) - 1 if self.kind == "looked up" else None
        self.bags = {n: i for i, n in enumerate(self.example) if n.endswith(("_values", "_offsets"))}
        self.of_bags: dict[str, int] = {}  # what an embedding bag of each side made last
        self.recent: list[int] = []

    # ---- choosing operands ----
    def floats(self, rank: int | None = None) -> list[int]:
        return [
            i for i, v in enumerate(self.values) if v.is_floating_point() and (rank is None or v.dim() == rank) and v.dim() > 0
        ]

    def ids(self) -> list[int]:
        return [i for i, v in enumerate(self.values) if v.dtype == torch.int64 and i != self.owner and i not in self.bags.values()]

    def pick(self, candidates: list[int]) -> int:
        if not candidates:
            raise LookupError
        late = candidates[-6:]
        return self.random.choice(late if self.random.random() < 0.6 else candidates)

    def pick_rows(self, candidates: list[int]) -> int:
        """One whose first axis is a batch: after a transposition constant positions of axis 1 are rows, which a smaller batch lacks."""
        i = self.pick(candidates)
        of_users = {"single": 1, "looked up": USERS}.get(self.kind, BATCH)
        if self.values[i].shape[0] % BATCH and self.values[i].shape[0] != of_users:
            raise LookupError
        return i

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
        ids = self.ids()
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
            i = self.pick_rows([j for j in self.floats() if self.values[j].dim() >= 2])
            index = torch.tensor([0, self.values[i].shape[1] - 1])
            self.add(lambda v: v.index_select(1, index), [i])
        else:
            i = self.pick_rows(self.floats(2))
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
