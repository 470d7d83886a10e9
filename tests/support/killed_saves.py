"""A program that saves a subject repeatedly, killed at a later system call each time, and prints the outcomes as JSON.

A program of its own, so that every attempt is a fork of a process with a single thread; it imports what is saved once
and takes a line `[subject, writer, place]` for each subject that is to be killed.
"""

import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import save_subjects

CALLS = ("open", "write", "fsync", "close", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "truncate")
# The audit events that Python raises for every change to a filesystem.
AUDITED = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.symlink", "open"}
CHANGES = ("replace", "rename", "link", "unlink", "mkdir", "rmdir", "truncate", "open")


def main() -> None:
    """Fork for each line, because audit hooks cannot be removed; print its report, or null."""
    gc.collect()
    gc.freeze()  # otherwise the garbage collector of every fork copies the imported modules
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            print(json.dumps(report(*json.loads(line))), flush=True)  # noqa: T201 - this is a program
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print("null", flush=True)  # noqa: T201 - this is a program


def report(name: str, how: str, where: str) -> dict[str, Any]:
    """Create the old version once, and copy it for each attempt."""
    subject, place = save_subjects.KILLED[name], Path(where)
    save = writer(subject, how, place)
    subject.old(place / "old")
    attempts: list[dict[str, Any]] = []
    for torn in (False, True):
        number = 0
        while not attempts or attempts[-1]["status"] or attempts[-1]["torn"] != torn:
            copy = place / f"{'torn' if torn else 'whole'}-{number}"
            shutil.copytree(place / "old", copy)
            status = killed(lambda copy=copy: save(copy), number, torn)
            attempts.append({"place": str(copy), "status": status, "torn": torn, "call": number})
            number += 1
    return {"attempts": attempts, "unseen": unseen(save, place)}


def writer(subject: save_subjects.Subject, name: str, place: Path) -> Callable[[Path], None]:
    """Return the subject's own writer, or an incorrect writer of the same new version."""
    if name == "right":
        return subject.save
    subject.alone(place / "alone")
    files = save_subjects.files_of(place / "alone")
    return lambda copy: save_subjects.WRONG[name](copy, files)


def killed(save: Callable[[], None], number: int, torn: bool) -> int:
    """Save in a fork that dies at its n-th call, or halfway through its n-th write; return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = number

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            if not torn or name == "write":
                if left == 0:
                    if torn:
                        descriptor, data = arguments
                        original(descriptor, data[: len(data) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
            return original(*arguments, **keywords)

        return call

    try:
        for name in CALLS:
            setattr(os, name, watched(name, getattr(os, name)))
        save()
    except BaseException as error:
        print(repr(error), file=sys.stderr)  # noqa: T201 - this is a program
        os._exit(1)
    os._exit(0)


def unseen(save: Callable[[Path], None], place: Path) -> int:
    """Count changes to the filesystem that bypass the calls where we kill; there must be none."""
    copy = place / "watched"
    shutil.copytree(place / "old", copy)
    counted = audited = 0

    def count(original: Callable[..., Any], is_open: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal counted
            counted += not is_open or bool(arguments[1] & (os.O_WRONLY | os.O_RDWR))
            return original(*arguments, **keywords)

        return call

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal audited
        if event in AUDITED:
            audited += event != "open" or bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))

    for name in CHANGES:
        setattr(os, name, count(getattr(os, name), name == "open"))
    sys.addaudithook(hook)
    save(copy)
    return audited - counted


if __name__ == "__main__":
    main()
