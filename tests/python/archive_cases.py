"""Models whose archives show every form of call and of weight that archives have."""

import collections
import dataclasses
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.export import Dim


@dataclasses.dataclass
class Case:
    """A model and how it is called: `call` makes (args, kwargs) for a batch size."""

    model: nn.Module
    call: Callable[[int], tuple]
    dynamic: Any
    paths: Optional[list] = None  # expected UserInput.path
    names: Optional[list] = None


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        return self.linear(torch.cat([self.embedding(x["user_id"]), self.embedding(x["item_id"])], 1))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, dense, ids, unused):
        return self.linear(dense) * ids.unsqueeze(1)


class Keywords(nn.Module):
    def forward(self, a, n, *, mask=None, options=None, more):
        y = a * n if mask is None else a * mask
        return y + more["deep"][0] + more["deep"][1]


class Nested(nn.Module):
    def forward(self, xs, pair):
        (a, (b, c)) = xs
        return a + b * c + pair["left"] - pair["right"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        base = torch.randn(6, 4)
        self.register_buffer("all", base)
        self.register_buffer("rows", base[2:5])
        self.register_buffer("column", base[:, 1])

    def forward(self, x):
        return self.decode(self.encode(x)) + self.all.sum() + self.rows.mean() * self.column.sum()


class View(nn.Module):
    """Weights that are views of storages larger than they are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16)[:, :4])
        self.register_buffer("middle", torch.randn(100)[40:43])
        self.register_buffer("transposed", torch.randn(4, 3).t())

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.middle) + torch.nn.functional.linear(x, self.transposed)


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.randn(4), persistent=False)
        self.table = torch.randn(4)

    def forward(self, x):
        return x * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.table


class Types(nn.Module):
    def __init__(self):
        super().__init__()
        self.f16 = nn.Parameter(torch.randn(3).half())
        self.bf16 = nn.Parameter(torch.randn(3).bfloat16())
        self.f64 = nn.Parameter(torch.randn(3).double())
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("i8", torch.randint(-128, 127, (3,), dtype=torch.int8))
        self.register_buffer("u8", torch.randint(0, 255, (3,), dtype=torch.uint8))
        self.register_buffer("i16", torch.randint(-99, 99, (3,), dtype=torch.int16))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("empty_too", torch.zeros(2, 0))
        self.register_buffer("u16", torch.tensor([1, 2, 65535], dtype=torch.uint16))
        self.register_buffer("f8", torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e5m2))
        self.register_buffer("c64", torch.randn(3, dtype=torch.complex64))

    def forward(self, x, half, flags, word, eight):
        y = x * self.f16 + self.bf16 + self.f64 + self.scalar + self.frozen + self.i8 + self.u8 + self.i16
        y = torch.where(self.flags & flags, y, half) + self.empty.sum() + self.empty_too.sum()
        return y + self.u16.float() + self.f8.float() + self.c64.real + word.float() + eight.float()


class Integers(nn.Module):
    def forward(self, x, k):
        return x * k


def _batched(shapes):
    return {name: {0: Dim("batch")} for name in shapes}


def ids(batch):
    return torch.randint(0, 20, (batch,))


def tower_case():
    return Case(
        Tower(),
        lambda b: (({"user_id": ids(b), "item_id": ids(b)},), {}),
        {"x": _batched(["user_id", "item_id"])},
        ["x['user_id']", "x['item_id']"],
        ["user_id", "item_id"],
    )


def _ordered_case():
    case = tower_case()
    case.call = lambda b: ((collections.OrderedDict(user_id=ids(b), item_id=ids(b)),), {})
    return case


BATCH = {0: Dim("batch")}
CASES = {
    "dict": tower_case,
    "ordered dict": _ordered_case,
    "plain": lambda: Case(
        Plain(),
        lambda b: ((torch.randn(b, 4), ids(b), torch.randn(b, 2)), {}),
        (BATCH, BATCH, BATCH),
        ["dense", "ids", "unused"],
        ["dense", "ids", "unused"],
    ),
    "keywords": lambda: Case(
        Keywords(),
        lambda b: (
            (torch.randn(b, 3), 3),
            {"mask": torch.randn(b, 3), "options": None, "more": {"deep": [torch.randn(b, 3), torch.randn(b, 3)]}},
        ),
        {"a": BATCH, "n": None, "mask": BATCH, "options": None, "more": {"deep": [BATCH, BATCH]}},
        ["a", "mask", "more['deep'][0]", "more['deep'][1]"],
        ["a", "mask", "deep_0", "deep_1"],
    ),
    "constants in the call": lambda: Case(
        Keywords(),
        lambda b: ((torch.randn(b, 3), 2.5), {"options": "text", "more": {"deep": (torch.randn(b, 3), 7)}}),
        {"a": BATCH, "n": None, "options": None, "more": {"deep": (BATCH, None)}},
        ["a", "more['deep'][0]"],
        ["a", "deep_0"],
    ),
    "nested": lambda: Case(
        Nested(),
        lambda b: (([torch.randn(b), (torch.randn(b), torch.randn(b))], {"left": torch.randn(b), "right": torch.randn(b)}), {}),
        ([BATCH, (BATCH, BATCH)], {"left": BATCH, "right": BATCH}),
        ["xs[0]", "xs[1][0]", "xs[1][1]", "pair['left']", "pair['right']"],
        ["xs_0", "xs_1_0", "xs_1_1", "left", "right"],
    ),
    "tied": lambda: Case(Tied(), lambda b: ((torch.randn(b, 4),), {}), (BATCH,)),
    "views": lambda: Case(View(), lambda b: ((torch.randn(b, 4),), {}), (BATCH,)),
    "constants": lambda: Case(Constants(), lambda b: ((torch.randn(b, 4),), {}), (BATCH,)),
    "types": lambda: Case(
        Types(),
        lambda b: (
            (
                torch.randn(b, 3),
                torch.randn(b, 3).half(),
                torch.rand(b, 3) > 0.5,
                torch.randint(0, 9, (b, 3)).to(torch.uint16),
                torch.randn(b, 3).to(torch.float8_e5m2),
            ),
            {},
        ),
        (BATCH, BATCH, BATCH, BATCH, BATCH),
    ),
}
