"""What the workers print, shown as they print it: each writes a file of its own, and the supervisor copies new lines.

A progress bar such as tqdm's writes over its own line and ends it only when it is full: what stands in it by now can be
asked for.
"""

from collections.abc import Callable, Sequence
from io import BufferedReader
from pathlib import Path

Show = Callable[[str], None]
LONGEST = 1 << 16  # bytes of a line that is written over again and again: more than that are not kept


class Tail:
    """The new lines of one growing file."""

    def __init__(self, path: Path, show: Show) -> None:
        self.path, self._show = path, show
        self._file: BufferedReader | None = None
        self._rest = b""

    @property
    def bar(self) -> str:
        """What stands in a line that is written over and has not ended; nothing if there is no such line."""
        _, over, now = self._rest.rstrip(b"\r").rpartition(b"\r")
        return now.decode(errors="replace") if over else ""

    def copy(self, *, last: bool = False) -> None:
        """Show the lines that are whole by now; of a file that has ended also the rest."""
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except OSError:  # not there yet, or its worker has no log
                return
        text = self._rest + self._read()
        end = len(text) if last else text.rfind(b"\n") + 1
        self._rest = text[end:]
        if len(self._rest) > LONGEST and (over := self._rest.rfind(b"\r", 0, -1)) > 0:
            self._rest = self._rest[over:]
        if end:
            self._show(text[:end].decode(errors="replace").removesuffix("\n"))
        if last:
            self._file.close()

    def _read(self) -> bytes:
        try:
            return self._file.read() if self._file else b""
        except OSError:  # a disk that cannot be read is no reason to stop
            return b""


class Echo:
    """The output of all workers of an attempt, also of those that take the place of others."""

    def __init__(self, out: Show, err: Show) -> None:
        self._out, self._err = out, err
        self._tails: list[Tail] = []

    def bars(self) -> list[str]:
        """The progress bars that workers draw now, each once, in the order in which they were started."""
        return list(dict.fromkeys(bar for tail in self._tails if (bar := tail.bar.strip())))

    def follow(self, printed: Sequence[tuple[Path, Path]]) -> None:
        """Show the rest of the last attempt's output, and from now on that of another."""
        self.copy(last=True)
        self.show_too(printed)

    def show_too(self, printed: Sequence[tuple[Path, Path]]) -> None:
        """Show these files from now on, beside those that are shown already."""
        shown = {tail.path for tail in self._tails}
        new = [pair for pair in printed if not shown & {*pair}]
        self._tails += [tail for out, err in new for tail in (Tail(out, self._out), Tail(err, self._err))]

    def leave(self, printed: Sequence[tuple[Path, Path]]) -> None:
        """Show what these files hold by now, and nothing that comes later."""
        paths = {path for pair in printed for path in pair}
        for tail in self._tails:
            if tail.path in paths:
                tail.copy(last=True)
        self._tails = [tail for tail in self._tails if tail.path not in paths]

    def copy(self, *, last: bool = False) -> None:
        """Show what is new."""
        for tail in self._tails:
            tail.copy(last=last)
        if last:
            self._tails = []
