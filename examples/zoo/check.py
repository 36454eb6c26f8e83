"""Takes one exported configuration through transform, verify, torch.export.load and the measurement.

Every step is recorded in FOLDER/check.json; a step that fails keeps the others. What is verified stays so as long as the
transform makes the same archive and the runtime's sources are the same (digests.py).
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import digests

COMMAND = Path(os.environ.get("IKBO", "build/tests/cli/ikbo")).resolve()
RUNNER = Path(os.environ.get("IKBO_RUN_ARCHIVE", "build/tests/tests/runtime/ikbo_run_archive")).resolve()
SECONDS = 600  # that one command may take
USERS, CANDIDATES_A_USER = 15, 70
SEED = 3  # of the random numbers that a model draws
MODES = ("broadcast", "split", "ikbo")
# module() and the C++ runtime run the same operators: what differs is how a library splits its work. A model may make more
# of such a difference: what its own rounding does to its scores (verify measures that against float64) is allowed too.
SAME_SCORES = 1e-6


def ikbo_command(*arguments: str) -> tuple[int, str, str]:
    try:
        done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return 124, "", f"took longer than {SECONDS} s"
    return done.returncode, done.stdout, done.stderr


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].replace("ikbo: ", "", 1)[:400] if lines else ""


def transform(archive: Path, target: Path, request_only: list[str]) -> dict[str, Any]:
    start = time.perf_counter()
    code, out, err = ikbo_command("transform", str(archive), "--request-only", ",".join(request_only), "-o", str(target), "--json")
    if code:
        return {"passed": False, "message": last_line(err) or f"exit code {code}"}
    report = json.loads(out)
    report.pop("inputs")
    report.pop("output")
    seconds = round(time.perf_counter() - start, 3)
    return {"passed": True, "seconds": seconds, "digest": digests.archive(target), "report": report}


def verify(archive: Path, target: Path) -> dict[str, Any]:
    code, out, err = ikbo_command("verify", str(archive), str(target), "--json")
    if code not in (0, 1) or not out:
        return {"passed": False, "message": last_line(err) or f"exit code {code}"}
    result = json.loads(out)
    checks = result.pop("checks")
    result["mappings"] = sorted({c["mapping"] for c in checks})
    result["own_error"] = max((c["original_error"] / c["range"] for c in checks if c["range"] > 0), default=0.0)
    failed = [c for c in checks if not c["passed"]]
    if failed:
        result["failed"] = failed[:3]
    return result


def write_tensors(folder: Path, tensors: list[torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for i, tensor in enumerate(tensors):
        tensor = tensor.contiguous()
        entries.append({"dtype": str(tensor.dtype)[6:], "sizes": list(tensor.shape), "strides": list(tensor.stride())})
        (folder / f"input_{i}.bin").write_bytes(tensor.numpy().tobytes())
    (folder / "inputs.json").write_text(json.dumps(entries))


def standard_load(target: Path, program: Any, folder: Path, own_error: float) -> dict[str, Any]:
    """torch.export.load(...).module() against the C++ runtime, on the same inputs. `own_error` is what the original's own
    rounding makes of its scores."""
    from torch.utils._pytree import tree_flatten

    inputs = program.inputs()
    torch.manual_seed(SEED)
    with torch.no_grad():
        expected = [t for t in tree_flatten(program.call(inputs))[0] if isinstance(t, torch.Tensor)]
    write_tensors(folder, inputs)
    done = subprocess.run([RUNNER, str(target), str(folder), "--threads", "1", "--seed", str(SEED)], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"passed": False, "message": last_line(done.stderr)}
    worst = 0.0
    for i, (entry, tensor) in enumerate(zip(json.loads((folder / "outputs.json").read_text()), expected)):
        got = torch.frombuffer(bytearray((folder / f"output_{i}.bin").read_bytes()), dtype=getattr(torch, entry["dtype"]))
        got, tensor = got.reshape(entry["sizes"]).double(), tensor.double()
        if got.shape != tensor.shape or not torch.equal(got.isnan(), tensor.isnan()):
            return {"passed": False, "message": f"output {i} differs in shape or NaN"}
        scale = max(float(tensor.nan_to_num().abs().max()), 1e-30)
        worst = max(worst, float((got - tensor).nan_to_num().abs().max()) / scale)
    return {"passed": worst <= max(SAME_SCORES, own_error), "largest_relative_difference": worst}


def examine(functional: Path, target: Path, request_only: list[str], folder: Path, quick: bool, own_error: float) -> dict[str, Any]:
    from watch import Program, request_only_arithmetic

    after = Program(target, request_only)
    if quick:
        return {"load": standard_load(target, after, folder / "run", own_error)}
    before = Program(functional, request_only)
    result: dict[str, Any] = {"load": standard_load(target, after, folder / "run", own_error)}
    total, _ = request_only_arithmetic(before)
    once_a_user, copied = request_only_arithmetic(after)
    share = None if total == 0 else max(0.0, 1.0 - copied / total)
    result["arithmetic"] = {"request_only": total, "at_user_batch": once_a_user, "still_copied": copied, "share": share}
    return result


def command_digest() -> str:
    return digests.file(COMMAND)


def behaviour() -> str:
    return digests.behaviour("check.py", "watch.py")


def is_checked(result: dict[str, Any], folder: Path, quick: bool) -> bool:
    """Nothing that the result depends on has changed, and nothing was left out."""
    same = result.get("command") == command_digest() and result.get("archive") == digests.file(folder / "functional.pt2")
    return same and result.get("behaviour") == behaviour() and (quick or "arithmetic" in result or not _transformed(result))


def _transformed(result: dict[str, Any]) -> bool:
    return bool(result.get("transform", {}).get("passed"))


def _kept(before: dict[str, Any], step: dict[str, Any], quick: bool) -> bool:
    """An earlier result of the same archive, transformed to the same, holds."""
    same = before.get("transform", {}).get("digest") == step["digest"] and before.get("behaviour") == behaviour()
    return same and all(key in before for key in (("verify", "load") if quick else ("verify", "load", "arithmetic")))


def check(folder: Path, quick: bool = False, before: dict[str, Any] | None = None) -> dict[str, Any]:
    exported = json.loads((folder / "export.json").read_text())
    before = before or {}
    request_only = exported["request_only"]
    functional, target = folder / "functional.pt2", folder / "transformed.pt2"
    result: dict[str, Any] = {"command": command_digest(), "archive": digests.file(functional), "behaviour": behaviour()}
    if before.get("archive") != result["archive"]:
        before = {}
    result["transform"] = transform(functional, target, request_only)
    if result["transform"]["passed"]:
        if _kept(before, result["transform"], quick):
            result |= {key: before[key] for key in ("verify", "load", "arithmetic") if key in before}
        else:
            result["verify"] = verify(functional, target)
            try:
                result |= examine(functional, target, request_only, folder, quick, result["verify"].get("own_error", 0.0))
            except Exception as error:  # noqa: BLE001
                result["load"] = {"passed": False, "message": f"{type(error).__name__}: {error}"[:400]}
    raw_target = folder / "transformed_raw.pt2"
    raw, raw_before = transform(folder / "raw.pt2", raw_target, request_only), before.get("raw", {})
    if raw["passed"]:
        kept = raw_before.get("digest") == raw["digest"] and before.get("behaviour") == behaviour() and "verify" in raw_before
        raw["verify"] = raw_before["verify"] if kept else verify(folder / "raw.pt2", raw_target)
        raw_target.unlink()
    result["raw"] = raw
    return result


def measure_stamp(checked: dict[str, Any], seconds: float, threads: int) -> str:
    """What figures depend on: the archives, the runtime, how they are taken."""
    return f"{checked['archive']} {checked['transform']['digest']} {digests.behaviour()} {seconds:g} {threads}"


def measure(folder: Path, stamp: str, seconds: float, threads: int) -> dict[str, Any]:
    exported = json.loads((folder / "export.json").read_text())
    load = round(os.getloadavg()[0], 2)
    code, out, err = ikbo_command(
        "bench", "model", str(folder / "functional.pt2"), "--request-only", ",".join(exported["request_only"]), "--json",
        "--users", str(USERS), "--candidates", str(CANDIDATES_A_USER), "--seconds", str(seconds), "--threads", str(threads),
    )  # fmt: skip
    if code:
        return {"stamp": stamp, "message": last_line(err)}
    result = json.loads(out)
    rows = {row["name"]: row for row in result["rows"]}
    keep = ("us", "us_p99", "replicated_bytes", "peak_bytes", "operators", "largest_difference")
    modes = {m: {k: round(rows[m][k], 6) if isinstance(rows[m][k], float) else rows[m][k] for k in keep} for m in MODES}
    about = {"threads": threads, "runs": result["runs"], "load": load, "date": datetime.date.today().isoformat()}
    return {"stamp": stamp, **about, "modes": modes}
