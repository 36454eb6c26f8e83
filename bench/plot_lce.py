#!/usr/bin/env python3
"""Draws what lce_peers.py measured, both sweeps, as time over that of the two GEMMs alone, and prints where fused_ws
stands: at each point of the sweeps and over the other shapes. Drawing needs matplotlib.

usage: plot_lce.py bench/results/h200/lce_peers.json [docs/kernels/linear_compression_sweeps.svg]"""

import json
import math
import sys

STAGES = ("fused_ws", "fused", "decomposed_padded", "triton", "tlx")
RIVALS = ("broadcast", "decomposed", "decomposed_padded", "triton", "tlx")
MAIN = (433, 256, 1178, 866)


def read(path):
    """Case -> name -> microseconds; two_gemms is the sum of both measured alone."""
    with open(path) as file:
        rows = json.load(file)["rows"]
    cases = {}
    for row in rows:
        cases.setdefault(tuple(row["case"].values()), {})[row["name"]] = row["us"]
    for times in cases.values():
        times["two_gemms"] = times["candidate_gemm_alone"] + times["user_gemm_alone"]
    return cases


def report(cases):
    others, ours = [], "fused_ws"
    for case, times in cases.items():
        rival = min((name for name in RIVALS if name in times), key=times.get)
        lead = times[rival] / times[ours]
        if case[1:5] == MAIN:
            gemms = times[ours] / times["two_gemms"]
            print(case[6], f"B {case[0]:5d} ratio {case[5]:5d}: {times[ours]:8.1f} us, {gemms:.3f} of the two GEMMs, "
                  f"{lead:.2f} times as fast as {rival}")
        elif case[1] != MAIN[0]:
            others.append((lead, case, rival))
    if others:
        mean = math.exp(sum(math.log(lead) for lead, *_ in others) / len(others))
        behind = [other for other in sorted(others) if other[0] < 0.95]
        print(f"{len(others)} other shapes: {mean:.3f} times as fast as the best rival in geometric mean")
        print(f"under 0.95: {len(behind)}")
        for lead, case, rival in behind:
            print(f"  {lead:.2f}", *case, rival)


def draw(cases, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "ikbo", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharey=True, layout="constrained")
    for row, dtype in zip(axes, ("bf16", "fp16")):
        for axis, swept, fixed, label in ((row[0], 0, (5, 70), "candidates, 70 a user"),
                                          (row[1], 5, (0, 1024), "candidates a user, 1024 candidates")):
            chosen = sorted((case[swept], times) for case, times in cases.items()
                            if case[1:5] == MAIN and case[6] == dtype and case[fixed[0]] == fixed[1])
            for name in STAGES:
                points = [(x, times[name] / times["two_gemms"]) for x, times in chosen if name in times]
                if points:
                    axis.plot(*zip(*points), marker="o", markersize=3, label=name)
            axis.axhline(1, color="grey", linewidth=0.8)
            axis.set(xscale="log", xlabel=label, title=dtype, ylim=(0, None))
            axis.grid(alpha=0.3)
        row[0].set_ylabel("time over the two GEMMs alone")
    axes[1][0].legend()
    figure.savefig(path, metadata={"Date": None})


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    cases = read(sys.argv[1])
    report(cases)
    if len(sys.argv) == 3:
        draw(cases, sys.argv[2])


main()
