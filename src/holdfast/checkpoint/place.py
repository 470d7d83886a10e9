"""Functions that open the checkpoint store at a path or URL, for a reader, a new run, or a worker of a run."""

import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast import memory
from holdfast.checkpoint import manifest
from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.errors import BadInput, HoldfastError, NotAStore

_PROBE = "probe-"


def open_store(place: str | os.PathLike[str], **options: object) -> Store:
    """Return the existing checkpoint store at a path, or at a URL such as s3://bucket/run.

    The `options` are passed to fsspec, which opens URLs."""
    text = os.fspath(place)
    if (path := _directory(text)) is None:
        objects = _objects(text, options)
        if not objects.names():
            raise NotAStore(f"{text} has no objects: name the URL that a run saved to.")
        return objects
    if not path.is_dir():
        why = "is a file, not a directory" if path.exists() else "does not exist"
        raise NotAStore(f"{text} {why}: name the directory that a run saved to.")
    return DirectoryStore(path)


def store_for(place: str | os.PathLike[str], **options: object) -> Store:
    """Return a store at a path or URL for a new run, after a test write; `options` are passed to fsspec."""
    store = store_at(place, **options)
    for leftover in store.names(_PROBE):  # test files of killed processes
        store.remove(leftover)
    probe = _PROBE + secrets.token_hex(8)
    store.put(probe, [b"holdfast can write here"])
    store.remove(probe)
    return store


def store_at(place: str | os.PathLike[str], **options: object) -> Store:
    """Return the store at a path or URL without checking it; `options` are passed to fsspec."""
    text = os.fspath(place)
    if text.startswith("memory://"):
        raise BadInput(f"{text} is in the memory of one process, but a run has several: name a directory or s3://...")
    path = _directory(text)
    return _objects(text, options) if path is None else DirectoryStore(path)


def read_ahead(store: Store) -> None:
    """Start a thread that reads the newest snapshot of a directory into the page cache, so that `load` is faster."""
    if isinstance(store, DirectoryStore):
        threading.Thread(target=_read_newest_ahead, args=(store,), name="holdfast-ahead", daemon=True).start()


def _read_newest_ahead(store: DirectoryStore) -> None:
    with suppress(HoldfastError, OSError):
        for step in manifest.steps(store)[-1:]:
            for name, expected in manifest.read_manifest(store, step).files.items():
                memory.require(name, expected.length)
                store.read_ahead(name, expected.length)  # not more: an untrusted file may have any length


def _directory(text: str) -> Path | None:
    if "://" not in text:
        return Path(text)
    if not text.startswith("file://"):
        return None
    url = urlsplit(text)
    if url.netloc not in ("", "localhost") or not url.path:
        raise BadInput(f"{text} is not a path on this machine: write it as file:///path, or without file://.")
    return Path(unquote(url.path))


def _objects(url: str, options: dict[str, object]) -> Store:
    # fsspec is slow to import, and most stores are directories.
    from fsspec.registry import get_filesystem_class

    from holdfast.checkpoint.objects import ObjectStore

    scheme = url.split("://", 1)[0]
    try:
        get_filesystem_class(scheme)
    except ValueError as error:
        raise BadInput(f"{url}: {scheme}:// stores are unknown; name a directory or s3://bucket/run.") from error
    except ImportError as error:
        package = "pip install 'holdfast[s3]'" if scheme in ("s3", "s3a") else "install what fsspec needs for it"
        raise BadInput(f"{url}: the client for {scheme}:// is not installed: {package}.") from error
    return ObjectStore(url, **options)
