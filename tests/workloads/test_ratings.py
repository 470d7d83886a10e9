"""Ratings: read in the forms they are published in, and refused with the number of the bad line."""

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import BadInput, Corrupt, HoldfastError, StorageFailed
from holdfast.workloads.ratings import Ratings, generated, load, read_jester, read_movielens

MOVIELENS = b"userId,movieId,rating,timestamp\n7,50,4.0,1\n2,31,2.5,1\n7,31,0.5,1\n2,1029,3.0,1\n"
NOTHING = [99.0] * 100


def some_jester() -> list[list[float]]:
    """Three users: one rates jokes 1 and 100, one none, one joke 2."""
    first, second, third = NOTHING.copy(), NOTHING.copy(), NOTHING.copy()
    first[0], first[99], third[1] = -10, 10, 3.5
    return [[2, *first], [0, *second], [1, *third]]


def table(rows: list[list[float]]) -> bytes:
    return "".join(",".join(f"{cell:g}" for cell in row) + "\n" for row in rows).encode()


JESTER = table(some_jester())


def zipped(name: str, content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return out.getvalue()


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def triples(ratings: Ratings) -> list[tuple[int, int, float]]:
    return list(zip(ratings.rows.tolist(), ratings.columns.tolist(), ratings.values.tolist(), strict=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("movielens/ml-latest-small-2016-10-17.zip", zipped("ml-latest-small/ratings.csv", MOVIELENS)),
        ("ml-latest-small.zip", zipped("ml-latest-small/ratings.csv", MOVIELENS)),
        ("ml-latest-small/ratings.csv", MOVIELENS),
        ("movielens/ratings.csv", MOVIELENS.replace(b"\n", b"\r\n")),
    ],
)
def test_movielens_is_read_in_every_form_it_comes_in(tmp_path: Path, name: str, content: bytes) -> None:
    put(tmp_path / name, content)
    ratings = load("movielens", tmp_path)
    assert (ratings.name, ratings.users, ratings.items) == ("movielens", 2, 3)
    assert triples(ratings) == [(0, 0, 2.5), (0, 2, 3.0), (1, 0, 0.5), (1, 1, 4.0)]


@pytest.mark.parametrize(
    ("name", "content"),
    [("jester/jester-data-1.zip", zipped("jester-data-1.csv", JESTER)), ("jester-data-1.csv", JESTER)],
)
def test_jester_is_rescaled_and_users_without_ratings_are_left_out(tmp_path: Path, name: str, content: bytes) -> None:
    put(tmp_path / name, content)
    ratings = load("jester", tmp_path)
    assert (ratings.name, ratings.users, ratings.items) == ("jester", 2, 100)
    assert triples(ratings) == [(0, 0, 0.0), (0, 99, 10.0), (1, 1, 6.75)]


def refused(read: Callable[[Path], Ratings], path: Path, content: bytes) -> str:
    put(path, content)
    with pytest.raises(HoldfastError) as caught:
        read(path)
    message = str(caught.value)
    assert caught.type is Corrupt
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "line 1 is not MovieLens's header"),
        (b"<html>\n", "line 1 is not MovieLens's header"),
        (MOVIELENS.split(b"\n", 1)[1], "line 1 is not MovieLens's header"),
        (MOVIELENS.split(b"\n", 1)[0] + b"\n", "holds no rating"),
        (MOVIELENS + b"8,1,4\n", "line 6 is not four numbers"),
        (MOVIELENS + b"8,1,4,1,1\n", "line 6 is not four numbers"),
        (MOVIELENS + b"8,1,good,1\n", "line 6 is not four numbers"),
        (MOVIELENS + b"\xff\xfe\n", "line 6 is not four numbers"),
        (MOVIELENS + b"\n8,1,4,1\n", "line 6 is not four numbers"),
        (MOVIELENS.replace(b"2,31", b"2.5,31"), "line 3 has a userId or movieId"),
        (MOVIELENS.replace(b"2,31", b"2,0"), "line 3 has a userId or movieId"),
        (MOVIELENS.replace(b"2,31", b"2,nan"), "line 3 has a userId or movieId"),
        (MOVIELENS.replace(b"2,31", b"1e300,31"), "line 3 has a userId or movieId"),
        (MOVIELENS.replace(b"0.5", b"5.5"), "line 4 has the rating 5.5"),
        (MOVIELENS.replace(b"0.5", b"0"), "line 4 has the rating 0"),
        (MOVIELENS.replace(b"0.5", b"nan"), "line 4 has the rating nan"),
        (MOVIELENS + b"2,31,4,1\n", "line 6 rates a movie that the same user has rated above"),
        (zipped("other/ratings.csv", MOVIELENS), "zip without 'ml-latest-small/ratings.csv'"),
        (zipped("ml-latest-small/ratings.csv", MOVIELENS)[:-9], "cannot be unpacked"),
    ],
)
def test_a_bad_movielens_file_is_corrupt_and_its_line_named(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refused(read_movielens, tmp_path / "ratings.csv", content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no rating"),
        (table([[0, *NOTHING]]), "holds no rating"),
        (JESTER + b"1,2,3\n", "line 4 has 3 columns"),
        (JESTER + b"\n", "line 4 is not numbers"),
        (JESTER.replace(b"3.5", b"x"), "line 3 is not numbers"),
        (JESTER.replace(b"3.5", b"10.5"), "line 3 has a rating that is neither"),
        (JESTER.replace(b"3.5", b"nan"), "line 3 has a rating that is neither"),
        (b"3" + JESTER[1:], "line 1 announces 3 ratings and has 2"),
        (zipped("other.csv", JESTER), "zip without 'jester-data-1.csv'"),
        (zipped("jester-data-1.csv", JESTER)[:-9], "cannot be unpacked"),
    ],
)
def test_a_bad_jester_file_is_corrupt_and_its_line_named(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refused(read_jester, tmp_path / "jester-data-1.csv", content)


def test_the_spreadsheet_of_jester_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = put(tmp_path / "jester-data-1.zip", zipped("jester-data-1.xls", b"\xd0\xcf\x11\xe0"))
    with pytest.raises(BadInput, match=r"spreadsheet: put jester-data-1\.csv"):
        read_jester(path)


@pytest.mark.parametrize("read", [read_movielens, read_jester])
def test_a_file_that_cannot_be_read_is_a_storage_failure(tmp_path: Path, read: Callable[[Path], Ratings]) -> None:
    with pytest.raises(StorageFailed, match=r"cannot read .*: Is a directory"):
        read(tmp_path)


def test_generated_ratings_are_half_stars_that_follow_the_seed() -> None:
    ratings = load("generated")
    assert (ratings.name, ratings.users, ratings.items) == ("generated", 200, 300)
    assert set(ratings.values.tolist()) == {half / 2 for half in range(1, 11)}
    assert len(set(zip(ratings.rows.tolist(), ratings.columns.tolist(), strict=True))) == len(ratings.values)
    assert np.array_equal(ratings.values, generated().values)
    assert not np.array_equal(ratings.rows, generated(seed=1).rows)


real = pytest.mark.skipif(not os.environ.get("HOLDFAST_DATA"), reason="$HOLDFAST_DATA names no folder of real data")


@real
def test_the_real_movielens_is_one_of_its_editions() -> None:
    ratings = load("movielens")
    assert (ratings.users, ratings.items, len(ratings.values)) in [(671, 9066, 100_004), (610, 9724, 100_836)]
    assert ratings.values.mean() == pytest.approx(3.52, abs=0.03)


@real
def test_the_real_jester_has_its_published_counts() -> None:
    ratings = load("jester")
    assert (ratings.users, ratings.items, len(ratings.values)) == (24_983, 100, 1_810_455)
    assert 2 * ratings.values.mean() - 10 == pytest.approx(0.8798, abs=5e-5)
