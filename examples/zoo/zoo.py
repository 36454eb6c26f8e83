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


def read(folder: Path, file: str) -> dict[str, Any]:
    path = folder / file
    return json.loads(path.read_text()) if path.is_file() else {}


def write(folder: Path, file: str, result: dict[str, Any]) -> None:
    part = folder / f"{file}.part"
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(folder / file)


def check_one(folder: Path, quick: bool, again: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        result = check.check(folder, quick, {} if again else read(folder, CHECK_FILE))
    except Exception:  # noqa: BLE001
        result = {"error": traceback.format_exc()[-2000:]}
    write(folder, CHECK_FILE, result)


def check_all(chosen: list[Path], arguments: argparse.Namespace) -> None:
    quick, again = arguments.quick, arguments.again
    todo = [f for f in chosen if again or not check.is_checked(read(f, CHECK_FILE), f, quick)]

    def done(number: int, folder: Path, how: str, seconds: float) -> None:
        if how != "ended with code 0":
            write(folder, CHECK_FILE, {"error": f"the check {how}"})
        said = table.verdict(read(folder, CHECK_FILE))
        print(f"  check {number}/{len(todo)} {folder.parent.name}/{folder.name}: {said} ({seconds:.0f} s)", flush=True)

    forked.each(todo, lambda folder: check_one(folder, quick, again), done, arguments.jobs, check.SECONDS)


def measure_all(chosen: list[Path], arguments: argparse.Namespace) -> None:
    todo = []
    for folder in chosen:
        checked, measured = read(folder, CHECK_FILE), read(folder, MEASURE_FILE)
        if not checked.get("transform", {}).get("passed"):
            (folder / MEASURE_FILE).unlink(missing_ok=True)
            continue
        stamp = check.measure_stamp(checked, arguments.seconds, arguments.threads)
        if arguments.again or measured.get("stamp") != stamp or "modes" not in measured:
            todo.append((folder, stamp))
    for number, (folder, stamp) in enumerate(todo, 1):
        result = check.measure(folder, stamp, arguments.seconds, arguments.threads)
        write(folder, MEASURE_FILE, result)
        times = ", ".join(f"{m} {v['us'] / 1e3:.2f} ms" for m, v in result.get("modes", {}).items())
        said = result.get("message") or f"{times}; load {result['load']}"
        print(f"  measure {number}/{len(todo)} {folder.parent.name}/{folder.name}: {said}", flush=True)


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
        check_all(chosen, arguments)
    if arguments.measure:
        measure_all(chosen, arguments)
    rows = table.rows(arguments.archives, CHECK_FILE, MEASURE_FILE)
    print(table.summary(rows))
    if arguments.table:
        table.write(rows, *arguments.table)
    names = {(f.parent.name, read(f, "export.json")["name"]) for f in chosen}
    failed = [r for r in rows if (r["package"], r["name"]) in names and (not r["passed"] or r.get("raw") == "wrong")]
    for row in failed:
        print(f"failed: {row['package']} {row['name']}: {row.get('verdict', 'not checked')}")
    return 1 if arguments.strict and failed else 0


if __name__ == "__main__":
    sys.exit(main())
