"""Runs the zoo over what export.py made: checks every configuration, measures it, and writes the table.

usage: zoo.py ARCHIVES [--packages a,b] [--only TEXT] [--check] [--measure] [--table DOC JSON]
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import torch  # noqa: E402

import check  # noqa: E402
import forked  # noqa: E402
import table  # noqa: E402

CHECK_FILE, MEASURE_FILE = "check.json", "measure.json"


def folders(arguments: argparse.Namespace) -> list[Path]:
    packages = arguments.packages.split(",") if arguments.packages else sorted(p.name for p in arguments.archives.iterdir())
    names = arguments.names.split(";") if arguments.names else None
    found = []
    for package in packages:
        for folder in sorted((arguments.archives / package).iterdir()):
            if not (folder / "functional.pt2").is_file() or arguments.only.lower() not in folder.name.lower():
                continue
            if names is None or json.loads((folder / "export.json").read_text())["name"] in names:
                found.append(folder)
    return found


def is_current(folder: Path, file: str) -> bool:
    path = folder / file
    return path.is_file() and json.loads(path.read_text()).get("stamp") == check.stamp(folder)


def check_one(folder: Path, quick: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        result = check.check(folder, quick)
    except Exception:  # noqa: BLE001
        result = {"stamp": check.stamp(folder), "error": traceback.format_exc()[-2000:]}
    (folder / CHECK_FILE).write_text(json.dumps(result, indent=1))


def check_all(todo: list[Path], jobs: int, quick: bool) -> None:
    def done(number: int, folder: Path, how: str, seconds: float) -> None:
        if not is_current(folder, CHECK_FILE):
            (folder / CHECK_FILE).write_text(json.dumps({"stamp": check.stamp(folder), "error": f"the check {how}"}))
        said = table.verdict(json.loads((folder / CHECK_FILE).read_text()))
        print(f"  check {number}/{len(todo)} {folder.parent.name}/{folder.name}: {said} ({seconds:.0f} s)", flush=True)

    forked.each(todo, lambda folder: check_one(folder, quick), done, jobs, check.SECONDS)


def measure_all(todo: list[Path], seconds: float, threads: int) -> None:
    for number, folder in enumerate(todo, 1):
        result = check.measure(folder, seconds, threads)
        (folder / MEASURE_FILE).write_text(json.dumps(result, indent=1))
        said = result.get("message") or ", ".join(f"{m} {result[m] / 1e3:.2f} ms" for m in check.MODES)
        print(f"  measure {number}/{len(todo)} {folder.parent.name}/{folder.name}: {said}", flush=True)


def read(folder: Path, file: str) -> dict[str, Any]:
    path = folder / file
    return json.loads(path.read_text()) if path.is_file() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", type=Path)
    parser.add_argument("--packages", default="")
    parser.add_argument("--only", default="", help="configurations whose folder's name holds this text")
    parser.add_argument("--names", default="", help="exactly these configurations, by semicolons")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true", help="without counting the request-only arithmetic")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--again", action="store_true", help="also what is current")
    parser.add_argument("--jobs", type=int, default=2, help="configurations checked at the same time")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring each")
    parser.add_argument("--threads", type=int, default=1, help="of a measured model")
    parser.add_argument("--table", nargs=2, type=Path, metavar=("DOC", "JSON"))
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a check failed")
    arguments = parser.parse_args()
    chosen = folders(arguments)
    if not chosen:
        print("nothing is exported for these names", file=sys.stderr)
        return 2
    if arguments.check:
        check_all([f for f in chosen if arguments.again or not is_current(f, CHECK_FILE)], arguments.jobs, arguments.quick)
    if arguments.measure:
        stale = [f for f in chosen if arguments.again or not is_current(f, MEASURE_FILE)]
        measure_all(stale, arguments.seconds, arguments.threads)
    rows = table.rows(arguments.archives, chosen, CHECK_FILE, MEASURE_FILE)
    print(table.summary(rows))
    if arguments.table:
        table.write(rows, *arguments.table)
    names = {(f.parent.name, read(f, "export.json")["name"]) for f in chosen}
    failed = [r for r in rows if (r["package"], r["name"]) in names and (not r["passed"] or r.get("raw") == "wrong")]
    return 1 if arguments.strict and failed else 0


if __name__ == "__main__":
    sys.exit(main())
