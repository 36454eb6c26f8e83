"""Builds and exports every configuration of one package: raw, and after run_decompositions({}).

Each is done in a process of its own, forked after the imports, so that what crashes or hangs costs itself alone. What is
there already is kept. For each, FOLDER/<name>/ gets raw.pt2, functional.pt2 and export.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

import forked
from catalogue import Entry, perturb_alive

MAX_BATCH = 65536
SECONDS = 300  # that one export may take
STATUS_FILE = "export.json"


def slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def class_of(module: torch.nn.Module) -> str:
    """The package's class, inside what this folder wraps around it."""
    while type(module).__module__.startswith("models_"):
        module = module.model  # type: ignore[assignment]
    return type(module).__name__


def export_one(entry: Entry, folder: Path) -> dict[str, Any]:
    status: dict[str, Any] = {"name": entry.name, "stage": "build"}
    try:
        torch.manual_seed(0)
        example = entry.build()
        module = example.module.eval()
        status["class"] = class_of(module)
        status["request_only"] = example.request_only
        status["stage"] = "run"
        status["perturbation"] = perturb_alive(example)
        status["stage"] = "export"
        batch = Dim("batch", max=MAX_BATCH)
        packed = isinstance(example.inputs, torch.Tensor)
        shapes = {0: batch} if packed else {name: {0: batch} for name in example.inputs}
        program = torch.export.export(module, (example.inputs,), dynamic_shapes=(shapes,))
        torch.export.save(program, folder / "raw.pt2")
        status["stage"] = "decompose"
        torch.export.save(program.run_decompositions({}), folder / "functional.pt2")
        status["stage"] = "done"
    except Exception as error:  # noqa: BLE001
        status["reason"] = reason(error)
        status["trace"] = traceback.format_exc()[-3000:]
    return status


def child(entry: Entry, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    (folder / STATUS_FILE).write_text(json.dumps(export_one(entry, folder), indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="configurations whose name holds this text")
    parser.add_argument("--names", default="", help="exactly these configurations, by semicolons")
    parser.add_argument("--again", action="store_true", help="those that failed are tried again")
    parser.add_argument("--jobs", type=int, default=2, help="configurations exported at the same time")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module = importlib.import_module(f"models_{arguments.package}")
    entries = [e for e in module.entries() if arguments.only.lower() in e.name.lower()]
    if arguments.names:
        wanted = arguments.names.split(";")
        entries = [e for e in entries if e.name in wanted]
    todo = []
    for entry in entries:
        folder = arguments.folder / slug(entry.name)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / STATUS_FILE
        if not file.is_file() or (arguments.again and json.loads(file.read_text())["stage"] != "done"):
            file.unlink(missing_ok=True)
            todo.append((entry, folder))

    def done(number: int, item: tuple[Entry, Path], how: str, seconds: float) -> None:
        entry, folder = item
        file = folder / STATUS_FILE
        if not file.is_file():
            file.write_text(json.dumps({"name": entry.name, "stage": "export", "reason": how}))
        status = json.loads(file.read_text())
        said = "exported" if status["stage"] == "done" else f"{status['stage']} failed: {status.get('reason')}"
        print(f"  {arguments.package} {number}/{len(todo)} {entry.name}: {said} ({seconds:.0f} s)", flush=True)

    forked.each(todo, lambda item: child(*item), done, arguments.jobs, SECONDS)


if __name__ == "__main__":
    sys.exit(main())
