"""What the zoo came to: one entry a configuration, figures by package, the document and the file of results."""

from __future__ import annotations

import collections
import datetime
import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any, Iterable

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"rechub": "torch-rechub 0.9.0", "deepctr": "deepctr-torch 0.3.0", "recbole": "recbole 1.2.1", "fuxictr": "fuxictr 1.2.2"}
MODES = ("broadcast", "split", "ikbo")
SLOWER, SLOWER_US = 1.05, 50.0  # what counts as slower than broadcast
RANDOM_FILE = "zoo_random.json"  # beside the zoo's own file of results

Row = dict[str, Any]


def _passed(step: dict[str, Any] | None) -> bool:
    return bool(step and step.get("passed"))


def _why_dead(verify: dict[str, Any]) -> str:
    still = [s for s in ("user", "candidate") if verify.get(f"{s}_inputs_move_scores") is False]
    return f"{' and '.join(still)} inputs do not move the score" if still else ""


def verdict(result: dict[str, Any]) -> str:
    if "error" in result:
        return "CRASHED " + result["error"].strip().splitlines()[-1]
    for step in ("transform", "verify", "load"):
        if not _passed(result.get(step)):
            detail = result.get(step) or {}
            return f"{step} FAILED: {detail.get('message') or detail.get('failed') or _why_dead(detail) or detail}"
    share = result.get("arithmetic", {}).get("share")
    parts = ["verified" if share is None else f"verified, {share:.0%} of request-only arithmetic once a user"]
    raw = result["raw"]
    if not raw["passed"]:
        parts.append(f"raw refused: {raw['message'][:200]}")
    elif not _passed(raw.get("verify")):
        parts.append(f"raw WRONG: {raw['verify']}")
    return "; ".join(parts)


def _raw(raw: dict[str, Any]) -> str:
    return "verified" if _passed(raw.get("verify")) else "wrong" if _passed(raw) else "refused"


def _checked(result: dict[str, Any]) -> Row:
    row: Row = {"verdict": verdict(result)}
    for name, step in (("transformed", "transform"), ("verified", "verify"), ("loads", "load")):
        row[name] = _passed(result.get(step))
    row["passed"] = row["transformed"] and row["verified"] and row["loads"]
    if row["transformed"]:
        report, verify, arithmetic = result["transform"]["report"], result.get("verify", {}), result.get("arithmetic", {})
        row |= {"transform_seconds": result["transform"]["seconds"], "share": arithmetic.get("share"), "arithmetic": arithmetic}
        row |= {"error_ratio": verify.get("worst_ratio"), "mappings": verify.get("mappings"), "float64": verify.get("float64")}
        row |= {"skipped": verify.get("skipped", []), "load_difference": result.get("load", {}).get("largest_relative_difference")}
        row |= {"ikbo_operators": report["ikbo_operators"], "broadcasts": report["broadcasts"], "warnings": report["warnings"]}
        row["stops"] = [[s["target"], s["reason"]] for s in report["stops"]]
    row["raw"] = _raw(result.get("raw", {}))
    if row["raw"] == "refused":
        row["raw_message"] = result.get("raw", {}).get("message", "")
    if row["raw"] == "verified":
        row["raw_error_ratio"] = result["raw"]["verify"].get("worst_ratio")
    return row


def rows(archives: Path, check_file: str, measure_file: str) -> list[Row]:
    found = []
    for status_file in sorted(archives.glob("*/*/export.json")):
        folder = status_file.parent
        status = json.loads(status_file.read_text())
        row: Row = {"package": folder.parent.name, "name": status["name"], "class": status.get("class", "")}
        row |= {"exported": status["stage"] == "done", "passed": False}
        if not row["exported"]:
            row |= {"stage": status["stage"], "reason": status.get("reason", "")}
        elif (folder / check_file).is_file():
            row |= _checked(json.loads((folder / check_file).read_text()))
        if row["exported"] and (folder / measure_file).is_file():
            row["measured"] = {k: v for k, v in json.loads((folder / measure_file).read_text()).items() if k != "stamp"}
        found.append(row)
    order = list(PACKAGES)
    return sorted(found, key=lambda r: (order.index(r["package"]), r["name"].lower()))


# ---- Figures ----------------------------------------------------------------------------------------------------------


def _times(row: Row) -> dict[str, float]:
    return {mode: v["us"] for mode, v in row.get("measured", {}).get("modes", {}).items()}


def is_slower(row: Row) -> bool:
    us = _times(row)
    return len(us) == 3 and us["ikbo"] > us["broadcast"] * SLOWER and us["ikbo"] - us["broadcast"] > SLOWER_US


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def figures(rows: list[Row]) -> dict[str, Any]:
    exported = [r for r in rows if r["exported"]]
    timed = [_times(r) for r in exported if len(_times(r)) == 3]
    shares = [r["share"] for r in exported if r.get("share") is not None]
    return {
        "configurations": len(rows),
        "exported": len(exported),
        "classes": len({(r["package"], r["class"]) for r in exported}),
        "transformed": sum(bool(r.get("transformed")) for r in exported),
        "verified": sum(bool(r.get("verified")) for r in exported),
        "loads": sum(bool(r.get("loads")) for r in exported),
        "raw_verified": sum(r.get("raw") == "verified" for r in exported),
        "raw_refused": sum(r.get("raw") == "refused" for r in exported),
        "worst_error_ratio": max((r["error_ratio"] for r in exported if r.get("verified") and r.get("float64")), default=None),
        "with_request_only_arithmetic": len(shares),
        "half_at_user_batch": sum(s >= 0.5 for s in shares),
        "measured": len(timed),
        "slower": sum(is_slower(r) for r in exported),
        "against_broadcast": geometric_mean(us["broadcast"] / us["ikbo"] for us in timed),
        "against_split": geometric_mean(us["split"] / us["ikbo"] for us in timed),
        "longest_transform_seconds": max((r["transform_seconds"] for r in exported if "transform_seconds" in r), default=None),
    }


def _by_package(rows: list[Row]) -> list[tuple[str, dict[str, Any]]]:
    groups = [(title, [r for r in rows if r["package"] == name]) for name, title in PACKAGES.items()]
    return [(title, figures(group)) for title, group in groups if group] + [("all", figures(rows))]


def stop_counts(rows: list[Row]) -> list[tuple[str, str, int]]:
    """Operators that stopped the sinking, by how many configurations they stop."""
    counter: collections.Counter[tuple[str, str]] = collections.Counter()
    for row in rows:
        counter.update({(target.removeprefix("torch.ops.aten."), why) for target, why in row.get("stops", [])})
    return [(target, why, count) for (target, why), count in counter.most_common()]


# ---- The document -----------------------------------------------------------------------------------------------------


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}×"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _figure_table(rows: list[Row]) -> list[str]:
    lines = [
        "| package | exported | classes | transformed | verified | `torch.export.load` agrees | raw: verified, refused | half of request-only arithmetic once a user | slower than broadcast | against broadcast | against split |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for title, f in _by_package(rows):
        lines.append(
            f"| {title} | {f['exported']} of {f['configurations']} | {f['classes']} | {f['transformed']} | {f['verified']} | {f['loads']} | "
            f"{f['raw_verified']}, {f['raw_refused']} | {f['half_at_user_batch']} of {f['with_request_only_arithmetic']} | "
            f"{f['slower']} of {f['measured']} | {_ratio(f['against_broadcast'])} | {_ratio(f['against_split'])} |"
        )
    return lines


def _model_table(rows: list[Row]) -> list[str]:
    lines = [
        "| package | model | class | exported | verified | raw export | error ratio | `load` agrees | request-only arithmetic once a user | transform, s | broadcast, ms | split, ms | ikbo, ms | against broadcast | against split |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row['package']} | {row['name']} | {row['class']} | "
        if not row["exported"]:
            lines.append(f"{head}no: {_cell(row['reason'])[:120]} |" + " |" * 11)
            continue
        us, share, seconds = _times(row), row.get("share"), row.get("transform_seconds")
        ratio = row.get("error_ratio") if row.get("float64") else None
        cells = ["yes", "yes" if row.get("verified") else "**no**", row.get("raw", "-"), "-" if ratio is None else f"{ratio:.2f}"]
        cells += ["yes" if row.get("loads") else "**no**", "-" if share is None else f"{share:.0%}", "-" if seconds is None else f"{seconds:.1f}"]
        cells += [f"{us[m] / 1e3:.2f}" if m in us else "-" for m in MODES]
        cells += [_ratio(us[m] / us["ikbo"] if len(us) == 3 else None) for m in ("broadcast", "split")]
        cells[-2] = f"**{cells[-2]}**" if is_slower(row) else cells[-2]
        lines.append(head + " | ".join(cells) + " |")
    return lines


def _list_of(title: str, head: str, lines: list[str]) -> list[str]:
    return ["", f"## {title}", "", head, "|" + "---|" * head.count(" | ") + "---|", *lines] if lines else []


def _random(results: Path) -> list[str]:
    file = results / RANDOM_FILE
    if not file.is_file():
        return []
    r = json.loads(file.read_text())
    refused = f"; {r['refused']} programs that mix what belongs to several users refused" if r.get("refused") else ""
    return [
        "", "## Programs made at random", "",
        f"{r['programs']:,} valid programs over the rule families (`tests/transform/random_programs.py`, seed {r['seed']}), each transformed in",
        f"three modes and compared with its original in float64 over even, uneven and unsorted mappings, one user, and equal batch sizes:",
        f"{r['comparisons']:,} comparisons, {r['wrong']} wrong, {r['failed']} failed{refused}. {r['date']}, sources `{r['source_digest']}`.",
    ]  # fmt: skip


def _document(rows: list[Row], about: dict[str, Any], results: Path) -> str:
    loads = [r["measured"]["load"] for r in rows if "load" in r.get("measured", {})]
    busy = f" Load average when each was taken: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    lines = [
        "# The zoo: public ranking models, exported unchanged",
        "",
        "Written by `scripts/zoo.sh`; all of it, with bytes, operators and dates, is in `bench/results/cpu/zoo.json`. Each configuration is",
        "built with its package's own defaults, its weights are perturbed so that scores differ, it is exported with one dynamic batch",
        "(histories of 50, on the user's side), raw and after `run_decompositions({})`, transformed, verified against float64 over even,",
        "uneven and unsorted mappings, and loaded by `torch.export.load`, whose scores are compared with the C++ runtime's (to 1e-6 of",
        "the largest, or to what the original's own rounding makes of its scores). Measured on",
        f"{about['cpu']}, one thread, 15 users with 70 candidates each, the three modes interleaved in one process, PyTorch",
        f"{about['torch'].split('+')[0]}, {about['date']}, sources `{about['source_digest']}`.{busy}",
        "",
        *_figure_table(rows),
        "",
        "Error ratio: the transformed model's largest error against float64 over the original's own (two is allowed). Request-only",
        "arithmetic is found by changing inputs and watching every value of the graph (`examples/zoo/watch.py`), not by the transform's",
        "own analysis; a configuration without any (all that users have is looked up) has a dash and is not counted. Slower than",
        "broadcast: by more than 5% and 50 µs, in bold. Models that do not export do not count; the reason is torch.export's.",
        "`broadcast` and `split` run the original's operators; `ikbo` also drops copies that change nothing, computes equal operators",
        "once, replaces those that copy a weight for every row, and takes batch norms, activations and cross networks into its linear",
        "layers, so a part of its gain over `split` is that. A model that draws random numbers (MIND) has no float64 reference and no",
        "ratio: it is compared with the original on the same draws.",
        *_random(results),
        "",
        "## Configurations",
        "",
        *_model_table(rows),
    ]
    failed = [r for r in rows if r["exported"] and not r["passed"]]
    lines += _list_of("Not verified", "| package | model | why |", [f"| {r['package']} | {r['name']} | {_cell(r.get('verdict', 'not run'))} |" for r in failed])
    refused = [r for r in rows if r.get("raw") in ("refused", "wrong")]
    lines += _list_of(
        "Raw exports that were not verified", "| package | model | message |",
        [f"| {r['package']} | {r['name']} | {_cell(r.get('raw_message') or 'wrong')} |" for r in refused],
    )  # fmt: skip
    low = [r for r in rows if r.get("share") is not None and r["share"] < 0.5]
    lines += _list_of(
        "Less than half of the request-only arithmetic once a user", "| package | model | share | stopped by |",
        [f"| {r['package']} | {r['name']} | {r['share']:.0%} | {', '.join(sorted({'`' + t.split('.')[-2] + '`' for t, _ in r['stops']}))} |" for r in low],
    )  # fmt: skip
    stops = [f"| `{target}` | {why} | {count} |" for target, why, count in stop_counts(rows)]
    lines += _list_of("Where user rows are still copied", "| operator | why | configurations |", stops)
    return "\n".join(lines) + "\n"


def _about() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", info)
    vector = next((text for flag, text in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if f" {flag} " in info), "no AVX2")
    cpu = f"{model.group(1) if model else 'unknown'}, {os.cpu_count()} cores ({vector})"
    digest = subprocess.run([ROOT / "scripts/source_digest.sh", "zoo"], capture_output=True, text=True, check=True).stdout.strip()
    date = datetime.date.today().isoformat()
    return {"gpu": None, "cpu": cpu, "driver": None, "torch": torch.__version__, "cuda": None, "date": date, "source_digest": digest}


def summary(rows: list[Row]) -> str:
    return "\n".join(_figure_table(rows))


def write(rows: list[Row], document: Path, data: Path) -> None:
    about = _about()
    timed = []
    for row in rows:
        case = {"model": f"{row['package']} {row['name']}", "users": 15, "candidates": 1050, "dtype": "fp32"}
        for mode, values in row.get("measured", {}).get("modes", {}).items():
            timed.append({"case": case, "name": mode, "kind": "ours" if mode == "ikbo" else "peer", **values})
    models = [{k: v for k, v in row.items() if k != "measured"} for row in rows]
    for model, row in zip(models, rows):
        model |= {k: v for k, v in row.get("measured", {}).items() if k != "modes"}
    content = {**about, "threads": 1, "figures": dict(_by_package(rows)), "configurations": models, "rows": timed}
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(json.dumps(content, indent=1) + "\n")
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(_document(rows, about, data.parent))
