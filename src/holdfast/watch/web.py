"""The report page of a run, served to a browser on this machine while the run goes on, and its metrics.

Only the loopback address is listened to. Requests are answered by a few threads that only hand out what is ready; the
page is made again by whoever calls `follow`, and seldom enough that the training hardly notices.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from threading import BoundedSemaphore, Event, Lock, Thread
from typing import Any

from holdfast.errors import BadInput, HoldfastError
from holdfast.report import files
from holdfast.report.page import Page
from holdfast.runs.status import trains
from holdfast.watch import metrics
from holdfast.watch.run_state import Watching

LOOPBACK = "127.0.0.1"
MOST_AT_ONCE = 8  # requests that are answered at the same time; more are turned away
PATIENCE = 10.0  # seconds that a client may take to say what it wants
OFTEN = 2.0  # seconds between two looks
SELDOM = 10.0  # times as long as making a page took, until the next is made: so it takes a tenth of a core at most
ENDS_WITHIN = 5.0


@dataclass(frozen=True, slots=True)
class RenderedPage:
    """A page that can be handed out, what it is known by, and whether its run goes on."""

    body: bytes
    tag: str
    state: str


class Site:
    """What is served about one run."""

    def __init__(self, folder: Path, make_page: Callable[[], Page]) -> None:
        self._watching = Watching(folder)
        self._folder, self._make_page = folder, make_page
        self._lock = Lock()
        self._files: object = None
        self.ready = self._made()

    def refresh(self) -> float:
        """Make the page again if the run has said something since; returns the seconds that took."""
        files = self._written()
        if files == self._files:
            return 0.0
        began = time.monotonic()
        self.ready, self._files = self._made(), files
        return time.monotonic() - began

    @property
    def has_just_ended(self) -> bool:
        """Whether the page still says that the run trains, and it does not."""
        return self.ready.state == "trains" and not trains(self._folder)

    def metrics(self) -> bytes:
        """How the run stands, for Prometheus."""
        with self._lock:  # several may ask at once
            return metrics.text(*self._watching.look()).encode()

    def _made(self) -> RenderedPage:
        over = not trains(self._folder)
        try:
            page = self._make_page()
        except HoldfastError as error:  # such as a run in which nobody has written anything yet
            page = Page(title=self._folder.name, lead=str(error), statements=[], live=True)
        body = files.html_text(page).encode()
        return RenderedPage(body, f'"{sha256(body).hexdigest()[:32]}"', "ended" if over else "trains")

    def _written(self) -> object:
        """What changes when somebody writes about the run, or stops."""
        found = sorted((self._folder / "history").glob("*.jsonl"))
        return trains(self._folder), [(path.name, path.stat().st_size) for path in found]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, site: Site) -> None:
        self.site = site
        self._free = BoundedSemaphore(MOST_AT_ONCE)
        super().__init__((LOOPBACK, port), _Answer)

    def process_request(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle of an answer is nobody's fault."""


class _Answer(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "holdfast", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(200, metrics.CONTENT_TYPE, self.server.site.metrics())
        elif path == "/":
            ready = self.server.site.ready
            told = {"ETag": ready.tag, "X-Run-State": ready.state}
            if self.headers.get("If-None-Match") == ready.tag:
                self._send(304, "text/html; charset=utf-8", b"", told)
            else:
                self._send(200, "text/html; charset=utf-8", ready.body, told)
        else:
            self._send(404, "text/plain; charset=utf-8", b"there are / and /metrics\n")

    do_HEAD = do_GET

    def _send(self, code: int, kind: str, body: bytes, told: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Cache-Control": "no-cache", **(told or {})}.items():
            self.send_header(name, value)
        if code != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads who asked for what."""


@contextmanager
def served(site: Site, port: int = 0) -> Iterator[str]:
    """The address under which the site can be read for as long as this lasts."""
    try:
        server = _Server(port, site)
    except (OSError, OverflowError) as error:
        raise BadInput(
            f"port {port} of {LOOPBACK} cannot be used ({getattr(error, 'strerror', None) or error}): name another with "
            "--port, or leave it out."
        ) from error
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="holdfast-web", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(ENDS_WITHIN)


def follow(site: Site, stop: Event) -> None:
    """Keep the page up to date until `stop` is set."""
    due = 0.0
    while not stop.wait(OFTEN):
        if time.monotonic() >= due or site.has_just_ended:
            due = time.monotonic() + SELDOM * site.refresh()
