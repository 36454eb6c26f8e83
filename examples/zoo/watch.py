"""What of a program's arithmetic is request-only, found by changing inputs and watching every value.

Nothing of the transform's own analysis is used: a program is interpreted node by node on some inputs, then again with other
candidates, other users and, after the transform, another mapping. A value that follows users but no candidates is
request-only; after the transform, one that follows the mapping as well is held at the candidate batch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

import ikbo  # noqa: F401  registers the operators of transformed archives

USERS, CANDIDATES = 16, 48
TRIES = 2  # runs with changed inputs of each kind

# Move, copy or look up without computing.
_NO_ARITHMETIC = {
    "view", "reshape", "_unsafe_view", "slice", "select", "cat", "stack", "expand", "clone", "unsqueeze", "squeeze", "transpose",
    "permute", "t", "embedding", "index", "index_select", "gather", "getitem", "split", "split_with_sizes", "chunk", "unbind",
    "_to_copy", "to", "alias", "detach", "contiguous", "repeat", "repeat_interleave", "broadcast", "flatten", "zeros", "ones",
    "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "arange", "sym_size", "dropout", "flip", "narrow",
    "lift_fresh_copy", "empty", "constant_pad_nd", "select_scatter", "slice_scatter", "masked_select", "scatter",
}  # fmt: skip
_REDUCES = {"sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "cumsum", "norm", "linalg_vector_norm", "logsumexp"}


def _name(target: Any) -> str:
    text = str(target)
    return text.split(".")[1] if text.startswith(("aten.", "ikbo.")) else getattr(target, "__name__", text)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


class Watcher(torch.fx.Interpreter):
    """Runs a program and keeps what every operator made and what it cost."""

    def __init__(self, module: torch.fx.GraphModule, counts: bool) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.counts = counts
        self.values: dict[str, list[torch.Tensor]] = {}
        self.cost: dict[str, int] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if not self.counts:
            result = super().run_node(n)
            self.values[n.name] = _tensors(result)
            return result
        counter = FlopCounterMode(display=False)
        with counter:
            result = super().run_node(n)
        made = _tensors(result)
        name = _name(n.target)
        cost = counter.get_total_flops()
        if not cost and name not in _NO_ARITHMETIC and any(t.is_floating_point() for t in made):
            source = _tensors([self.env[a] for a in n.all_input_nodes if a in self.env]) if name in _REDUCES else made
            cost = sum(t.numel() for t in source)
        self.values[n.name] = made
        self.cost[n.name] = int(cost)
        return result


Sides = dict[str, str]


class Program:
    """An archive with the side of each of its inputs: for a packed matrix, of each column."""

    def __init__(self, path: Path, request_only: list[str]) -> None:
        extra = {"ikbo.json": ""}
        exported = torch.export.load(str(path), extra_files=extra)
        self.module = exported.module()
        arguments, keywords = exported.example_inputs
        assert not keywords
        self.example, self.spec = tree_flatten(tuple(arguments))
        self.names = list(exported.graph_signature.user_inputs)
        specification = json.loads(extra["ikbo.json"]) if extra["ikbo.json"] else None
        self.transformed = specification is not None
        self.user_columns: dict[int, list[bool]] = {}
        self.sides: list[str] = []
        if specification is not None:
            by_value = {i["value"]: i["side"] for i in specification["inputs"]}
            self.sides = [by_value[n] for n in self.names]
            return
        for position, name in enumerate(self.names):
            ranges = [p for p in request_only if p.startswith("X[:,")]
            if ranges:
                marks = [False] * self.example[position].shape[1]
                for text in ranges:
                    start, end = (int(v) for v in text[4:-1].split(":"))
                    marks[start:end] = [True] * (end - start)
                self.user_columns[position] = marks
                self.sides.append("packed")
            else:
                self.sides.append("request-only" if any(name == f"x_{p}" for p in request_only) else "candidate")

    def inputs(self, seed: int = 0) -> list[torch.Tensor]:
        """The example's rows, drawn anew: as many users and candidates as the constants say."""
        random = torch.Generator().manual_seed(seed)
        drawn = []
        for tensor, side in zip(self.example, self.sides):
            if side == "index":
                drawn.append(torch.randint(0, USERS, (CANDIDATES,), generator=random, dtype=torch.int32))
            else:
                rows = USERS if side == "request-only" else CANDIDATES
                drawn.append(tensor[torch.randint(0, len(tensor), (rows if self.transformed else USERS,), generator=random)])
        return drawn

    def changed(self, inputs: list[torch.Tensor], what: str, seed: int) -> list[torch.Tensor]:
        """The rows of each tensor (of each column of a packed one) of that side, reordered independently."""
        random = torch.Generator().manual_seed(1000 + seed)
        shuffle: Callable[[torch.Tensor], torch.Tensor] = lambda t: t[torch.randperm(len(t), generator=random)]
        result = []
        for position, (tensor, side) in enumerate(zip(inputs, self.sides)):
            if side == what:
                tensor = shuffle(tensor)
            elif side == "packed":
                columns = self.user_columns[position]
                wanted = [i for i, user in enumerate(columns) if user == (what == "request-only")]
                tensor = tensor.clone()
                tensor[:, wanted] = shuffle(tensor[:, wanted])
            result.append(tensor)
        return result

    def call(self, inputs: list[torch.Tensor]) -> Any:
        return self.module(*tree_unflatten(inputs, self.spec))

    def watch(self, inputs: list[torch.Tensor], counts: bool = False) -> Watcher:
        watcher = Watcher(self.module, counts)
        with torch.no_grad():
            watcher.run(*tree_unflatten(inputs, self.spec))
        return watcher


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b))


def _followers(program: Program, base: Watcher, inputs: list[torch.Tensor], what: str) -> set[str]:
    """Operators whose values change with the inputs of one side."""
    moved: set[str] = set()
    for seed in range(TRIES):
        other = program.watch(program.changed(inputs, what, seed))
        moved |= {name for name, value in base.values.items() if not _same(value, other.values.get(name, []))}
    return moved


def request_only_arithmetic(program: Program) -> tuple[float, float]:
    """Operations a row: request-only ones, and among these those at the candidate batch (none before the transform)."""
    inputs = program.inputs()
    base = program.watch(inputs, counts=True)
    by_candidate = _followers(program, base, inputs, "candidate")
    by_user = _followers(program, base, inputs, "request-only")
    only_user = by_user - by_candidate
    if not program.transformed:
        return sum(base.cost[n] for n in only_user) / USERS, 0.0
    by_mapping = _followers(program, base, inputs, "index")
    return (
        sum(base.cost[n] for n in only_user - by_mapping) / USERS,
        sum(base.cost[n] for n in only_user & by_mapping) / CANDIDATES,
    )
