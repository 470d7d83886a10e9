"""Corpora: read in the forms they are published in, and refused in one line when they cannot be used."""

import io
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import BadInput, Corrupt, DataMissing
from holdfast.workloads.corpora import Corpus, corpus, load, own_words, training_stories

POST = """From: someone@somewhere
Subject: Re: comets

In article <1@x> another writes:
> what is a comet
The comet has a tail and {word} too.
| an old quotation
Someone said: tails are long.

--
A signature
"""


def some_posts() -> dict[str, bytes]:
    words = ["dust", "ice", "dust", "ice", "dust", "dust", "dust"]
    posts = {
        f"20news-bydate-train/sci.space/{i}": POST.format(word=word).encode("latin-1") for i, word in enumerate(words)
    }
    return posts | {"20news-bydate-test/sci.space/9": POST.format(word="telescope").encode()}


def some_stories(count: int = 6) -> bytes:
    story = (
        '<REUTERS TOPICS="{topics}" LEWISSPLIT="{split}" NEWID="{i}">\n<DATE>1987</DATE><TEXT>&#2;\n'
        "<TITLE>Wheat &amp; corn</TITLE><DATELINE>PARIS</DATELINE><BODY>Wheat rose.\n&#3;</BODY></TEXT>\n</REUTERS>\n"
    )
    kept = "".join(story.format(topics="YES", split="TRAIN", i=i) for i in range(count))
    return (
        kept + story.format(topics="YES", split="TEST", i=98) + story.format(topics="NO", split="TRAIN", i=99)
    ).encode()


def packed(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz") if path.suffix == ".xz" else tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def extracted(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def contents(some: Corpus) -> tuple[str, list[int], list[int], int]:
    return some.name, some.words.tolist(), some.bounds.tolist(), some.vocabulary


@pytest.mark.parametrize("form", ["20news-bydate.tar.xz", "20news-bydate.tar.gz", "folders"])
def test_training_posts_are_read_in_every_form_they_come_in(tmp_path: Path, form: str) -> None:
    if form == "folders":
        extracted(tmp_path / "newsgroups20", some_posts())
    else:
        packed(tmp_path / "newsgroups20" / form, some_posts())
    posts = load("newsgroups20", tmp_path)
    # Left of each post: comet, tail, and dust or ice; ice is in two posts only, and the test post is not read.
    words = [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert contents(posts) == ("newsgroups20", words, [0, 3, 5, 8, 10, 13, 16, 19], 3)
    assert posts.words.dtype == np.int32
    assert posts.bounds.dtype == np.int64


@pytest.mark.parametrize("form", ["reuters21578.tar.xz", "reuters21578.tar.gz", "folder"])
def test_training_stories_are_read_in_every_form_they_come_in(tmp_path: Path, form: str) -> None:
    files = {"reuters21578/reut2-000.sgm": some_stories(), "reuters21578/README.txt": b"Wheat corn barley"}
    if form == "folder":
        extracted(tmp_path, files)
    else:
        packed(tmp_path / "reuters21578" / form, files)
    # wheat, corn, wheat, rose: of the six training stories, of which wheat is the most frequent word.
    assert contents(load("reuters", tmp_path)) == ("reuters", [0, 1, 0, 2] * 6, list(range(0, 25, 4)), 3)


def test_a_story_is_its_title_and_its_body() -> None:
    (story,) = training_stories(some_stories(1).decode())
    assert re.findall(r"\w+", story) == ["Wheat", "corn", "Wheat", "rose"]


def test_own_words_are_what_scikit_learn_leaves_of_a_post() -> None:
    from sklearn.datasets import _twenty_newsgroups as rules

    odd = [
        "",
        "no blank line",
        "a: b\n\n",
        "a: b\n\nonly\n\n",
        "a: b\n\n\n\nx\n---\n",
        "h\n\n--\nx",
        "h\n\nx\n --- \ny\n\n",
    ]
    for post in [POST, *odd]:
        body = rules.strip_newsgroup_footer(rules.strip_newsgroup_header(post))
        assert own_words(post).split() == rules.strip_newsgroup_quoting(body).split()


def test_documents_without_words_are_left_out_and_frequent_words_come_first() -> None:
    some = corpus("some", ["", "beta alpha", "the", *["alpha beta alpha"] * 5], Path("here"))
    assert contents(some) == ("some", [1, 0, *[0, 1, 0] * 5], [0, 2, 5, 8, 11, 14, 17], 2)


@pytest.mark.parametrize("texts", [[], ["", ""], ["the and of"] * 9, ["rare words", "once each"]])
def test_a_corpus_without_words_is_refused_in_one_line(texts: list[str]) -> None:
    with pytest.raises(BadInput, match=r"^here is a corpus without words[^\n]*$"):
        corpus("some", texts, Path("here"))


@pytest.mark.parametrize("content", [b"", b"no archive", b"\xfd7zXZ\x00 cut off"])
def test_a_damaged_archive_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "reuters21578" / "reuters21578.tar.xz"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=r"reuters21578\.tar\.xz cannot be unpacked") as caught:
        load("reuters", tmp_path)
    assert "\n" not in str(caught.value)


def test_an_archive_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "newsgroups20" / "20news-bydate.tar.gz"
    packed(path, {f"20news-bydate-train/g/{i}": os.urandom(2000) for i in range(20)})
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(Corrupt, match="cannot be unpacked"):
        load("newsgroups20", tmp_path)


def test_a_corpus_that_is_nowhere_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("holdfast.workloads.fetch._chunks", lambda url: (_ for _ in ()).throw(refused()))
    with pytest.raises(DataMissing, match=r"reuters21578: no reuters21578\.tar\.gz"):
        load("reuters", tmp_path)


def refused() -> Exception:
    from holdfast.workloads.fetch import _Refused

    return _Refused("no network in tests")


def test_generated_text_is_always_the_same() -> None:
    some = load("generated")
    assert contents(some) == contents(load("generated"))
    assert (len(some.bounds) - 1, len(some.words)) == (200, 30_550)
    assert np.all(np.diff(np.bincount(some.words, minlength=some.vocabulary)) <= 0)


real = pytest.mark.skipif(not os.environ.get("HOLDFAST_DATA"), reason="set HOLDFAST_DATA to a folder with real data")


@real
def test_the_real_newsgroups_have_the_counts_that_the_criterion_was_chosen_for() -> None:
    posts = load("newsgroups20")
    assert (len(posts.bounds) - 1, len(posts.words), posts.vocabulary) == (10_984, 1_069_964, 17_797)


@real
def test_the_real_stories_have_the_counts_that_the_criterion_was_chosen_for() -> None:
    stories = load("reuters")
    assert (len(stories.bounds) - 1, len(stories.words), stories.vocabulary) == (1_497, 106_212, 2_813)
