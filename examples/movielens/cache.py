"""Remembers from which sources a file was made, so that a second run does not make it again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def key(sources: Iterable[Path], *versions: str) -> str:
    """Changes with the contents of the sources and with the versions."""
    digest = hashlib.sha256("\n".join(versions).encode())
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def is_current(file: Path, wanted: str) -> bool:
    stamp = _stamp(file)
    return file.is_file() and stamp.is_file() and stamp.read_text() == wanted


def mark_current(file: Path, made_from: str) -> None:
    _stamp(file).write_text(made_from)


def _stamp(file: Path) -> Path:
    return file.with_name(file.name + ".key")
