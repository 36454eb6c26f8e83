"""What the four package modules share: an entry of the zoo, and example tensors with a user and a candidate side."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any, Callable

import torch

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


def perturb(module: torch.nn.Module) -> None:
    """Initial weights are often zero, constant or tiny, and a model then scores everybody alike."""
    random = generator()
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            scale = 0.5 if parameter.dim() > 1 and parameter.std() < 0.02 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=random, dtype=parameter.dtype) * scale)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(torch.randn(buffer.shape, generator=random) * 0.1)
            if name.endswith("running_var"):
                buffer.mul_(1 + torch.rand(buffer.shape, generator=random))
