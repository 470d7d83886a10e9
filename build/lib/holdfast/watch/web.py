"""The report page and the metrics of a run, served to a browser on this machine.

Only the loopback address is used. A few threads answer requests with the page built last. `follow` builds the page
again, rarely enough not to slow down training.
"""

import re
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
from holdfast.runs.status import is_training
from holdfast.watch import metrics
from holdfast.watch.run_state import RunWatcher

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")  # the names by which a browser may ask, also through a forwarded port
MOST_AT_ONCE = 8  # requests at the same time; further ones are refused
PATIENCE = 10.0  # seconds that a client may take to send its request
OFTEN = 2.0  # seconds between two looks at the run
SELDOM = 10.0  # the pause between two pages is this many times the time to build one: at most a tenth of a core
ENDS_WITHIN = 5.0


@dataclass(frozen=True, slots=True)
class RenderedPage:
    """A page ready to be sent, its ETag, and the state of the run that it shows."""

    body: bytes
    tag: str
    state: str


class Site:
    """The live report page and the metrics of the run in `folder`."""

    def __init__(self, folder: Path, make_page: Callable[[], Page]) -> None:
        self._watcher = RunWatcher(folder)
        self._folder, self._make_page = folder, make_page
        self._lock = Lock()
        self._fingerprint: object = None  # changes when the run writes an event or ends
        self.ready = self._render()

    def refresh(self) -> float:
        """Build the page again if the run has written events or ended since the last call; return the seconds spent."""
        paths = sorted((self._folder / "history").glob("*.jsonl"))
        fingerprint = is_training(self._folder), [(path.name, path.stat().st_size) for path in paths]
        if fingerprint == self._fingerprint:
            return 0.0
        began = time.monotonic()
        self.ready, self._fingerprint = self._render(), fingerprint
        return time.monotonic() - began

    @property
    def has_just_ended(self) -> bool:
        """True if the run has ended but the page still shows it as training."""
        return self.ready.state == "trains" and not is_training(self._folder)

    def metrics(self) -> bytes:
        with self._lock:  # requests come in several threads
            return metrics.text(*self._watcher.look()).encode()

    def _render(self) -> RenderedPage:
        state = "trains" if is_training(self._folder) else "ended"
        try:
            page = self._make_page()
        except HoldfastError as error:  # for example, a run without any event yet
            page = Page(title=self._folder.name, lead=str(error), statements=[], live=True)
        body = files.html_text(page).encode(errors="backslashreplace")
        return RenderedPage(body, f'"{sha256(body).hexdigest()[:32]}"', state)


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
        """Ignore errors from clients that disconnect during an answer."""


class _Answer(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "holdfast", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._is_for_this_machine():
            self._send(421, "text/plain; charset=utf-8", b"this page answers only to localhost and 127.0.0.1\n")
        elif path == "/metrics":
            self._send(200, metrics.CONTENT_TYPE, self.server.site.metrics())
        elif path == "/":
            ready = self.server.site.ready
            headers = {"ETag": ready.tag, "X-Run-State": ready.state}
            if self.headers.get("If-None-Match") == ready.tag:
                self._send(304, "text/html; charset=utf-8", b"", headers)
            else:
                self._send(200, "text/html; charset=utf-8", ready.body, headers)
        else:
            self._send(404, "text/plain; charset=utf-8", b"not found: use / or /metrics\n")

    do_HEAD = do_GET

    def _is_for_this_machine(self) -> bool:
        """Return True if the host that the request names is this machine.

        Otherwise a foreign web page could read the answer, if its own host name resolved to 127.0.0.1 (DNS
        rebinding)."""
        hosts = self.headers.get_all("Host") or [LOOPBACK]  # only browsers can be deceived, and they send one
        return all(re.sub(r":[0-9]*$", "", host.strip().lower()) in HOSTS for host in hosts)

    def _send(self, code: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Cache-Control": "no-cache", **(headers or {})}.items():
            self.send_header(name, value)
        if code != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


@contextmanager
def served(site: Site, port: int = 0) -> Iterator[str]:
    """Serve `site` on this machine inside this context, and yield its URL; port 0 stands for any free port."""
    try:
        server = _Server(port, site)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"port {port} of {LOOPBACK} is not available ({why}): name another --port, or none.") from error
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="holdfast-web", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(ENDS_WITHIN)


def follow(site: Site, stop: Event) -> None:
    due = 0.0
    while not stop.wait(OFTEN):
        if time.monotonic() >= due or site.has_just_ended:
            due = time.monotonic() + SELDOM * site.refresh()
