#!/usr/bin/env python3
"""Sizes that are no multiple of 8 beside the next larger ones that are, for every CUDA operator: what a caller would pay
who pads, the padding itself not counted. An odd size should cost at most 1.3 times as much.

usage: odd_sizes.py --json odd_sizes.json        with IKBO_LIBRARY naming build/gpu/ops/libikbo_ops.so"""

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "python")]

import torch  # noqa: E402
from device_time import floor, measure, origin  # noqa: E402

import ikbo  # noqa: E402,F401

REQUESTS, CANDIDATES = 15, 1050
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def randn(*shape, dtype):
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def mapping(candidates, users):
    return torch.randint(users, (candidates,), device="cuda", dtype=torch.int32)


def linear(dtype, n=512, k_user=1000, k_cand=1504):
    x, w = randn(CANDIDATES, k_cand, dtype=dtype), randn(n, k_cand, dtype=dtype)
    x_user, w_user = randn(REQUESTS, k_user, dtype=dtype), randn(n, k_user, dtype=dtype)
    index, bias = mapping(CANDIDATES, REQUESTS), randn(n, dtype=dtype)
    return lambda: torch.ops.ikbo.linear(x, w, [x_user], [w_user], [index], bias, "relu")


def compression(dtype, m=432, n=256, k_user=1176, k_cand=864):
    w, e = randn(m, k_cand, dtype=dtype), randn(CANDIDATES, k_cand, n, dtype=dtype)
    w_user, e_user = randn(m, k_user, dtype=dtype), randn(REQUESTS, k_user, n, dtype=dtype)
    index = mapping(CANDIDATES, REQUESTS)
    return lambda: torch.ops.ikbo.linear_compression(w, e, [w_user], [e_user], [index])


def halved(batch, k, n, dtype):
    return [randn(batch, part, n, dtype=dtype) for part in (k // 2, k - k // 2)]


def stacked_compression(dtype, m=432, n=256, k_user=1176, k_cand=864):
    """Over stacks whose rows are aligned already, as aligned_cat makes them."""
    w, e = randn(m, k_cand, dtype=dtype), ikbo.aligned_cat(halved(CANDIDATES, k_cand, n, dtype), 1)
    w_user, e_user = randn(m, k_user, dtype=dtype), ikbo.aligned_cat(halved(REQUESTS, k_user, n, dtype), 1)
    index = mapping(CANDIDATES, REQUESTS)
    return lambda: torch.ops.ikbo.linear_compression(w, e, [w_user], [e_user], [index])


def cat_and_compression(dtype, m=432, n=256, k_user=1176, k_cand=864, cat="aligned"):
    """The same with the stacks made in the call: by aligned_cat, or by torch.cat and aligned by linear_compression."""
    join = {"aligned": torch.ops.ikbo.aligned_cat, "plain": torch.cat}[cat]
    w, rows = randn(m, k_cand, dtype=dtype), halved(CANDIDATES, k_cand, n, dtype)
    w_user, rows_user = randn(m, k_user, dtype=dtype), halved(REQUESTS, k_user, n, dtype)
    index = mapping(CANDIDATES, REQUESTS)
    return lambda: torch.ops.ikbo.linear_compression(w, join(rows, 1), [w_user], [join(rows_user, 1)], [index])


def attention(dtype, dim=128, length=1024, candidates=2048, users=32, seeds=64, heads=2):
    q = randn(candidates, seeds, heads, dim, dtype=dtype)
    k, v = (randn(users, length, heads, dim, dtype=dtype) for _ in range(2))
    index = mapping(candidates, users)
    return lambda: torch.ops.ikbo.target_attention(q, k, v, index)


# What makes a call, the odd sizes, and the padded ones where they are not the function's own.
CASES = [
    (linear, {"k_cand": 1501, "k_user": 999}, {}),
    (linear, {"k_cand": 1502}, {}),
    (linear, {"n": 511}, {}),
    (linear, {"n": 505, "k_cand": 1497, "k_user": 993}, {}),
    (compression, {"n": 255}, {}),
    (compression, {"n": 252}, {}),
    (compression, {"n": 250}, {}),
    (compression, {"m": 427}, {}),
    (compression, {"k_cand": 859, "k_user": 1171}, {}),
    (compression, {"m": 431, "n": 127, "k_cand": 863, "k_user": 1175}, {"n": 128}),
    (stacked_compression, {"n": 255}, {}),
    (stacked_compression, {"n": 250}, {}),
    (cat_and_compression, {"n": 255}, {}),
    (cat_and_compression, {"n": 255, "cat": "plain"}, {"cat": "plain"}),
    (cat_and_compression, {"n": 255, "k_cand": 859, "k_user": 1171}, {}),
    (attention, {"dim": 127}, {}),
    (attention, {"dim": 124}, {}),
    (attention, {"dim": 122}, {}),
    (attention, {"dim": 255, "heads": 1}, {"dim": 256, "heads": 1}),
    (attention, {"dim": 250, "heads": 1}, {"dim": 256, "heads": 1}),
    (attention, {"dim": 50}, {"dim": 56}),
    (attention, {"length": 1021}, {}),
    (attention, {"length": 301, "dim": 61, "seeds": 7}, {"length": 304, "dim": 64, "seeds": 8}),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    result = {**origin("odd_sizes"), "floor": floor(), "rows": []}
    for make, odd, padded in CASES:
        for name, dtype in DTYPES.items():
            if dtype == torch.float32 and make is attention and odd.get("dim") not in (None, 127):
                continue  # one path for all: no vectors
            calls = {"odd": make(dtype, **odd), "padded": make(dtype, **padded)}
            times = measure({n: lambda i, call=call: call() for n, call in calls.items()})
            times["ratio"] = times["odd"] / times["padded"]
            case = {"operator": make.__name__, "dtype": name, "odd": odd, "padded": padded}
            result["rows"].append({"case": case, **{k: round(v, 3) for k, v in times.items()}})
            print(f"{make.__name__:19s} {name} {odd}: " + ", ".join(f"{k} {v:.2f}" for k, v in times.items()), flush=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n")
            del calls
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
