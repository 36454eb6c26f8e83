"""Operators for ranking models whose request-only inputs keep one row a request.

``import ikbo`` registers ``torch.ops.ikbo.*``, which archives written by ``ikbo transform`` need before
``torch.export.load`` can read them. Model authors can call the functions below directly, in training too: gradients,
``torch.export`` and ``torch.compile`` are supported.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional, Sequence

from ikbo._configurations import use_configurations

if TYPE_CHECKING:
    import torch

__all__ = [
    "aligned_cat",
    "broadcast",
    "library_path",
    "linear",
    "linear_compression",
    "self_and_target_attention",
    "target_attention",
    "target_attention_lse",
    "use_configurations",
]
__version__ = "0.1.0"

_TORCH_VERSION = "2.11"
_LIBRARY = "libikbo_ops.so"
_CUDA_LIBRARY = "libikbo_ops_cuda.so"


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
        # Built where CUDA's compiler was asked for; PyTorch's build for the CPU alone has nothing it could run on.
        cuda = path.with_name(_CUDA_LIBRARY)
        if torch.version.cuda is not None and cuda.is_file():
            torch.ops.load_library(cuda)
    except (OSError, RuntimeError) as error:
        raise ImportError(f"ikbo: {path} could not be loaded: {error}") from error
    return path


_library_path = _load()


def library_path() -> str:
    """Path of the loaded ``libikbo_ops.so``, for C++ programs and ahead-of-time packages that must load it too."""
    return str(_library_path)


def aligned_cat(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """A concatenation whose rows begin at multiples of 16 bytes, as the copy engine of a GPU needs them.

    Equals ``torch.cat(tensors, dim)`` but for the strides: those of a tensor whose last dimension is the next multiple of
    16 bytes long. :func:`linear_compression` in 16 bits reads such a stack of embeddings in place where ``N`` is no
    multiple of 8, and copies any other first.

    Args:
        tensors: one or more of the same element type, two dimensions or more, and the same sizes but for ``dim``.
        dim: where they are put one behind the other: any but the last.

    Returns:
        A tensor of its own, contiguous where the rows are a multiple of 16 bytes long anyway. What lies behind a shorter
        row is unspecified.

    Raises:
        TypeError, ValueError: an argument has the wrong element type, layout, device or shape.
    """
    import torch

    return torch.ops.ikbo.aligned_cat(list(tensors), dim)


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


def linear_compression(
    w_cand: torch.Tensor,
    e_cand: torch.Tensor,
    w_bcast: Sequence[torch.Tensor],
    e_bcast: Sequence[torch.Tensor],
    index: Sequence[torch.Tensor],
    *,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Linear compression of an embedding stack that never concatenates or replicates embeddings.

    ``out[b] = W_cand E_cand[b] + sum_t W_t E_t[index[t][b]]``, which equals
    ``cat([W_cand, W_0, ...], 1) @ cat([E_cand[b], E_0[index[0][b]], ...], 0)``. Each ``W_t E_t`` is computed once at its
    own batch. Sums are kept in float32 (float64 for float64) and rounded once. A candidate's result is the same bit for
    bit whatever else is in the batch.

    Args:
        w_cand: ``(M, K_cand)`` in float64, float32, bfloat16 or float16; ``K_cand`` may be 0.
        e_cand: ``(B_cand, K_cand, N)``.
        w_bcast: for each broadcast term ``(M, K_t)``.
        e_bcast: for each broadcast term ``(B_t, K_t, N)``.
        index: for each broadcast term int32 ``(B_cand,)`` with values in ``[0, B_t)``, in any order.
        out_dtype: type of the result: that of ``e_cand`` (the default) or the one that sums are kept in.

    Returns:
        Contiguous ``(B_cand, M, N)``.

    Raises:
        IndexError: an index value is out of range (names position and value).
        TypeError, ValueError: an argument has the wrong element type, layout, device or shape.
    """
    import torch

    return torch.ops.ikbo.linear_compression(
        w_cand, e_cand, list(w_bcast), list(e_bcast), list(index), out_dtype=out_dtype
    )


def target_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    candidate_to_user: torch.Tensor,
    *,
    kv_lengths: Optional[torch.Tensor] = None,
    kv_offsets: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
) -> torch.Tensor:
    """The seeds of each candidate attend, without mask, to the history of the candidate's user, which is never copied.

    ``out[b] = softmax(scale * q[b] k[u]^T) v[u]`` for every head, with ``u = candidate_to_user[b]`` and only the valid
    rows of ``k[u]`` and ``v[u]``. Rows beyond them are not read. A candidate's result is the same bit for bit whatever
    else is in the batch.

    Args:
        q: ``(B_cand, n_seed, H_q, D)`` in float64, float32, bfloat16 or float16.
        k: ``(B_user, L, H_kv, D)``, or packed ``(sum of lengths, H_kv, D)`` with ``kv_offsets``; ``H_q`` is a multiple
            of ``H_kv``, and query head ``h`` reads key head ``h // (H_q / H_kv)``.
        v: as ``k``.
        candidate_to_user: int32 ``(B_cand,)`` with values in ``[0, B_user)``, in any order, with repeats.
        kv_lengths: int32 ``(B_user,)``, the valid prefix of each padded history; all of ``L`` where absent.
        kv_offsets: int32 ``(B_user + 1,)``, where each user's rows begin and end in packed histories.
        scale: factor of the logits, ``1 / sqrt(D)`` where absent.

    Returns:
        Contiguous ``(B_cand, n_seed, H_q, D)``; zeros for a user without history.

    Raises:
        IndexError: a value of ``candidate_to_user`` is out of range (names position and value).
        TypeError, ValueError: an argument has the wrong element type, layout, device or shape, lengths are outside
            ``[0, L]`` or offsets decrease.
    """
    import torch

    return torch.ops.ikbo.target_attention(
        q, k, v, candidate_to_user, kv_lengths=kv_lengths, kv_offsets=kv_offsets, scale=scale
    )


def target_attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    candidate_to_user: torch.Tensor,
    *,
    kv_lengths: Optional[torch.Tensor] = None,
    kv_offsets: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`target_attention` and the logarithm of the sum of the exponentials of each row's logits.

    Returns:
        The result of :func:`target_attention`, and ``(B_cand, n_seed, H_q)`` in float32 (float64 for float64), minus
        infinity for a user without history. Parts of a history combine exactly through it.
    """
    import torch

    return torch.ops.ikbo.target_attention_lse(
        q, k, v, candidate_to_user, kv_lengths=kv_lengths, kv_offsets=kv_offsets, scale=scale
    )


def self_and_target_attention(
    q_self: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    candidate_to_user: torch.Tensor,
    *,
    kv_lengths: Optional[torch.Tensor] = None,
    kv_offsets: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`target_attention`, and self-attention without mask of each user's rows over the same history, at once.

    Every row of a user's history has a query of its own in ``q_self`` and attends to the whole history, as the seeds of
    the user's candidates do: ``self_out[u] = softmax(scale * q_self[u] k[u]^T) v[u]``. Rows of ``q_self`` beyond a
    history are not read. A row's result is the same bit for bit whatever else is in the batch.

    Args:
        q_self: ``(B_user, L, H_q, D)``, or packed ``(sum of lengths, H_q, D)`` with ``kv_offsets``: a row for each row
            of ``k``.
        q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale: as in :func:`target_attention`.

    Returns:
        ``self_out``, contiguous, of the shape of ``q_self``, zeros in the rows beyond a history; and the result of
        :func:`target_attention`.

    Raises:
        IndexError, TypeError, ValueError: as :func:`target_attention`.
    """
    import torch

    return torch.ops.ikbo.self_and_target_attention(
        q_self, q, k, v, candidate_to_user, kv_lengths=kv_lengths, kv_offsets=kv_offsets, scale=scale
    )
