"""Trains torch-rechub's DIN, class unmodified, to rank the films a user is going to rate next.

Task: for a user with the history so far, is this film one that the user rates next (1) or one that was never rated (0)?
Training rows are the ratings outside the held-out part, each with its strict history, and NEGATIVES films drawn evenly
from those that the user has not rated outside the held-out part (a film of the held-out part can be among them:
leaving these out would tell the model what is held out).

Evaluation: each of the 943 users once, with the history at the split and 70 candidates: the next held-out films (at
most 20) and films the user never rated, drawn evenly. The baseline ranks the same candidates by their number of ratings
outside the held-out part.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch_rechub.basic.features import SequenceFeature, SparseFeature
from torch_rechub.basic.initializers import RandomNormal
from torch_rechub.models.ranking import DIN

import cache
from data import PADDING, YEAR_IDS, Ints, MovieLens, Request, load

Floats = NDArray[np.float64] | NDArray[np.float32]

HERE = Path(__file__).parent
SEED = 20
EMBEDDING = 16
NEGATIVES = 3
BATCH_SIZE = 768
LEARNING_RATE = 4e-3  # falls to a tenth of it in the last epoch
WEIGHT_DECAY = 1e-5
EPOCHS = 2
WEIGHTS_FILE = "din-weights.pt"
EVALUATION_FILE = "evaluation.json"


def build_model(data: MovieLens) -> DIN:
    """History feature i attends to target feature i: films to films, main genres to the mean of all genres."""
    def sparse(name: str, ids: int, **options: object) -> SparseFeature:
        return SparseFeature(name, ids, EMBEDDING, initializer=RandomNormal(0, 0.05), **options)

    def sequence(name: str, ids: int, **options: object) -> SequenceFeature:
        return SequenceFeature(name, ids, EMBEDDING, padding_idx=PADDING, initializer=RandomNormal(0, 0.05), **options)

    users, films = data.users, data.films
    genre_ids = len(films.genre_names)
    return DIN(
        features=[
            sparse("user_id", users.count + 1), sparse("user_age", int(users.age.max()) + 1),
            sparse("user_gender", 3), sparse("user_occupation", len(users.occupations))],
        history_features=[
            sequence("hist_film", films.count + 1, pooling="concat", shared_with="film"),
            sequence("hist_genre", genre_ids, pooling="concat", shared_with="genres")],
        target_features=[
            sparse("film", films.count + 1, padding_idx=PADDING), sequence("genres", genre_ids, pooling="mean"),
            sparse("year", YEAR_IDS)],
        mlp_params={"dims": [64, 32], "dropout": 0.2},
        attention_mlp_params={"dims": [32], "activation": "dice", "use_softmax": False})


def tensors(columns: dict[str, Ints]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in columns.items()}


def request_inputs(data: MovieLens, request: Request) -> dict[str, Tensor]:
    """What the broadcast model takes: the user's row repeated for every candidate."""
    count = len(request.films)
    user = data.user_inputs(np.full(count, request.user), np.tile(request.history, (count, 1)))
    return tensors(user | data.candidate_inputs(request.films))


class TrainingRows:
    """Ratings outside the held-out part as positives, fresh negatives every epoch."""

    def __init__(self, data: MovieLens, seed: int) -> None:
        events = data.events
        self.data, self.rng = data, np.random.default_rng(seed)
        positives = np.flatnonzero(~events.held_out)
        self.positives = positives[events.user_start[positives] < events.second_start[positives]]  # with a history
        self.known = np.zeros((data.users.count + 1, data.films.count + 1), dtype=bool)
        self.known[events.user[positives], events.film[positives]] = True

    def negatives(self, users: Ints) -> Ints:
        films = self.rng.integers(1, self.data.films.count + 1, len(users))
        while (again := np.flatnonzero(self.known[users, films])).size:
            films[again] = self.rng.integers(1, self.data.films.count + 1, again.size)
        return films

    def epoch(self, batch_size: int) -> list[tuple[Ints, Ints, Ints]]:
        """Batches of (events, films, labels): the event gives user and history."""
        events = np.repeat(self.positives, 1 + NEGATIVES)
        labels = np.tile([1] + [0] * NEGATIVES, len(self.positives))
        films = self.data.events.film[events].copy()
        films[labels == 0] = self.negatives(self.data.events.user[events[labels == 0]])
        order = self.rng.permutation(len(events))
        batches = np.array_split(order, np.arange(batch_size, len(order), batch_size))
        return [(events[rows], films[rows], labels[rows]) for rows in batches if len(rows) > 1]

    def inputs(self, events: Ints, films: Ints) -> dict[str, Tensor]:
        users, histories = self.data.events.user[events], self.data.events.history_before(events)
        return tensors(self.data.user_inputs(users, histories) | self.data.candidate_inputs(films))


def train(data: MovieLens, epochs: int = EPOCHS, max_batches: int | None = None, quiet: bool = False) -> DIN:
    torch.manual_seed(SEED)
    model, rows = build_model(data), TrainingRows(data, SEED)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    loss_of = nn.BCELoss()
    for epoch in range(epochs):
        batches = rows.epoch(BATCH_SIZE)[:max_batches]
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(batches)) if epoch == epochs - 1 else None
        progress = Progress(f"epoch {epoch + 1} of {epochs}", len(batches), quiet)
        for events, films, labels in batches:
            loss = loss_of(model(rows.inputs(events, films)), torch.from_numpy(labels).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if schedule:
                schedule.step()
            progress.step(loss.item())
    return model.eval()


class Progress:
    """One line every few seconds, readable in a terminal and in a log."""

    def __init__(self, name: str, total: int, quiet: bool, interval: float = 5.0) -> None:
        self.name, self.total, self.quiet, self.interval = name, total, quiet, interval
        self.done, self.loss, self.begin, self.said = 0, 0.0, time.monotonic(), time.monotonic()

    def step(self, loss: float) -> None:
        self.done, self.loss = self.done + 1, self.loss + loss
        now = time.monotonic()
        if self.quiet or (now - self.said < self.interval and self.done < self.total):
            return
        self.said = now
        print(f"  {self.name}: {self.done:4d}/{self.total} batches, mean loss {self.loss / self.done:.4f}, "
              f"{now - self.begin:.0f} s", flush=True)


def scores(model: DIN, data: MovieLens, requests: list[Request], requests_a_batch: int = 32) -> list[Floats]:
    result: list[Floats] = []
    with torch.inference_mode():
        for start in range(0, len(requests), requests_a_batch):
            inputs = [request_inputs(data, request) for request in requests[start:start + requests_a_batch]]
            joined = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
            sizes = [len(one["film"]) for one in inputs]
            result += [part.numpy() for part in model(joined).split(sizes)]
    return result


def auc_figures(requests: list[Request], scored: list[Floats]) -> dict[str, float]:
    """Pooled over all pairs of (user, candidate), and the mean over users of each user's own."""
    labels = [request.labels for request in requests]
    own = [roc_auc_score(label, score) for label, score in zip(labels, scored)]
    pooled = roc_auc_score(np.concatenate(labels), np.concatenate(scored))
    return {"pooled": float(pooled), "mean_user": float(np.mean(own))}


def evaluate(model: DIN, data: MovieLens, requests: list[Request]) -> dict[str, dict[str, float]]:
    by_popularity = [data.popularity[request.films].astype(np.float64) for request in requests]
    return {"din": auc_figures(requests, scores(model, data, requests)),
            "popularity": auc_figures(requests, by_popularity)}


def evaluation_requests(data: MovieLens) -> list[Request]:
    return data.requests(np.arange(1, data.users.count + 1), SEED)


def figures_text(figures: dict[str, dict[str, float]], requests: int, candidates: int) -> str:
    rows = [f"  {'AUC':<12}{'pooled':>10}{'mean of users':>16}"]
    rows += [f"  {name:<12}{auc['pooled']:>10.4f}{auc['mean_user']:>16.4f}" for name, auc in figures.items()]
    about = f"  {requests} users, {candidates:,} candidates; label 1: the user rates the film next, 0: never rated it"
    return "\n".join([about, *rows])


def trained_model(data: MovieLens, folder: Path) -> DIN:
    """The model that `main` has trained into this folder."""
    model = build_model(data)
    model.load_state_dict(torch.load(folder / WEIGHTS_FILE, weights_only=True))
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains DIN on MovieLens-100K; does nothing if that is done already.")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the weights")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads to train with")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    weights, report = arguments.out / WEIGHTS_FILE, arguments.out / EVALUATION_FILE

    data, wanted = load(), cache.key([HERE / "train.py", HERE / "data.py"], torch.__version__)
    requests = evaluation_requests(data)
    if cache.is_current(weights, wanted):
        print(f"  {weights} is up to date")
        figures = json.loads(report.read_text())
    else:
        torch.set_num_threads(arguments.threads)
        begin = time.monotonic()
        model = train(data)
        print(f"  trained in {time.monotonic() - begin:.0f} s")
        figures = evaluate(model, data, requests)
        torch.save(model.state_dict(), weights)
        report.write_text(json.dumps(figures, indent=1) + "\n")
        cache.mark_current(weights, wanted)
    print(figures_text(figures, len(requests), sum(len(request.films) for request in requests)))


if __name__ == "__main__":
    main()
