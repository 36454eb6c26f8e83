"""Makes random valid ranking programs over the transform's rule families and exports them (random_steps.py says what a
program is).

usage: random_programs.py OUT_DIR --count N [--seed S] [--jobs J]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import warnings
from pathlib import Path

import torch

from random_ranking import RankingSteps
from random_steps import BATCH, Program


class Maker(RankingSteps):
    """Draws steps until a program is long enough."""

    def make(self) -> Program:
        families = (
            [self.pointwise] * 3 + [self.binary] * 3 + [self.concatenate] * 5 + [self.reshape] * 4 + [self.reduce] * 2
            + [self.linear] * 5 + [self.spread] * 3 + [self.product, self.normalise, self.normalise, self.lookup]
            + [self.lookup] * 2 + [self.create, self.recur] + [self.tower] * 4 + [self.unit] * 2 + [self.compress] * 3 + [self.target] * 5
            + [self.fields] * 4 + [self.write] * 2 + [self.costly] * 3 + [self.bag]
            + [self.spread_rows] * (10 if self.kind in ("single", "looked up") else 0) + [self.bag] * (8 if self.bags else 0)
        )  # fmt: skip
        target = self.random.randrange(6, 26)
        for _ in range(400):
            if len(self.program.steps) >= target:
                break
            mixes = 0.015 if self.kind in ("rows", "packed", "bags") else 0  # else refused
            family = self.mix if self.random.random() < mixes else self.random.choice(families)
            try:
                family()
            except (LookupError, ValueError, RuntimeError, IndexError, TypeError):
                continue
        self.finish()
        return self.program

    def finish(self) -> None:
        """Outputs: everything that keeps the batch in front, summed to a row a candidate, and a few values as they are."""
        rows = [i for i in self.floats() if self.values[i].shape[0] == BATCH]
        item = next(i for i in rows if i == (len(self.example) + 3 if self.kind == "packed" else 4))

        def score(*values: torch.Tensor) -> torch.Tensor:
            return torch.stack([v.reshape(v.shape[0], -1).mean(1) for v in values], dim=1)

        while self.bags and len(self.of_bags) < 2:  # export drops inputs' sizes with what nothing reads
            self.bag()
        chosen = sorted(set(rows[-4:] + [self.pick(rows), item, *self.of_bags.values()]))
        self.program.outputs.append(self.add(score, chosen))
        extra = [i for i in rows[-3:] if self.values[i].is_contiguous()]
        if extra and self.random.random() < 0.4:
            self.program.outputs.append(self.random.choice(extra))


def export(seed: int, path: Path) -> str:
    """Exports the program of a seed; returns what stood in the way, or nothing."""
    warnings.filterwarnings("ignore")
    maker = Maker(seed)
    program = maker.make().eval()
    batch, users = torch.export.Dim("batch", min=2), torch.export.Dim("users", min=1)
    of_users = {"single": {}, "looked up": {0: users}}.get(maker.kind, {0: batch})
    shapes = {k: of_users if k.startswith(("user_", "hist_")) else {0: batch} for k in maker.example}
    for name in maker.bags:
        side, what = name.split("_")
        shapes[name] = {0: torch.export.Dim(f"{side}_total") if what == "values" else batch + 1 if side == "hist" else batch}
    try:
        with torch.no_grad():
            exported = torch.export.export(
                program, (maker.example,), dynamic_shapes=(shapes,), strict=False
            )
            if seed % 3 == 0:  # the form that users are told to save; the raw one differs in batch norms and the like
                exported = exported.run_decompositions({})
    except Exception as error:  # noqa: BLE001 - a program that does not export is no program
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    torch.export.save(exported, path)
    return ""


def work(task: tuple[int, Path]) -> tuple[int, str]:
    torch.set_num_threads(1)
    seed, path = task
    if path.is_file():  # of an earlier run into the same folder
        return seed, ""
    part = path.with_suffix(".part.pt2")
    problem = export(seed, part)
    if not problem:
        part.replace(path)
    return seed, problem


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.out.glob("*.part.pt2"):
        part.unlink()
    made, refused, seed = 0, 0, options.seed * 1_000_000
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        while made < options.count:
            wanted = options.count - made
            tasks = [(s, options.out / f"program_{s}.pt2") for s in range(seed, seed + wanted + wanted // 4)]
            seed += len(tasks)
            for number, problem in pool.imap_unordered(work, tasks, chunksize=4):
                if problem:
                    refused += 1
                elif made == options.count:
                    (options.out / f"program_{number}.pt2").unlink()
                else:
                    made += 1
                    if made % 50 == 0:
                        print(f"{made} programs", file=sys.stderr, flush=True)
    (options.out / "count.json").write_text(json.dumps({"programs": made, "not exported": refused}))
    print(f"{made} programs in {options.out} ({refused} did not export)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
