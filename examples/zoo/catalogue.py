"""What the four package modules share: an entry of the zoo, and example tensors with a user and a candidate side."""

from __future__ import annotations

import copy
import sys
import types
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch.utils._pytree import tree_leaves

BATCH = 16  # of the example that a model is exported with
HISTORY = 50  # entries of a user's history

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Example:
    """A model ready to export, what it is called with, and which of it belongs to the request."""

    module: torch.nn.Module
    inputs: Inputs | torch.Tensor  # the first argument: named tensors, or one packed matrix
    request_only: list[str]  # as --request-only takes them


@dataclass(frozen=True)
class Entry:
    """One configuration. `build` does all the work, so that a model that cannot be built costs nobody else."""

    name: str
    build: Callable[[], Example]


@dataclass(frozen=True)
class Column:
    """A feature of a packed matrix: its name, width and side, and how its values are drawn."""

    name: str
    width: int
    user: bool
    draw: Callable[[], torch.Tensor]  # (BATCH, width)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


_random = generator()


def ids(vocabulary: int, *shape: int, first: int = 1) -> torch.Tensor:
    return torch.randint(first, vocabulary, (BATCH, *shape), generator=_random)


def history(vocabulary: int, padding: int = 0, length: int = HISTORY) -> torch.Tensor:
    """Valid prefixes of all lengths from 1 to `length`, then padding; the first row is full, so that ranges show."""
    rows = torch.randint(1, vocabulary - 1, (BATCH, length), generator=_random)
    lengths = torch.randint(1, length + 1, (BATCH, 1), generator=_random)
    lengths[0] = length
    return torch.where(torch.arange(length) < lengths, rows, padding)


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(BATCH, *shape, generator=_random)


def pack(columns: list[Column], name: str = "X", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[str]]:
    """The packed matrix, and the ranges of its columns that belong to the user."""
    ranges: list[tuple[int, int]] = []
    start = 0
    for column in columns:
        end = start + column.width
        if column.user:
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((start, end))
        start = end
    matrix = torch.cat([column.draw().reshape(BATCH, column.width).to(dtype) for column in columns], dim=1)
    return matrix, [f"{name}[:,{a}:{b}]" for a, b in ranges]


def stub_modules(*names: str, **attributes: Any) -> None:
    """Empty modules for what a package imports but never needs at inference."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        for key, value in attributes.items():
            setattr(module, key, value)
        sys.modules.setdefault(name, module)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, sys.modules[name])


MOVES = 1e-4  # of the scores: what changes less than that may be rounding
MOVED = 0.25  # of the rows, when their order changes
STRENGTHS = (1.0, 0.3, 0.1, 0.03)  # of the perturbation: what is too strong saturates a score


def perturb(module: torch.nn.Module, strength: float = 1.0) -> None:
    """Initial weights are often zero, constant or tiny, and a model then scores everybody alike."""
    random = generator()
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            if not (parameter.abs() < 1e6).all():  # memory that the package never initialised
                parameter.zero_()
            scale = 0.5 if parameter.dim() > 1 and parameter.std() < 0.02 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=random, dtype=parameter.dtype) * scale * strength)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(torch.randn(buffer.shape, generator=random) * 0.1 * strength)
            if name.endswith("running_var"):
                buffer.mul_(1 + torch.rand(buffer.shape, generator=random) * strength)


def _scores(module: torch.nn.Module, inputs: Inputs | torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return [t for t in tree_leaves(module(inputs)) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _mixed(example: Example, user: bool) -> Inputs | torch.Tensor:
    """The example with the rows of one side in another order."""
    order = torch.randperm(BATCH, generator=generator())
    if isinstance(example.inputs, torch.Tensor):
        columns = torch.zeros(example.inputs.shape[1], dtype=torch.bool)
        for text in example.request_only:
            start, end = (int(v) for v in text[text.index(",") + 1 : -1].split(":"))
            columns[start:end] = True
        return torch.where(columns == user, example.inputs[order], example.inputs)
    return {k: v[order] if (k in example.request_only) == user else v for k, v in example.inputs.items()}


def is_alive(example: Example) -> bool:
    """Each side moves scores that are numbers: else a comparison would show nothing."""
    base = _scores(example.module, example.inputs)
    if not base or not all(t.isfinite().any() for t in base):
        return False

    def moves(user: bool) -> bool:
        other = _scores(example.module, _mixed(example, user))
        moved = [(a - b).nan_to_num().abs() > MOVES * a.nan_to_num().abs().max() for a, b in zip(base, other)]
        return any(t.double().mean() > MOVED for t in moved)

    return moves(True) and moves(False)


def perturb_alive(example: Example) -> float:
    """Perturbs the weights as strongly as leaves the model alive, and says how strongly."""
    before = copy.deepcopy(example.module.state_dict())
    for strength in STRENGTHS:
        example.module.load_state_dict(before)
        perturb(example.module, strength)
        if is_alive(example):
            break
    return strength
