"""The table of the zoo: one row a configuration, figures by package, and what did not export."""

from __future__ import annotations

import collections
import datetime
import json
import math
import platform
from pathlib import Path
from typing import Any, Iterable

import torch

PACKAGES = {"rechub": "torch-rechub 0.9.0", "deepctr": "deepctr-torch 0.3.0", "recbole": "recbole 1.2.1", "fuxictr": "fuxictr 1.2.2"}
SLOWER, SLOWER_US = 1.05, 50.0  # what counts as slower than broadcast


def _passed(step: dict[str, Any] | None) -> bool:
    return bool(step and step.get("passed"))


def verdict(result: dict[str, Any]) -> str:
    if "error" in result:
        return "CRASHED " + result["error"].strip().splitlines()[-1]
    parts = []
    for step in ("transform", "verify", "load"):
        if not _passed(result.get(step)):
            detail = result.get(step) or {}
            return f"{step} FAILED: {detail.get('message') or detail.get('failed') or _why_dead(detail) or detail}"
    share = result.get("arithmetic", {}).get("share")
    parts.append("verified" if share is None else f"verified, {share:.0%} of request-only arithmetic once a user")
    raw = result["raw"]
    if not raw["passed"]:
        parts.append(f"raw refused: {raw['message'][:120]}")
    elif not _passed(raw.get("verify")):
        parts.append(f"raw WRONG: {raw['verify']}")
    return "; ".join(parts)


def _why_dead(verify: dict[str, Any]) -> str:
    still = [s for s in ("user", "candidate") if verify.get(f"{s}_inputs_move_scores") is False]
    return f"{' and '.join(still)} inputs do not move the score" if still else ""


def rows(archives: Path, chosen: list[Path], check_file: str, measure_file: str) -> list[dict[str, Any]]:
    found = []
    for folder in sorted(set(chosen) | {p.parent for p in archives.glob("*/*/export.json")}):
        status_file = folder / "export.json"
        status = json.loads(status_file.read_text()) if status_file.is_file() else {"stage": "none", "name": folder.name}
        row: dict[str, Any] = {"package": folder.parent.name, "name": status["name"], "class": status.get("class", "")}
        row["exported"] = status["stage"] == "done"
        row["passed"] = False
        if not row["exported"]:
            row["stage"], row["reason"] = status["stage"], status.get("reason", "")
        elif (folder / check_file).is_file():
            result = json.loads((folder / check_file).read_text())
            row["verdict"] = verdict(result)
            row["transformed"] = _passed(result.get("transform"))
            row["verified"] = _passed(result.get("verify"))
            row["loads"] = _passed(result.get("load"))
            row["passed"] = row["transformed"] and row["verified"] and row["loads"]
            row["share"] = result.get("arithmetic", {}).get("share")
            if row["transformed"]:
                report = result["transform"]["report"]
                row["seconds"] = result["transform"]["seconds"]
                row["ikbo_operators"], row["broadcasts"] = report["ikbo_operators"], report["broadcasts"]
                row["stops"] = [[s["target"], s["reason"]] for s in report["stops"]]
                row["warnings"] = report["warnings"]
                row["error_ratio"] = result.get("verify", {}).get("worst_ratio")
            raw = result.get("raw", {})
            row["raw"] = "verified" if _passed(raw.get("verify")) else "wrong" if _passed(raw) else "refused"
            if row["raw"] == "refused":
                row["raw_message"] = raw.get("message", "")
        if (folder / measure_file).is_file():
            row["us"] = {k: v for k, v in json.loads((folder / measure_file).read_text()).items() if k in ("broadcast", "split", "ikbo")}
        found.append(row)
    return found


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    exported = [r for r in rows if r["exported"]]
    timed = [r for r in exported if len(r.get("us", {})) == 3]
    shares = [r["share"] for r in exported if r.get("share") is not None]
    slower = [r for r in timed if r["us"]["ikbo"] > r["us"]["broadcast"] * SLOWER and r["us"]["ikbo"] - r["us"]["broadcast"] > SLOWER_US]
    return {
        "configurations": len(rows),
        "exported": len(exported),
        "classes": len({(r["package"], r["class"]) for r in exported}),
        "transformed": sum(bool(r.get("transformed")) for r in exported),
        "verified": sum(bool(r.get("verified")) for r in exported),
        "loads": sum(bool(r.get("loads")) for r in exported),
        "raw_verified": sum(r.get("raw") == "verified" for r in exported),
        "raw_refused": sum(r.get("raw") == "refused" for r in exported),
        "with_request_only_arithmetic": len(shares),
        "half_at_user_batch": sum(s >= 0.5 for s in shares),
        "measured": len(timed),
        "slower": len(slower),
        "against_broadcast": geometric_mean(r["us"]["broadcast"] / r["us"]["ikbo"] for r in timed),
        "against_split": geometric_mean(r["us"]["split"] / r["us"]["ikbo"] for r in timed),
        "longest_transform_seconds": max((r["seconds"] for r in exported if "seconds" in r), default=None),
    }


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}×"


def _by_package(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    groups = [(title, [r for r in rows if r["package"] == name]) for name, title in PACKAGES.items()]
    return [(title, figures(group)) for title, group in groups if group] + [("all", figures(rows))]


def _figure_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| package | export | classes | transformed | verified | `torch.export.load` agrees | raw: verified / refused | half of request-only arithmetic once a user | slower than broadcast | against broadcast | against split |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for title, f in _by_package(rows):
        lines.append(
            f"| {title} | {f['exported']} of {f['configurations']} | {f['classes']} | {f['transformed']} | {f['verified']} | {f['loads']} | "
            f"{f['raw_verified']} / {f['raw_refused']} | {f['half_at_user_batch']} of {f['with_request_only_arithmetic']} | {f['slower']} of {f['measured']} | "
            f"{_ratio(f['against_broadcast'])} | {_ratio(f['against_split'])} |"
        )
    return lines


def stop_counts(rows: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """Operators that stopped the sinking, by how many configurations they stop."""
    counter: collections.Counter[tuple[str, str]] = collections.Counter()
    for row in rows:
        counter.update({(target.removeprefix("torch.ops.aten."), why) for target, why in row.get("stops", [])})
    return [(target, why, count) for (target, why), count in counter.most_common()]


def summary(rows: list[dict[str, Any]]) -> str:
    return "\n".join(_figure_table(rows))


def write(rows: list[dict[str, Any]], document: Path, data: Path) -> None:
    lines = [
        "# The zoo: public ranking models, exported unchanged",
        "",
        "Written by `scripts/zoo.sh`: each configuration is built with its package's own defaults, its weights are perturbed so",
        "that scores differ, it is exported with one dynamic batch (histories of 50, on the user's side), transformed, verified over",
        "even, uneven and unsorted mappings against float64, loaded by `torch.export.load` and compared with the C++ runtime, and",
        f"measured on the CPU with 15 users and 70 candidates each, one thread, modes interleaved. {platform.machine()}, PyTorch {torch.__version__.split('+')[0]},",
        f"{datetime.date.today().isoformat()}.",
        "",
        *_figure_table(rows),
        "",
        "Request-only arithmetic is found by changing inputs and watching every value of the graph (`examples/zoo/watch.py`), not by",
        "the transform's own analysis; a configuration without any (all that users have is looked up) is not counted there. Slower:",
        "by more than 5% and 50 µs.",
        "",
        "## Configurations",
        "",
        "| package | model | verified | raw export | request-only arithmetic once a user | IKBO operators | broadcasts | broadcast, ms | split, ms | ikbo, ms | against broadcast | against split |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row["exported"]:
            continue
        share = row.get("share")
        us = row.get("us", {})
        times = [f"{us[m] / 1e3:.2f}" if m in us else "" for m in ("broadcast", "split", "ikbo")]
        ratios = [_ratio(us[m] / us["ikbo"]) if len(us) == 3 else "" for m in ("broadcast", "split")]
        lines.append(
            f"| {row['package']} | {row['name']} | {'yes' if row['passed'] else 'no'} | {row.get('raw', '')} | {'-' if share is None else f'{share:.0%}'} | "
            f"{row.get('ikbo_operators', '')} | {row.get('broadcasts', '')} | {' | '.join(times)} | {' | '.join(ratios)} |"
        )
    failed = [r for r in rows if r["exported"] and not r["passed"]]
    if failed:
        lines += ["", "## Not verified", "", "| package | model | why |", "|---|---|---|"]
        lines += [f"| {r['package']} | {r['name']} | {r.get('verdict', 'not run')} |" for r in failed]
    lines += ["", "## Where user rows are still copied", "", "| operator | why | configurations |", "|---|---|---|"]
    lines += [f"| `{target}` | {why} | {count} |" for target, why, count in stop_counts(rows)]
    lines += ["", "## Not exported", "", "These do not count.", "", "| package | model | stage | reason |", "|---|---|---|---|"]
    for row in rows:
        if not row["exported"]:
            text = row["reason"].replace("|", "\\|")[:200]
            lines.append(f"| {row['package']} | {row['name']} | {row['stage']} | {text} |")
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text("\n".join(lines) + "\n")
    data.parent.mkdir(parents=True, exist_ok=True)
    content = {"gpu": None, "torch": torch.__version__, "date": datetime.date.today().isoformat(), "figures": dict(_by_package(rows)), "rows": rows}
    data.write_text(json.dumps(content, indent=1) + "\n")
