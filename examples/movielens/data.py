"""MovieLens-100K as a ranking problem: strict histories, a split by time, and candidates to rank.

The ratings come from the installed `recbole` package and are read in place. Many ratings share user and second with
others (whole pages were rated at once), so "before" always means a strictly smaller time: what a user rated in the
same second is never part of a history. The order inside one second is fixed by the film's number.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

HISTORY_LENGTH = 50  # films in a history, the latest ones, oldest first, padded with 0 at the end
GENRES_WIDTH = 6  # no film has more genres
HELD_OUT_PART = 0.2  # of each user's ratings, the latest
PADDING = 0

AGE_LIMITS = np.array([18, 25, 35, 45, 50, 56])  # the age groups of MovieLens-1M
FIRST_SINGLE_YEAR = 1990  # older films are grouped by decade
OLDEST_DECADE = 1920
LAST_YEAR = 1998


@dataclass(frozen=True)
class Users:
    """Row u describes user u; row 0 is padding. All columns are ids from 1."""

    age: Ints
    gender: Ints
    occupation: Ints
    occupations: list[str]

    @property
    def count(self) -> int:
        return len(self.age) - 1


@dataclass(frozen=True)
class Films:
    """Row f describes film f; row 0 is padding. A year or genre of 0 is unknown or padding."""

    titles: list[str]
    year: Ints
    genres: Ints  # (films + 1, GENRES_WIDTH)
    main_genre: Ints  # the rarest of the film's genres: it says most about it
    genre_names: list[str]

    @property
    def count(self) -> int:
        return len(self.titles) - 1


@dataclass(frozen=True)
class Events:
    """Ratings, ordered by user, then time, then film. All arrays have one entry a rating."""

    user: Ints
    film: Ints
    time: Ints

    def __len__(self) -> int:
        return len(self.user)

    @cached_property
    def user_start(self) -> Ints:
        """For each event: index of the first event of its user."""
        return _start_of_run(self.user[1:] != self.user[:-1])

    @cached_property
    def second_start(self) -> Ints:
        """For each event: index of the first event of the same user in the same second."""
        return _start_of_run((self.user[1:] != self.user[:-1]) | (self.time[1:] != self.time[:-1]))

    @cached_property
    def held_out(self) -> NDArray[np.bool_]:
        """The last part of each user's events; a second that straddles the cut is held out as a whole."""
        first, sizes = np.unique(self.user, return_index=True, return_counts=True)[1:]
        cuts = self.second_start[first + np.floor(sizes * (1 - HELD_OUT_PART)).astype(np.int64)]
        return np.arange(len(self)) >= np.repeat(cuts, sizes)

    def events_of(self, user: int) -> Ints:
        return np.arange(*np.searchsorted(self.user, [user, user + 1]))

    def histories(self, begin: Ints, end: Ints) -> Ints:
        """(rows, HISTORY_LENGTH): for each row the latest films of the events [begin, end), oldest first."""
        length = np.minimum(end - begin, HISTORY_LENGTH)[:, None]
        column = np.arange(HISTORY_LENGTH)[None, :]
        index = np.minimum(end[:, None] - length + column, len(self) - 1)
        return np.where(column < length, self.film[index], PADDING)

    def history_before(self, events: Ints) -> Ints:
        """(rows, HISTORY_LENGTH): what the user of each event had rated in earlier seconds."""
        return self.histories(self.user_start[events], self.second_start[events])


@dataclass(frozen=True)
class Request:
    """One user, the history at the moment of the split, and the films to rank."""

    user: int
    history: Ints  # (HISTORY_LENGTH,)
    films: Ints  # (candidates,)
    labels: Ints  # (candidates,) 1: held-out rating of this user, 0: never rated by this user


@dataclass(frozen=True)
class MovieLens:
    users: Users
    films: Films
    events: Events

    @cached_property
    def popularity(self) -> Ints:
        """For each film: its number of ratings outside the held-out part."""
        return np.bincount(self.events.film[~self.events.held_out], minlength=self.films.count + 1)

    def user_inputs(self, users: Ints, histories: Ints) -> dict[str, Ints]:
        """The request-only inputs of the model, one row a user."""
        return {
            "user_id": users,
            "user_age": self.users.age[users],
            "user_gender": self.users.gender[users],
            "user_occupation": self.users.occupation[users],
            "hist_film": histories,
            "hist_genre": self.films.main_genre[histories],
        }

    def candidate_inputs(self, films: Ints) -> dict[str, Ints]:
        """The candidates' inputs of the model, one row a film."""
        return {"film": films, "genres": self.films.genres[films], "year": self.films.year[films]}

    def request(self, user: int, candidates: int, max_positives: int, rng: np.random.Generator) -> Request:
        """The user's next `max_positives` held-out films at most, filled up with films the user never rated."""
        mine = self.events.events_of(user)
        later = mine[self.events.held_out[mine]]
        positives = self.events.film[later[:max_positives]]
        never_rated = np.setdiff1d(np.arange(1, self.films.count + 1), self.events.film[mine])
        negatives = rng.choice(never_rated, candidates - len(positives), replace=False)
        films = np.concatenate([positives, negatives])
        labels = np.repeat([1, 0], [len(positives), len(negatives)])
        order = rng.permutation(candidates)
        history = self.events.histories(mine[:1], later[:1])[0]
        return Request(user, history, films[order], labels[order])

    def requests(self, users: Ints, seed: int, candidates: int = 70, max_positives: int = 20) -> list[Request]:
        """A user's candidates depend on the seed and the user alone."""
        return [self.request(int(u), candidates, max_positives, np.random.default_rng([seed, int(u)])) for u in users]


def load(folder: Path | None = None) -> MovieLens:
    folder = folder or dataset_folder()
    return MovieLens(
        _users(_rows(folder / "ml-100k.user")), _films(_rows(folder / "ml-100k.item")),
        _events(_rows(folder / "ml-100k.inter")))


def dataset_folder() -> Path:
    """Where the installed recbole package keeps MovieLens-100K; recbole itself is not imported."""
    spec = importlib.util.find_spec("recbole")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("recbole is not installed, it carries MovieLens-100K: run scripts/setup.sh")
    folder = Path(spec.submodule_search_locations[0]) / "dataset_example" / "ml-100k"
    if not (folder / "ml-100k.inter").is_file():
        raise SystemExit(f"no MovieLens-100K in {folder}: recbole 1.2.1 has it, run scripts/setup.sh")
    return folder


def natural_title(title: str) -> str:
    """`Horseman on the Roof, The (Hussard sur le toit, Le)` -> `The Horseman on the Roof (Le Hussard sur le toit)`"""
    articles = r"(The|A|An|Il|La|Le|Les|L'|Das|Der|Die|El|Los|Las|Det|O)"
    moved = re.sub(rf"(^|\()([^()]+), {articles}(?= *[()]|$)", r"\1\3 \2", title)
    return moved.replace("L' ", "L'")


def _rows(path: Path) -> list[list[str]]:
    """The lines of one of RecBole's tab-separated files, without the header."""
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def _users(rows: list[list[str]]) -> Users:
    occupations = sorted({row[3] for row in rows})
    table = np.zeros((len(rows) + 1, 3), dtype=np.int64)
    for number, age, gender, occupation, _ in rows:
        age_group = 1 + int(np.searchsorted(AGE_LIMITS, int(age), side="right"))
        table[int(number)] = [age_group, 1 + "FM".index(gender), 1 + occupations.index(occupation)]
    return Users(table[:, 0], table[:, 1], table[:, 2], [""] + occupations)


def _films(rows: list[list[str]]) -> Films:
    names = sorted({genre for row in rows for genre in row[3].split()})
    titles, year = [""] * (len(rows) + 1), np.zeros(len(rows) + 1, dtype=np.int64)
    genres = np.zeros((len(rows) + 1, GENRES_WIDTH), dtype=np.int64)
    for number, title, released, listed in rows:
        film, ids = int(number), [1 + names.index(genre) for genre in listed.split()]
        titles[film], year[film] = natural_title(title), _year_id(released)
        genres[film, :len(ids)] = ids
    frequency = np.bincount(genres.ravel(), minlength=len(names) + 1)
    by_rarity = np.where(genres == PADDING, len(genres) * GENRES_WIDTH, frequency[genres])
    main_genre = genres[np.arange(len(genres)), by_rarity.argmin(axis=1)]
    return Films(titles, year, genres, main_genre, [""] + names)


def _year_id(released: str) -> int:
    """0 if unknown, one id a decade until 1989, one id a year from 1990."""
    if not released.isdigit():
        return 0
    decades = (FIRST_SINGLE_YEAR - OLDEST_DECADE) // 10
    if int(released) < FIRST_SINGLE_YEAR:
        return 1 + (int(released) - OLDEST_DECADE) // 10
    return 1 + decades + min(int(released), LAST_YEAR) - FIRST_SINGLE_YEAR


YEAR_IDS = _year_id(str(LAST_YEAR)) + 1


def _events(rows: list[list[str]]) -> Events:
    user, film, time = (np.array([int(float(row[column])) for row in rows], dtype=np.int64) for column in (0, 1, 3))
    order = np.lexsort((film, time, user))
    return Events(user[order], film[order], time[order])


def _start_of_run(changes: NDArray[np.bool_]) -> Ints:
    """changes[i] says that entry i + 1 starts a run; the result names for each entry the start of its run."""
    starts = np.concatenate([[True], changes])
    return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))
