#!/usr/bin/env python3
"""The reference ranker on a GPU, as `broadcast`, `split` and `ikbo`: what each call costs through the ikbo command and under
torch.compile, how many of each request's ten best agree with float64, and `ikbo verify` there. Written after every step.

Times are of queued calls (the command) or CUDA graphs (torch.compile, which plays its own), contestants interleaved.

usage: ranker_gpu.py --ikbo build/gpu/cli/ikbo --library build/gpu/ops/libikbo_ops.so --json ranker.json
                     [--runs full:bf16 small:fp32 ...] [--compile full:bf16 ...] [--agree full:bf16 ...] [--alone ...]"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "examples")]

import torch  # noqa: E402

import ranker  # noqa: E402

MODES = ("broadcast", "split", "ikbo")
REQUEST_ONLY = "user_*,hist_*"
TOP = 10
DRAWS = 20  # batches of requests whose best candidates are compared


def run(*arguments):
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


def floors():
    """Rates of this card in this run: a large product and a large copy."""

    def seconds(call, calls=20):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    rates = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
        rates[name] = round(2 * 8192**3 / seconds(lambda: a @ b) / 1e12, 1)
    x = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return {"matmul_tflops": rates, "copy_tbps": round(2 * 2**31 / seconds(lambda: y.copy_(x)) / 1e12, 2)}


class Results:
    def __init__(self, path):
        digest = run(ROOT / "scripts/source_digest.sh", "ranker_gpu").strip()
        driver = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()[0]
        self.path = path
        self.content = {
            "gpu": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__, "cuda": torch.version.cuda,
            "date": datetime.date.today().isoformat(), "source_digest": digest, "floor": floors(), "rows": [],
            "verify": [], "top10": [], "alone": [],
        }  # fmt: skip

    def add(self, kind, *entries):
        self.content[kind].extend(entries)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def archives_of(options, config, dtype):
    """The exported ranker and its three transformed archives."""
    folder = options.work / f"{config}-{dtype}"
    if not (folder / "ikbo.pt2").exists():
        print(f"== {config} {dtype}: exporting and transforming", flush=True)
        run(sys.executable, ROOT / "examples/ranker.py", "--config", config, "--dtype", dtype, "--out", folder)
        for mode in MODES:
            run(options.ikbo, "transform", folder / ranker.ARCHIVE_FILE, "--request-only", REQUEST_ONLY, "--mode", mode,
                "-o", folder / f"{mode}.pt2")  # fmt: skip
    return folder


def case_of(config, dtype, users=ranker.REQUESTS, candidates=ranker.REQUESTS * ranker.CANDIDATES):
    return {"model": config, "users": users, "candidates": candidates, "dtype": dtype}


def table(title, rows):
    print(f"\n{title}", flush=True)
    for name, *cells in rows:
        print(f"  {name:24s}" + "".join(f"{cell:>16s}" for cell in cells), flush=True)


def bench(options, results, config, dtype):
    folder = archives_of(options, config, dtype)
    out = json.loads(run(options.ikbo, "bench", "model", folder / ranker.ARCHIVE_FILE, "--request-only", REQUEST_ONLY,
                         "--requests", folder / ranker.REQUESTS_FILE, "--device", "cuda", "--seconds", options.seconds, "--json"))  # fmt: skip
    rows = [{**row, "case": case_of(config, dtype), "runs": out["runs"]} for row in out["rows"]]
    results.add("rows", *rows)
    us = {row["name"]: row["us"] for row in rows}
    table(f"{config} {dtype}, eager", [(n, f"{us[n] / 1e3:.2f} ms", f"{us[n] / us['ikbo']:.2f} x ikbo") for n in MODES])


def verify(options, results, config, dtype):
    folder = archives_of(options, config, dtype)
    shown = json.loads(run(options.ikbo, "verify", folder / ranker.ARCHIVE_FILE, folder / "ikbo.pt2", "--device", "cuda", "--json"))  # fmt: skip
    entry = {"case": {"model": config, "dtype": dtype}, **{k: shown[k] for k in ("passed", "float64", "why_not_float64", "worst_ratio")}}
    results.add("verify", entry)
    print(f"verify {config} {dtype}: {'passed' if entry['passed'] else 'FAILED'}, error {entry['worst_ratio']:.2f} times the original's own")


def module_of(folder, mode):
    from torch.export.passes import move_to_device_pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return move_to_device_pass(torch.export.load(folder / f"{mode}.pt2"), "cuda:0").module()


def drawn(config, dtype, seed):
    sizes, torch_dtype = ranker.CONFIGS[config], ranker.DTYPES[dtype]
    inputs = ranker.draw_inputs(sizes, ranker.REQUESTS, ranker.REQUESTS * ranker.CANDIDATES, torch_dtype, torch.Generator().manual_seed(seed))
    index = torch.arange(ranker.REQUESTS * ranker.CANDIDATES, dtype=torch.int32) // ranker.CANDIDATES
    return {name: tensor.cuda() for name, tensor in inputs.items()}, index.cuda()


@torch.no_grad()
def agreement(options, results, config, dtype):
    """Share of each request's ten best that are among float64's ten best, over all requests."""
    folder = archives_of(options, config, dtype)
    modules = {mode: module_of(folder, mode) for mode in ("broadcast", "ikbo")}
    # Weights are rounded to the model's type first: what differs is arithmetic alone.
    exact = ranker.make_ranker(ranker.CONFIGS[config], ranker.DTYPES[dtype]).double().cuda()
    hits, total = dict.fromkeys(modules, 0), 0
    best = lambda scores: scores.float().view(ranker.REQUESTS, -1).topk(TOP).indices  # noqa: E731
    for draw in range(DRAWS):
        inputs, index = drawn(config, dtype, 1000 + draw)
        full = {n: (t[index.long()] if ranker.is_user(n) else t) for n, t in inputs.items()}
        full = {n: t.double() if t.is_floating_point() else t for n, t in full.items()}
        reference = exact(full).view(ranker.REQUESTS, -1).topk(TOP).indices
        total += reference.numel()
        for mode, module in modules.items():
            found = best(module(inputs, index))
            hits[mode] += (found.unsqueeze(2) == reference.unsqueeze(1)).any(2).sum().item()
    shares = {mode: count / total for mode, count in hits.items()}
    results.add("top10", {"case": {"model": config, "dtype": dtype}, "slots": total, **shares})
    print(f"ten best, {config} {dtype}: " + ", ".join(f"{m} {s:.4f} as in float64" for m, s in shares.items()), flush=True)


@torch.no_grad()
def alone(options, results, config, dtype):
    """How far a whole model's scores move when a request, or one candidate, is scored alone: the ikbo operators give the
    same bits, PyTorch's own products and reductions choose their kernels by the batch."""
    folder = archives_of(options, config, dtype)
    inputs, index = drawn(config, dtype, 11)
    entry = {"case": {"model": config, "dtype": dtype}}
    for mode in ("broadcast", "ikbo"):
        module = module_of(folder, mode)
        together = module(inputs, index)

        def part(user, first, count):
            rows = slice(user * ranker.CANDIDATES + first, user * ranker.CANDIDATES + first + count)
            own = {n: t[user : user + 1] if ranker.is_user(n) else t[rows] for n, t in inputs.items()}
            given = module(own, torch.zeros(count, dtype=torch.int32, device="cuda"))
            return (given - together[rows]).abs().max().item()

        entry[mode] = {
            "one_request": max(part(user, 0, ranker.CANDIDATES) for user in range(ranker.REQUESTS)),
            "one_candidate": max(part(user, user, 1) for user in range(ranker.REQUESTS)),
            "largest_score": together.abs().max().item(),
        }
    results.add("alone", entry)
    print(f"alone, {config} {dtype}: " + "; ".join(f"{m} {entry[m]}" for m in ("broadcast", "ikbo")), flush=True)


@torch.no_grad()
def compiled(options, results, config, dtype):
    folder = archives_of(options, config, dtype)
    inputs, index = drawn(config, dtype, 7)
    calls, kept = {}, []
    for mode in MODES:
        start = time.perf_counter()
        call = torch.compile(module_of(folder, mode), dynamic=False)
        call(inputs, index)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call(inputs, index)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(inputs, index)
        calls[mode] = graph
        kept.append(call)  # a graph does not keep the weights that it reads
        print(f"torch.compile of {config} {dtype} {mode}: {time.perf_counter() - start:.0f} s", flush=True)
    times = {mode: [] for mode in calls}
    for _ in range(9):
        for mode, graph in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
            times[mode].append((time.perf_counter() - start) / 5 * 1e6)
    us = {mode: statistics.median(values) for mode, values in times.items()}
    results.add("rows", *({"case": case_of(config, dtype), "name": f"{mode}, torch.compile", "kind": "peer" if mode != "ikbo" else "ours",
                           "us": round(value, 1)} for mode, value in us.items()))  # fmt: skip
    table(f"{config} {dtype}, torch.compile", [(n, f"{us[n] / 1e3:.2f} ms", f"{us[n] / us['ikbo']:.2f} x ikbo") for n in MODES])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ikbo", type=Path, required=True)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/ikbo-ranker"), help="folder for archives")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each bench")
    case = lambda text: tuple(text.split(":"))  # noqa: E731
    parser.add_argument("--runs", type=case, nargs="*", default=[("full", "bf16"), ("full", "fp16"), ("full", "fp32"), ("small", "fp32")])
    parser.add_argument("--verify", type=case, nargs="*", default=[("small", "fp32"), ("full", "fp32")])
    parser.add_argument("--agree", type=case, nargs="*", default=[("full", "bf16"), ("full", "fp16")])
    parser.add_argument("--alone", type=case, nargs="*", default=[("full", "bf16"), ("small", "fp32")])
    parser.add_argument("--compile", type=case, nargs="*", default=[("full", "bf16")])
    options = parser.parse_args()
    os.environ["IKBO_LIBRARY"] = str(options.library.resolve())
    import ikbo  # noqa: F401  registers the operators

    results = Results(options.json)
    for step, cases in ((bench, options.runs), (verify, options.verify), (agreement, options.agree), (alone, options.alone), (compiled, options.compile)):
        for config, dtype in cases:
            try:
                step(options, results, config, dtype)
            except Exception as error:
                print(f"{step.__name__} {config} {dtype} FAILED: {type(error).__name__}: {str(error)[:500]}", flush=True)
    print(f"\nWritten: {options.json}")


if __name__ == "__main__":
    main()
