"""Configurations of kernels that ``ikbo tune`` measured and stored in a transformed archive."""

from __future__ import annotations

import json
import os
import zipfile
from typing import Any, Iterator, Union

_FILE = "/extra/ikbo.json"


def _stored(path: Union[str, os.PathLike]) -> list[dict[str, Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(_FILE)]
            if not names:
                raise ValueError(f"{path}: not transformed yet: run ikbo transform on it first")
            return json.loads(archive.read(names[0])).get("configurations", [])
    except (zipfile.BadZipFile, json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{path}: not an archive of ikbo transform: {error}") from error


def _devices(device: Any) -> Iterator[Any]:
    import torch

    if device is None:
        yield from (torch.device("cuda", i) for i in range(torch.cuda.device_count()))
        return
    named = torch.device(device)
    if named.type != "cuda":
        raise ValueError(f"device is {named}, expected cuda or cuda:N")
    yield torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)


def use_configurations(path: Union[str, os.PathLike], device: Any = None) -> int:
    """Makes the operators of this process use the kernels' configurations that ``ikbo tune`` stored in an archive.

    For models that ``torch.export.load`` loads; the command ``ikbo`` does the same by itself. From then on
    :func:`linear_compression` takes, for the sizes of ``W`` and ``E`` that were measured, the configuration of the
    nearest point. Results have the same bits with any. What was measured on a GPU of another name or number of
    multiprocessors is passed over.

    Args:
        path: a transformed archive (``.pt2``), tuned or not.
        device: ``"cuda"`` (the current GPU) or ``"cuda:N"``; all GPUs where absent.

    Returns:
        How many measured points are in use now, over all devices; 0 where there is no GPU.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no transformed archive, what it stores is damaged, or no kernel has such a configuration.
    """
    import torch

    devices = _stored(path)
    use = getattr(torch.ops.ikbo, "use_linear_compression_configs", None)
    if use is None or not torch.cuda.is_available():
        return 0
    targets = list(_devices(device))
    used = 0
    try:
        for target in targets:
            for measured in devices:
                for shape in measured["linear_compression"]:
                    points = shape["points"]
                    if use(
                        target,
                        measured["device"],
                        measured["multiprocessors"],
                        {"bfloat16": torch.bfloat16, "float16": torch.float16}[shape["dtype"]],
                        shape["m"],
                        shape["n"],
                        shape["k_candidate"],
                        shape["k_broadcast"],
                        [point["candidates"] for point in points],
                        [rows for point in points for rows in point["rows"]],
                        [point["block_m"] for point in points],
                        [point["cluster"] for point in points],
                    ):
                        used += len(points)
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: its configurations cannot be used: {error}") from error
    return used
