"""Random programs: what ranking models are made of, and what raw exports of them contain."""

from __future__ import annotations

import random
from typing import Callable

import torch
import torch.nn.functional as F

from random_steps import BATCH, USERS, VOCABULARY, WIDTH, Steps


class RankingSteps(Steps):
    """Families of steps that are several operators each."""

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
        counts = [i for i in self.ids() if self.values[i].shape == (BATCH,)]
        ids = [i for i in self.ids() if self.values[i].shape == (BATCH, length)]
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

    def spread_rows(self) -> None:
        """A request-only value over the candidates, as models do that have it once (CASES 21)."""
        if self.owner is not None:
            i = self.pick([j for j in self.floats() if self.values[j].shape[0] == USERS])
            look_up = self.random.choice([lambda v, o: v[o], lambda v, o: v.index_select(0, o.view(-1))])
            self.add(look_up, [i, self.owner])
            return
        row = self.pick([j for j in self.floats() if self.values[j].shape[0] == 1])
        shape = self.values[row].shape
        like = [j for j in self.floats(len(shape)) if self.values[j].shape[0] == BATCH]
        ones = [1] * (len(shape) - 1)
        other = self.pick(like)
        vector = [j for j in like if self.values[j].shape[1:] == shape[1:]]
        functions: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
            lambda v, o: v.expand(o.shape[0], *shape[1:]), lambda v, o: v.repeat(o.shape[0], *ones),
            lambda v, o: torch.tile(v, (o.shape[0], *ones)), lambda v, o: v.squeeze(0).unsqueeze(0).expand(o.shape[0], *shape[1:]),
            lambda v, o: v[0].expand(o.shape[0], *shape[1:]), lambda v, o: v.repeat_interleave(o.shape[0], dim=0),
        ]  # fmt: skip
        meet: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
            torch.mul, torch.add, lambda v, o: v.expand_as(o) - o, lambda v, o: o * v[0], lambda v, o: torch.where(v > 0, o, v),
            lambda v, o: o * torch.sigmoid(v.mean()) + v.amax(),
        ]  # fmt: skip
        if len(shape) == 2:
            meet += [lambda v, o: o @ v.t(), lambda v, o: (v @ o.t()).t(), lambda v, o: (o @ v[0]).unsqueeze(1)]
            meet += [lambda v, o: torch.einsum("bd,cd->bc", o, v), lambda v, o: (o - v[0, 0]) * v.squeeze(0)[1]]
        if vector and self.random.random() < 0.5:
            self.add(self.random.choice(meet), [row, self.pick(vector)])
        else:
            self.add(self.random.choice(functions), [row, other])

    def write(self) -> None:
        """Operators that work in place, through a view too: raw exports have them."""
        i = self.pick([j for j in self.floats() if self.values[j].dim() >= 2])
        at = self.random.randrange(self.values[i].shape[1])

        def through_a_view(v: torch.Tensor) -> torch.Tensor:
            copy = v.clone()
            copy[:, at].mul_(2.0)
            return copy

        def through_a_slice(v: torch.Tensor) -> torch.Tensor:
            copy = v * 1.0
            copy[:, at:] = copy[:, at:].tanh()
            return copy

        functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda v: v.clone().relu_(), lambda v: (v * 2.0).add_(1.0).tanh_(), through_a_view, through_a_slice,
            lambda v: v.clone().masked_fill_(v > 0, 0.5), lambda v: v.clone().transpose(0, 1).neg_().transpose(0, 1),
        ]  # fmt: skip
        self.add(self.random.choice(functions), [i])

    def costly(self) -> None:
        """What mode `ikbo` replaces by cheaper operators."""
        fields = [i for i in self.floats(3) if self.values[i].shape[0] == BATCH]
        if self.random.random() < 0.4:
            i = self.pick([j for j in self.floats(2) if self.values[j].shape[0] == BATCH])
            weight = self.parameter(3, self.values[i].shape[1])
            columns: list[Callable[[torch.Tensor], torch.Tensor]] = [
                lambda v: (weight @ v.unsqueeze(2)).squeeze(2), lambda v: v.unsqueeze(2) @ v[:, :1].unsqueeze(2),
                lambda v: v.unsqueeze(2) @ v.unsqueeze(1),
            ]  # fmt: skip
            self.add(self.random.choice(columns), [i])
            return
        i = self.pick(fields)
        count, width = self.values[i].shape[1:]
        mask = torch.ones(count, count).triu(1).bool()
        positions = torch.tensor([self.random.randrange(count) for _ in range(3)])
        matrices = self.parameter(count, width, 2)
        chosen: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda v: v.cumsum(1)[:, positions], lambda v: torch.matmul(v.unsqueeze(2), matrices).squeeze(2),
            lambda v: torch.matmul(matrices.transpose(1, 2), v.unsqueeze(3)).squeeze(3),
        ]  # fmt: skip
        if count > 1:
            pairs = count * (count - 1) // 2
            chosen.append(lambda v: torch.masked_select(v @ v.transpose(1, 2), mask).view(-1, pairs))
        self.add(self.random.choice(chosen), [i])

    def bag(self) -> None:
        ids = [i for i in self.ids() if self.values[i].dim() == 2]
        kind = self.random.choice(["sum", "mean", "max"])
        padding = 0 if kind != "max" and self.random.random() < 0.4 else None
        if self.bags and self.random.random() < 0.8:
            side = "hist" if not self.of_bags else self.random.choice(["hist", "item"])
            table = self.layer(torch.nn.EmbeddingBag(VOCABULARY, WIDTH, mode=kind, padding_idx=padding, include_last_offset=side == "hist"))
            scale = self.layer(torch.nn.Embedding(VOCABULARY, 1))
            forms: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
                lambda v, o: table(v, o), lambda v, o: table((v * 3 + 1) % VOCABULARY, o),
            ]  # fmt: skip
            if kind == "sum":
                forms.append(lambda v, o: table(v, o, torch.sigmoid(scale(v)).squeeze(-1)))
            self.of_bags[side] = self.add(self.random.choice(forms), [self.bags[f"{side}_values"], self.bags[f"{side}_offsets"]])
            return
        self.add(self.layer(torch.nn.EmbeddingBag(VOCABULARY, WIDTH, mode=kind, padding_idx=padding)), [self.pick(ids)])
