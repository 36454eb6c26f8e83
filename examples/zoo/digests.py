"""What a result depends on, by contents: results are kept as long as none of it changes, whatever is built anew."""

from __future__ import annotations

import functools
import hashlib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of the command, without the transform: what an archive does when it runs, and how it is verified and measured.
_BEHAVIOUR = ("graph", "ops", "runtime", "cli")
_NO_SOURCES = ("ops/cuda", "cli/transform.cc", "cli/spec.cc", "cli/inspect.cc")


def _of(parts: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def archive(path: Path) -> str:
    """Names and checksums of what an archive holds: not where it lies, nor the name that its members begin with."""
    with zipfile.ZipFile(path) as members:
        return _of([f"{m.filename.partition('/')[2]} {m.CRC:x} {m.file_size}".encode() for m in members.infolist()])


@functools.cache
def behaviour(*checks: str) -> str:
    """The sources that the runtime is built of, and those of this folder that are named."""
    paths = [p for folder in _BEHAVIOUR for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".cc", ".cpp", ".h")]
    names = [p.relative_to(ROOT).as_posix() for p in paths]
    kept = [p for p, name in zip(paths, names) if not name.startswith(_NO_SOURCES)]
    return _of([p.read_bytes() for p in (*kept, *(ROOT / "examples/zoo" / name for name in checks))])
