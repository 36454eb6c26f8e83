"""The demo's data and model: no look into the future, an honest split, requests in the form the command reads."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "movielens"
USER_SIDE = {"user_id", "user_age", "user_gender", "user_occupation", "hist_film", "hist_genre"}
CANDIDATE_SIDE = {"film", "genres", "year"}


def example(name: str) -> ModuleType:
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module(name)


data = example("data")
MovieLens = data.MovieLens


@pytest.fixture(scope="module")
def movielens() -> MovieLens:
    return data.load()


@pytest.fixture(scope="module")
def all_requests(movielens: MovieLens) -> list[data.Request]:
    return movielens.requests(np.arange(1, movielens.users.count + 1), seed=20)


def test_recbole_is_found_without_importing_it(movielens: MovieLens) -> None:
    assert "recbole" not in sys.modules
    assert (movielens.users.count, movielens.films.count, len(movielens.events)) == (943, 1682, 100_000)


def test_events_are_ordered_by_user_time_film(movielens: MovieLens) -> None:
    events = movielens.events
    rows = np.stack([events.user, events.time, events.film])
    assert (np.lexsort(rows[::-1]) == np.arange(len(events))).all()
    assert len(np.unique(rows, axis=1).T) == len(events), "the order has no ties left"


def test_many_events_share_user_and_second(movielens: MovieLens) -> None:
    """The property below means something only if ties are common."""
    events = movielens.events
    _, inverse, count = np.unique(
        np.stack([events.user, events.time]), axis=1, return_inverse=True, return_counts=True)
    assert (count[inverse.ravel()] > 1).mean() == pytest.approx(0.758, abs=0.001)


def test_history_is_exactly_the_latest_of_the_strictly_earlier(movielens: MovieLens) -> None:
    """For every event, against a second implementation that knows nothing of sorted arrays."""
    events = movielens.events
    histories = events.history_before(np.arange(len(events)))
    assert histories.shape == (100_000, data.HISTORY_LENGTH)
    earlier: list[int] = []
    same_second: list[int] = []
    for index, (user, film, time) in enumerate(zip(events.user.tolist(), events.film.tolist(), events.time.tolist())):
        if index == 0 or user != events.user[index - 1]:
            earlier, same_second = [], []
        elif time != events.time[index - 1]:
            earlier, same_second = earlier + same_second, []
        expected = earlier[-data.HISTORY_LENGTH:]
        assert histories[index].tolist() == expected + [0] * (data.HISTORY_LENGTH - len(expected))
        same_second.append(film)


def test_split_cuts_between_seconds_and_keeps_sizes(movielens: MovieLens) -> None:
    events = movielens.events
    for user in range(1, movielens.users.count + 1):
        mine = events.events_of(user)
        times, held_out = events.time[mine], events.held_out[mine]
        assert 0 < held_out.sum() < len(mine)
        assert times[~held_out].max() < times[held_out].min()
        assert held_out.sum() >= 0.2 * len(mine) - 1
        after_the_first_second = times[held_out] > times[held_out].min()
        assert after_the_first_second.sum() < 0.2 * len(mine) + 1, "only a straddling second makes the part larger"
    assert events.held_out.mean() == pytest.approx(0.214, abs=0.001)


def test_popularity_counts_nothing_held_out(movielens: MovieLens) -> None:
    events = movielens.events
    assert movielens.popularity.sum() == (~events.held_out).sum()
    only_later = np.setdiff1d(events.film[events.held_out], events.film[~events.held_out])
    assert len(only_later) and not movielens.popularity[only_later].any()


def test_requests_rank_held_out_films_against_never_rated_ones(
        movielens: MovieLens, all_requests: list[data.Request]) -> None:
    events = movielens.events
    for request in all_requests:
        mine = events.events_of(request.user)
        held_out = events.held_out[mine]
        positives, negatives = request.films[request.labels == 1], request.films[request.labels == 0]
        assert len(np.unique(request.films)) == len(request.films) == 70
        assert set(positives) <= set(events.film[mine][held_out])
        assert len(positives) == min(20, held_out.sum())
        assert not set(negatives) & set(events.film[mine])
        assert request.history[request.history != 0].tolist() == events.film[mine][~held_out][-50:].tolist()
        assert not set(request.history) & set(positives)


def test_requests_depend_on_seed_and_user_alone(movielens: MovieLens, all_requests: list[data.Request]) -> None:
    again = movielens.requests(np.array([700, 7]), seed=20)
    for request in again:
        before = all_requests[request.user - 1]
        assert (request.films == before.films).all() and (request.labels == before.labels).all()
    other = movielens.requests(np.array([7]), seed=21)[0]
    assert set(other.films[other.labels == 0]) != set(again[1].films[again[1].labels == 0])


def test_features_of_known_films_and_users(movielens: MovieLens) -> None:
    films, users = movielens.films, movielens.users
    assert films.titles[1] == "Toy Story"
    assert [films.genre_names[genre] for genre in films.genres[1] if genre] == ["Animation", "Children's", "Comedy"]
    assert films.genre_names[films.main_genre[1]] == "Animation"
    assert films.year[1] == data._year_id("1995") == 13
    assert films.year[267] == 0, "an unknown year"
    assert (users.age[1], users.gender[1], users.occupations[users.occupation[1]]) == (2, 2, "technician")


@pytest.mark.parametrize("released, expected", [
    ("1922", 1), ("1929", 1), ("1930", 2), ("1989", 7), ("1990", 8), ("1998", 16), ("2024", 16), ("V", 0)])
def test_year_ids(released: str, expected: int) -> None:
    assert data._year_id(released) == expected < data.YEAR_IDS


@pytest.mark.parametrize("title, expected", [
    ("Usual Suspects, The", "The Usual Suspects"),
    ("Horseman on the Roof, The (Hussard sur le toit, Le)", "The Horseman on the Roof (Le Hussard sur le toit)"),
    ("Good, The Bad and The Ugly, The", "The Good, The Bad and The Ugly"),
    ("Star Maker, The (Uomo delle stelle, L')", "The Star Maker (L'Uomo delle stelle)"),
    ("To Wong Foo, Thanks for Everything! Julie Newmar", "To Wong Foo, Thanks for Everything! Julie Newmar"),
    ("Toy Story", "Toy Story")])
def test_titles_read_naturally(title: str, expected: str) -> None:
    assert data.natural_title(title) == expected


@contextmanager
def small_scale() -> Iterator[None]:
    """A fifth of the history makes training five times as fast; the model takes any length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "HISTORY_LENGTH", 10)
        patch.setattr(example("train"), "BATCH_SIZE", 256)
        yield


@pytest.fixture(scope="module")
def short_training(movielens: MovieLens) -> Any:
    """The demo's model after some seconds of training."""
    pytest.importorskip("torch_rechub")
    with small_scale():
        return example("train").train(movielens, epochs=1, max_batches=700, quiet=True)


def test_training_rows_keep_to_their_side(movielens: MovieLens) -> None:
    pytest.importorskip("torch_rechub")
    train = example("train")
    events = movielens.events
    rows, films, labels = (np.concatenate(part) for part in zip(*train.TrainingRows(movielens, seed=1).epoch(4096)))
    assert not events.held_out[rows].any()
    assert labels.mean() == pytest.approx(1 / (1 + train.NEGATIVES))
    assert (films[labels == 1] == events.film[rows[labels == 1]]).all()
    pairs = events.user * 10_000 + events.film
    drawn = events.user[rows[labels == 0]] * 10_000 + films[labels == 0]
    assert not np.isin(drawn, pairs[~events.held_out]).any()
    assert np.isin(drawn, pairs[events.held_out]).any(), "leaving these out would tell what is held out"


def test_short_training_beats_popularity(movielens: MovieLens, short_training: Any) -> None:
    with small_scale():
        some = movielens.requests(np.arange(1, movielens.users.count + 1, 4), seed=20)
        figures = example("train").evaluate(short_training, movielens, some)
    assert figures["din"]["pooled"] > figures["popularity"]["pooled"] + 0.01
    assert figures["din"]["mean_user"] > figures["popularity"]["mean_user"] + 0.01


def test_requests_file(
        movielens: MovieLens, all_requests: list[data.Request], short_training: Any, tmp_path: Path) -> None:
    export = example("export")
    chosen = export.demo_requests(movielens, all_requests)
    export.write_requests(movielens, chosen, tmp_path / "requests.json")
    requests = json.loads((tmp_path / "requests.json").read_text(encoding="utf-8"))["requests"]
    assert len(requests) == 15 and len({request["id"] for request in requests}) == 15
    rows_of = {name: table.num_embeddings for name, table in short_training.embedding.embed_dict.items()}
    table_of = {"hist_film": "film", "hist_genre": "genres"}
    for request in requests:
        assert set(request["user"]) == USER_SIDE and set(request["candidates"]) == CANDIDATE_SIDE
        shapes = {name: np.shape(values) for name, values in (request["user"] | request["candidates"]).items()}
        scalars = {name: () for name in USER_SIDE if name.startswith("user_")}
        assert shapes == scalars | {"hist_film": (50,), "hist_genre": (50,), "film": (70,), "genres": (70, 6),
                                    "year": (70,)}
        for name, values in (request["user"] | request["candidates"]).items():
            assert 0 <= np.min(values) and np.max(values) < rows_of[table_of.get(name, name)]
        assert sorted(set(request["labels"])) == [0, 1] and len(request["labels"]) == 70
        assert len(request["baselines"]["popularity"]) == len(request["names"]) == 70
        assert len(request["history_names"]) == np.count_nonzero(request["user"]["hist_film"])
        newest = request["user"]["hist_film"][len(request["history_names"]) - 1]
        assert request["history_names"][-1] == movielens.films.titles[newest]


def test_exported_program_takes_any_batch_and_names_its_inputs(
        movielens: MovieLens, all_requests: list[data.Request], short_training: Any) -> None:
    torch = pytest.importorskip("torch")
    train, export = example("train"), example("export")
    program = export.export(short_training, movielens, all_requests[0])
    assert {name.removeprefix("x_") for name in program.graph_signature.user_inputs} == USER_SIDE | CANDIDATE_SIDE
    inputs = train.request_inputs(movielens, all_requests[1])
    with torch.inference_mode():
        for rows in (2, 33, 70):
            some = {name: values[:rows] for name, values in inputs.items()}
            torch.testing.assert_close(program.module()(some), short_training(some))
