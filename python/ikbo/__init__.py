"""Operators for ranking models whose request-only inputs keep one row a request.

``import ikbo`` registers ``torch.ops.ikbo.*``, which archives written by ``ikbo transform`` need before
``torch.export.load`` can read them. Model authors can call :func:`broadcast` and :func:`linear` directly, in
training too: gradients, ``torch.export`` and ``torch.compile`` are supported.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional, Sequence

if TYPE_CHECKING:
    import torch

__all__ = ["broadcast", "library_path", "linear"]
__version__ = "0.1.0"

_TORCH_VERSION = "2.11"
_LIBRARY = "libikbo_ops.so"


def _find_library() -> Path:
    package = Path(__file__).resolve().parent
    if (package / _LIBRARY).is_file():
        return package / _LIBRARY
    named = os.environ.get("IKBO_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise ImportError(f"ikbo: IKBO_LIBRARY names {named}, which is not a file")
        return Path(named).resolve()
    # A library built with the sanitizers ends any process that was not started with their runtime.
    builds = [path for path in package.parents[1].glob(f"build/*/ops/{_LIBRARY}") if "sanitize" not in path.parts[-3]]
    builds.sort(key=lambda path: path.stat().st_mtime)
    if not builds:
        raise ImportError(
            f"ikbo: {_LIBRARY} was not found beside {package}, in build/*/ops of {package.parents[1]} or through "
            "IKBO_LIBRARY; install the package with pip, or build the CMake target ikbo_ops"
        )
    return builds[-1]


def _load() -> Path:
    if importlib.util.find_spec("torch") is None:
        raise ImportError(f"ikbo needs PyTorch {_TORCH_VERSION}, which is not installed: pip install torch==2.11.0")
    import torch

    version = str(torch.__version__)
    if version.split("+")[0].split(".")[:2] != _TORCH_VERSION.split("."):
        raise ImportError(
            f"ikbo is built for PyTorch {_TORCH_VERSION}, but PyTorch {version} is installed: pip install torch==2.11.0"
        )
    path = _find_library()
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        raise ImportError(f"ikbo: {path} could not be loaded: {error}") from error
    return path


_library_path = _load()


def library_path() -> str:
    """Path of the loaded ``libikbo_ops.so``, for C++ programs and ahead-of-time packages that must load it too."""
    return str(_library_path)


def broadcast(x_user: torch.Tensor, candidate_to_user: torch.Tensor) -> torch.Tensor:
    """Looks up the row of each candidate's user: ``out[b] = x_user[candidate_to_user[b]]``.

    Args:
        x_user: ``(B_user, ...)``, any number of dimensions from one and any dense element type.
        candidate_to_user: int32 ``(B_cand,)`` with values in ``[0, B_user)``, in any order, with repeats; users
            without candidates are fine.

    Returns:
        Contiguous ``(B_cand, ...)``. The gradient of a user's row is the sum over its candidates.

    Raises:
        IndexError: a value of ``candidate_to_user`` is out of range (names position and value).
        TypeError, ValueError: an argument has the wrong element type, layout, device or shape.
    """
    import torch

    return torch.ops.ikbo.broadcast(x_user, candidate_to_user)


def linear(
    x_cand: torch.Tensor,
    w_cand: torch.Tensor,
    x_bcast: Sequence[torch.Tensor],
    w_bcast: Sequence[torch.Tensor],
    index: Sequence[torch.Tensor],
    bias: Optional[torch.Tensor] = None,
    activation: Literal["none", "relu", "sigmoid", "tanh", "silu", "gelu"] = "none",
) -> torch.Tensor:
    """A linear layer over concatenated features that never concatenates or replicates them.

    ``out[b] = act(W_cand x_cand[b] + sum_t W_t x_bcast[t][index[t][b]] + bias)``, which equals
    ``act(linear(cat([x_cand[b], x_bcast[0][index[0][b]], ...]), cat([W_cand, W_0, ...], 1), bias))``. Each
    ``x_bcast[t]`` is multiplied once at its own batch. Sums are kept in float32 (float64 for float64) and rounded once.
    A candidate's row is the same bit for bit whatever else is in the batch.

    Args:
        x_cand: ``(B_cand, K_cand)`` in float64, float32, bfloat16 or float16; ``K_cand`` may be 0.
        w_cand: ``(N, K_cand)``.
        x_bcast: for each broadcast term ``(B_t, K_t)``.
        w_bcast: for each broadcast term ``(N, K_t)``.
        index: for each broadcast term int32 ``(B_cand,)`` with values in ``[0, B_t)``.
        bias: ``(N,)`` or None.
        activation: applied last; ``gelu`` is the exact one.

    Returns:
        ``(B_cand, N)`` in the type of ``x_cand``.

    Raises:
        IndexError: an index value is out of range (names position and value).
        TypeError, ValueError: an argument has the wrong element type, layout, device or shape, or the activation is
            unknown.
    """
    import torch

    return torch.ops.ikbo.linear(x_cand, w_cand, list(x_bcast), list(w_bcast), list(index), bias, activation)
