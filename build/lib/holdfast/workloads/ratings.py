"""Ratings of items by users, read from the files in which they are published."""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import BadInput, Corrupt
from holdfast.workloads.datasets import unpacked
from holdfast.workloads.fetch import DataFile, Folder, obtain


@dataclass(frozen=True, slots=True, eq=False)
class Ratings:
    """The ratings of a data set: user `rows[i]` gave item `columns[i]` the rating `values[i]`; sorted by user."""

    name: str
    users: int
    items: int
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float64]


def load(name: str, data: Folder = None) -> Ratings:
    """Load the ratings called `name` from `data`, $HOLDFAST_DATA or the cache, or download them."""
    return RATINGS[name](data)


# GroupLens replaces this file from time to time: the address and the checksum are of the edition of September 2018
# (610 users), which its home still offers; the paper's is that of October 2016 (671 users). Either is read.
MOVIELENS = DataFile(
    dataset="movielens",
    folders=("movielens", "movielens/ml-latest-small", "ml-latest-small", "."),
    names=("ml-latest-small.zip", "ml-latest-small-2016-10-17.zip", "ratings.csv"),
    urls=("https://files.grouplens.org/datasets/movielens/ml-latest-small.zip",),
    sha256="696d65a3dfceac7c45750ad32df2c259311949efec81f0f144fdfb91ebc9e436",
)
# Berkeley offers these ratings as a spreadsheet of the old binary kind only, so there is no address to fetch them from.
JESTER = DataFile(
    dataset="jester",
    folders=("jester", "."),
    names=("jester-data-1.zip", "jester-data-1.csv"),
    urls=(),
    sha256="4adf783a1e03bd3be063315cb6e0a064fe63e983fd289d01b8e401a8e6c41e5f",
)


def read_movielens(path: Path) -> Ratings:
    """Read MovieLens's `ratings.csv`, plain or zipped; users and movies are renumbered without gaps."""
    # The paper counts 9,125 movies, including 59 without ratings, which are left out here.
    lines = _lines(path, "ml-latest-small/ratings.csv")
    header = next(lines, (1, b""))[1]
    if header.split(b",") != [b"userId", b"movieId", b"rating", b"timestamp"]:
        raise _bad(path, 1, "is not MovieLens's header userId,movieId,rating,timestamp")
    table = np.array([_movielens_line(path, number, line) for number, line in lines]).reshape(-1, 3)
    users, rows = np.unique(table[:, 0], return_inverse=True)
    movies, columns = np.unique(table[:, 1], return_inverse=True)
    cells = rows * len(movies) + columns
    first = np.unique(cells, return_index=True)[1]
    if len(first) < len(cells):
        again = int(np.setdiff1d(np.arange(len(cells)), first)[0])
        raise _bad(path, again + 2, "rates a movie that the same user has rated above")  # line 1 is the header
    return _sorted(path, Ratings("movielens", len(users), len(movies), rows, columns, table[:, 2]))


def _movielens_line(path: Path, number: int, line: bytes) -> tuple[float, float, float]:
    try:
        user, movie, rating, _ = map(float, line.split(b","))
    except ValueError:
        raise _bad(path, number, "is not four numbers userId,movieId,rating,timestamp") from None
    if not (user.is_integer() and movie.is_integer() and 0 < user < 2**31 and 0 < movie < 2**31):
        raise _bad(path, number, "has a userId or movieId that is not a whole number from 1")
    if not 0 < rating <= 5:
        raise _bad(path, number, f"has the rating {rating:g}, and MovieLens's go from 0.5 to 5")
    return user, movie, rating


MISSING = 99.0
JOKES = 100


def read_jester(path: Path) -> Ratings:
    """Read Jester's table, plain or zipped, with ratings scaled to [0, 10]; users without ratings are left out."""
    with suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as archive:  # `unpacked` reports anything else
        if "jester-data-1.xls" in archive.namelist():  # as Berkeley offers it, so downloading again changes nothing
            raise BadInput(f"{path} holds Jester as a spreadsheet: put jester-data-1.csv, saved from it, in its place.")
    lines = _lines(path, "jester-data-1.csv")
    table = np.array([_jester_line(path, number, line) for number, line in lines]).reshape(-1, JOKES)
    rated = table != MISSING
    table, rated = table[rated.any(axis=1)], rated[rated.any(axis=1)]
    rows, columns = np.nonzero(rated)
    return _sorted(path, Ratings("jester", len(table), JOKES, rows, columns, (table[rated] + 10) / 2))


def _jester_line(path: Path, number: int, line: bytes) -> NDArray[np.float64]:
    try:
        count, *cells = map(float, line.split(b","))
    except ValueError:
        raise _bad(path, number, "is not numbers with commas between them") from None
    if len(cells) != JOKES:
        raise _bad(path, number, f"has {len(cells) + 1} columns, and Jester has a count and {JOKES} ratings")
    ratings = np.array(cells)
    rated = ratings != MISSING
    if not np.all(np.abs(ratings[rated]) <= 10):
        raise _bad(path, number, "has a rating that is neither in -10..10 nor 99 for none")
    if count != rated.sum():
        raise _bad(path, number, f"announces {count:g} ratings and has {rated.sum()}")
    return ratings


def generated(users: int = 200, items: int = 300, rank: int = 8, share: float = 0.25, seed: int = 0) -> Ratings:
    """Generate ratings from 0.5 to 5 for a random fraction `share` of all cells: a matrix of rank `rank` plus noise."""
    rng = np.random.default_rng(seed)
    tastes, traits = rng.gamma(0.5, size=(users, rank)), rng.gamma(0.5, size=(rank, items))
    liking = tastes @ traits
    halves = np.round(10 * liking / liking.max(axis=1, keepdims=True) + rng.normal(0, 1, liking.shape))
    rows, columns = np.nonzero(rng.random(liking.shape) < share)
    return Ratings("generated", users, items, rows, columns, np.clip(halves[rows, columns], 1, 10) / 2)


RATINGS: dict[str, Callable[[Folder], Ratings]] = {
    "movielens": lambda data: read_movielens(obtain(MOVIELENS, data)),
    "jester": lambda data: read_jester(obtain(JESTER, data)),
    "generated": lambda _: generated(),
}


def _lines(path: Path, member: str) -> Iterator[tuple[int, bytes]]:
    with unpacked(path, member) as stream:
        for number, line in enumerate(stream, start=1):
            yield number, line.rstrip(b"\r\n")


def _bad(path: Path, number: int, what: str) -> Corrupt:
    return Corrupt(f"{path}: line {number} {what}. Correct it, or fetch the file again.")


def _sorted(path: Path, ratings: Ratings) -> Ratings:
    if not len(ratings.values):
        raise Corrupt(f"{path} holds no rating: it was cut off. Fetch it again.")
    order = np.lexsort((ratings.columns, ratings.rows))
    rows, columns, values = ratings.rows[order], ratings.columns[order], ratings.values[order]
    return replace(ratings, rows=rows, columns=columns, values=values)
