"""Exports the trained DIN with one dynamic batch size and writes the requests that the `ikbo` command scores.

The archive is the standard one of `torch.export.save`: a broadcast model, in which every input has one row a candidate.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.export import Dim, ExportedProgram
from torch_rechub.models.ranking import DIN

import cache
from data import PADDING, MovieLens, Request, load
from train import HERE, WEIGHTS_FILE, evaluate, evaluation_requests, figures_text, request_inputs, trained_model

REQUESTS = 15
REQUESTS_SEED = 7
MIN_POSITIVES = 5
ARCHIVE_FILE = "din.pt2"
REQUESTS_FILE = "requests.json"


def export(model: DIN, data: MovieLens, example: Request) -> ExportedProgram:
    """The example's rows must be more than one: a batch of 1 would become a constant of the graph."""
    inputs = request_inputs(data, example)
    batch = Dim("batch")
    program = torch.export.export(model.eval(), (inputs,), dynamic_shapes=({name: {0: batch} for name in inputs},))
    return program.run_decompositions({})  # no in-place operators; linear and attention stay whole


def demo_requests(data: MovieLens, requests: list[Request]) -> list[Request]:
    """REQUESTS users drawn at random among those with MIN_POSITIVES held-out films or more."""
    eligible = [request for request in requests if request.labels.sum() >= MIN_POSITIVES]
    drawn = np.random.default_rng(REQUESTS_SEED).choice(len(eligible), REQUESTS, replace=False)
    return [eligible[index] for index in sorted(drawn)]


def request_json(data: MovieLens, request: Request) -> dict[str, object]:
    titles = data.films.titles
    user = data.user_inputs(np.array([request.user]), request.history[None])
    return {
        "id": f"user {request.user}",
        "user": {name: row[0].tolist() for name, row in user.items()},
        "candidates": {name: rows.tolist() for name, rows in data.candidate_inputs(request.films).items()},
        "labels": request.labels.tolist(),
        "baselines": {"popularity": data.popularity[request.films].tolist()},
        "names": [titles[film] for film in request.films],
        "history_names": [titles[film] for film in request.history if film != PADDING],
    }


def write_requests(data: MovieLens, requests: list[Request], path: Path) -> None:
    lines = ",\n".join(json.dumps(request_json(data, request), ensure_ascii=False) for request in requests)
    path.write_text('{"requests": [\n' + lines + "\n]}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Exports the trained DIN and writes requests for the ikbo command.")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder that train.py has written to")
    folder: Path = parser.parse_args().out
    archive, requests_file = folder / ARCHIVE_FILE, folder / REQUESTS_FILE
    if not (folder / WEIGHTS_FILE).is_file():
        raise SystemExit(f"{folder / WEIGHTS_FILE} is not there yet: run train.py first")
    sources = [HERE / "export.py", HERE / "train.py", HERE / "data.py", folder / WEIGHTS_FILE]
    wanted = cache.key(sources, torch.__version__)
    if requests_file.is_file() and cache.is_current(archive, wanted):
        print(f"  {archive} and {requests_file} are up to date")
        return

    torch.set_num_threads(1)
    data = load()
    model, chosen = trained_model(data, folder), demo_requests(data, evaluation_requests(data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch about itself
        torch.export.save(export(model, data, chosen[0]), archive)
    write_requests(data, chosen, requests_file)
    cache.mark_current(archive, wanted)
    print(f"  {archive}: the broadcast model, {archive.stat().st_size / 1e6:.1f} MB")
    print(f"  {requests_file}: the requests, of these")
    print(figures_text(evaluate(model, data, chosen), len(chosen), sum(len(request.films) for request in chosen)))


if __name__ == "__main__":
    main()
