"""From a place, a path or a URL, to the store that is there."""

import os
import secrets
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.errors import BadInput, NotAStore

_PROBE = "probe-"


def open_store(place: str | os.PathLike[str], **options: object) -> Store:
    """The store at a path or a URL such as s3://bucket/run, for reading: it must be there already."""
    text = os.fspath(place)
    if (path := _directory(text)) is None:
        objects = _objects(text, options)
        if not objects.names():
            raise NotAStore(f"{text} holds no objects: give the URL that a run saved to")
        return objects
    if not path.is_dir():
        why = "is a file, not a directory" if path.exists() else "does not exist"
        raise NotAStore(f"{text} {why}: give the directory that a run saved to")
    return DirectoryStore(path)


def store_for(place: str | os.PathLike[str], **options: object) -> Store:
    """The store at a path or a URL, for a run to save to: a directory is made, and whether it can be written is tried.

    A store whose bytes other processes cannot see is refused: every worker of a run restores from it.
    """
    store = store_at(place, **options)
    for left in store.names(_PROBE):  # by one that was killed here; another's, at this moment, has done its work
        store.remove(left)
    probe = _PROBE + secrets.token_hex(8)
    store.put(probe, [b"holdfast can write here"])
    store.remove(probe)
    return store


def store_at(place: str | os.PathLike[str], **options: object) -> Store:
    """The store at a path or a URL, whatever is there: for a worker, whose supervisor has tried it."""
    text = os.fspath(place)
    if text.startswith("memory://"):
        raise BadInput(f"{text} is in the memory of one process, and a run has several: give a directory or s3://...")
    path = _directory(text)
    return _objects(text, options) if path is None else DirectoryStore(path)


def _directory(text: str) -> Path | None:
    """The path that a place names, if it names one."""
    if "://" not in text:
        return Path(text)
    if not text.startswith("file://"):
        return None
    url = urlsplit(text)
    if url.netloc not in ("", "localhost") or not url.path:
        raise BadInput(f"{text} names no path on this machine: write it as file:///path, or without file://")
    return Path(unquote(url.path))


def _objects(url: str, options: dict[str, object]) -> Store:
    # fsspec is slow to import, and most stores are directories.
    from fsspec.registry import get_filesystem_class

    from holdfast.checkpoint.objects import ObjectStore

    scheme = url.split("://", 1)[0]
    try:
        get_filesystem_class(scheme)
    except ValueError as error:
        raise BadInput(
            f"{url}: there are no stores of kind {scheme}://, give a directory or s3://bucket/run"
        ) from error
    except ImportError as error:
        package = "pip install 'holdfast[s3]'" if scheme in ("s3", "s3a") else "install what fsspec needs for it"
        raise BadInput(f"{url}: what reaches {scheme}:// is not installed: {package}") from error
    return ObjectStore(url, **options)
