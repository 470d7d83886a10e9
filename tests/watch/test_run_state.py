"""A run while it goes on: what is seen of it, on a terminal, for Prometheus and over HTTP."""

import io
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from threading import Event as Flag
from threading import Thread

import pytest
from rich.console import Console

from fake_histories import FakeHistory, killed_once, write_history
from holdfast.cli.report import page_of
from holdfast.cost.breakdown import cost_breakdown
from holdfast.errors import BadInput
from holdfast.events import Detect, Event, Iterate, Lost, Open, Plan, Regroup, Seconds, Serve, Step, line
from holdfast.runs import lock
from holdfast.sampler.digest import Samples
from holdfast.watch import metrics, screen, web
from holdfast.watch.run_state import LATEST, CurrentState, RunState, RunWatcher

WITHIN = 60.0
PLAN = Plan(1, 800, 8, 2, 0, 50, "overlapped", "c")


def files(events: Sequence[Event]) -> dict[str, list[Event]]:
    by_file: dict[str, list[Event]] = {}
    for event in events:
        by_file.setdefault(event.who, []).append(event)
    return by_file


def run_in(folder: Path, events: Sequence[Event]) -> Path:
    write_history(folder / "history", files(events))
    return folder


def seen_of(events: Sequence[Event]) -> RunState:
    seen = RunState()
    for event in events:
        seen.add(event)
    return seen


def stands(state: str = "trains") -> CurrentState:
    return CurrentState(Path("runs/a"), state, goodput=2.5)


def site_of(folder: Path) -> web.Site:
    """The live page of a run, as `holdfast watch --web` serves it."""
    return web.Site(folder, partial(page_of, [folder], "holdfast watch run --web", live=True))


class TestSeen:
    def test_it_counts_steps_saves_failures_and_restarts(self) -> None:
        seen = seen_of(killed_once())
        assert (seen.reached, seen.committed, seen.saves) == (4, 4, 2)
        assert (seen.lineage.restarts, dict(seen.failures)) == (1, {"signal": 1})
        assert seen.stalled == pytest.approx(0.5)
        assert seen.saved_bytes == 8000

    def test_it_tells_what_happened_in_words(self) -> None:
        words = [text for _, text in seen_of(killed_once()).latest]
        assert words == [
            "launched with 1 worker",
            "rank 0 it failed",
            "restarted with 1 worker",
            "completed: so it was",
        ]

    def test_ranks_that_a_restart_with_fewer_workers_left_out_are_gone(self) -> None:
        history = FakeHistory(world=2)
        history.launches()
        history.trains()
        history.reports(0, Seconds(0.25, 1.0, 0.0), rank=1)
        history.dies()
        assert list(seen_of(history.events).ranks) == [0, 1]
        history.world = 1
        history.restarts()
        assert list(seen_of(history.events).ranks) == [0]

    def test_a_corruption_is_a_failure_whose_message_names_the_ranks(self) -> None:
        run = FakeHistory(world=3)
        run.launches()
        run.supervisor(Detect(1, -1, -1, "corruption", "ranks 0 and 1 differ in their state"))
        seen = seen_of(run.events)
        assert seen.failures == {"corruption": 1}
        assert seen.latest[-1][1] == "ranks 0 and 1 differ in their state"

    def test_the_plan_says_how_much_is_left_and_the_latest_steps_how_fast(self) -> None:
        history = FakeHistory()
        history.launches()
        history.rank_0(PLAN)
        for _ in range(10):
            history.trains(0.25, 0.75)
        seen = seen_of(history.events)
        assert (seen.planned, seen.reached) == (200, 10)
        assert seen.speed == pytest.approx(1.0)
        assert seen.seconds_left == pytest.approx(190.0)

    def test_goodput_is_that_of_the_cost_also_while_the_supervisor_says_nothing(self) -> None:
        whole = killed_once()
        assert seen_of(whole).goodput == pytest.approx(cost_breakdown(whole).goodput)
        so_far = [event for event in whole if event.time < whole[-1].time]
        assert seen_of(so_far).goodput == pytest.approx(cost_breakdown(so_far).goodput)

    def test_a_live_recovery_that_every_member_tells_is_one(self) -> None:
        lost = Regroup(1, 1, 6, "forward", (0, 2), (1,), (7, 8, 9))
        seen = seen_of([Event(1.0, "rank-0", lost), Event(1.1, "rank-2", lost)])
        assert seen.samples_lost == 3
        assert [text for _, text in seen.latest] == ["rank 1 lost: 2 workers continue with step 6 (forward)"]

    def test_a_served_run_counts_iterations(self) -> None:
        serve = Serve(1, "mlr-digits", 10, 3, 2, 1, "priority", "1/4", 8, "partial", 0, 0, 0.5, 40)
        history = [Event(0.0, "controller", Open(2)), Event(0.0, "controller", serve)]
        history += [Event(1.0 + n, "controller", Iterate(n, 1.0 / (n + 1), 1.0, 0, 0, 0, 0, 0.1)) for n in range(4)]
        history.append(Event(9.0, "controller", Lost(4, 0, "node", 1, "it is gone")))
        seen = seen_of(history)
        assert (seen.reached, seen.planned, seen.loss, seen.speed) == (
            4,
            None,
            0.25,
            1.0,
        )  # a run ends when it has converged
        assert dict(seen.failures) == {"node": 1}

    def test_what_is_added_is_read_once_and_a_line_that_is_not_whole_waits(self, tmp_path: Path) -> None:
        history = FakeHistory()
        history.launches()
        history.trains()
        folder = run_in(tmp_path, history.events)
        watching = RunWatcher(folder)
        assert watching.look()[0].reached == 1
        before = len(history.events)
        history.trains()
        history.saves(durable=0.5)
        data = b"".join(line(*event) for event in history.events[before:])
        with (folder / "history/rank-0.jsonl").open("ab") as file:
            file.write(data[:-20])
            file.flush()
            assert (watching.look()[0].reached, watching.run.saves) == (2, 1)
            assert watching.run.committed == 0
            file.write(data[-20:])
            file.flush()
        assert watching.look()[0].committed == 2
        assert watching.run.saves == 1

    def test_of_a_long_history_only_the_latest_steps_are_looked_into(self, tmp_path: Path) -> None:
        history = FakeHistory()
        history.launches()
        for _ in range(4_000):
            history.trains()
        watching = RunWatcher(run_in(tmp_path, history.events))
        seen, _ = watching.look()
        assert seen.reached == 4_000
        assert len(seen.ranks[0].latest) == LATEST

    def test_it_trains_for_as_long_as_somebody_holds_its_lock(self, tmp_path: Path) -> None:
        watching = RunWatcher(run_in(tmp_path, killed_once()))
        with lock.hold(tmp_path):
            assert watching.look()[1].trains
        assert watching.look()[1].state == "completed"

    def test_what_is_no_run_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="is not the folder of a run"):
            RunWatcher(tmp_path)


class TestScreen:
    def shown(self, seen: RunState, now: CurrentState) -> str:
        console = Console(width=100, file=io.StringIO())
        with console.capture() as capture:
            console.print(screen.screen(seen, now, clock=1.7e9 + 100))
        return capture.get()

    def test_it_has_the_numbers_the_ranks_and_what_happened(self) -> None:
        history = FakeHistory(world=2)
        history.launches()
        history.rank_0(PLAN)
        for step in range(3):
            history.trains()
            if step < 1:
                history.reports(step, Seconds(0.25, 1.0, 0.0), rank=1)
        text = self.shown(seen_of(history.events), stands())
        assert "runs/a  trains  step 3 of 200  1.5%" in text
        assert "goodput 2.50 steps/s" in text
        assert re.search(r"1 +1 +2 +9\d s ago", text)
        assert "launched with 2 workers" in text

    def test_without_a_plan_and_without_steps_it_says_what_there_is(self) -> None:
        text = self.shown(RunState(), stands("nothing trained"))
        assert "nothing trained" in text
        assert "goodput" in text

    def test_control_codes_of_a_folder_do_not_reach_the_terminal(self) -> None:
        now = CurrentState(Path("a\x1b[31mb"), "trains", None)
        console = Console(file=io.StringIO(), force_terminal=False)
        console.print(screen.screen(RunState(), now, 0.0))
        assert "a\\x1b[31mb" in console.file.getvalue()  # type: ignore[attr-defined]

    def test_in_one_line_it_is_short(self) -> None:
        text = screen.line(seen_of(killed_once()), stands("completed"))
        assert text == "runs/a: completed · step 4 · committed 4 · goodput 2.50 steps/s · 1 restart · 1 failure"


class TestMetrics:
    def test_every_metric_is_explained_and_every_line_can_be_parsed(self) -> None:
        text = metrics.text(seen_of(killed_once()), stands())
        samples = [sample for sample in text.splitlines() if not sample.startswith("#")]
        assert all(re.fullmatch(r'holdfast_\w+\{run="runs/a"(,\w+="\w+")?\} [-+.\de]+', sample) for sample in samples)
        names = {sample.partition("{")[0] for sample in samples}
        assert names == set(re.findall(r"# HELP (\w+) ", text)) == set(re.findall(r"# TYPE (\w+) ", text))
        assert 'holdfast_failures_total{run="runs/a",kind="signal"} 1' in samples
        assert 'holdfast_rank_step{run="runs/a",rank="0"} 4' in samples
        assert "holdfast_steps_planned" not in names, "nothing was text of it"

    def test_a_name_cannot_break_out_of_its_label(self) -> None:
        now = CurrentState(Path('a"b\\c\nd'), "trains", None)
        assert 'run="a\\"b\\\\c\\nd"' in metrics.text(RunState(), now)

    def test_terminal_control_codes_in_a_name_are_escaped(self) -> None:
        now = CurrentState(Path("a\x1b[31m\udcff"), "trains", None)
        assert 'run="a\\\\x1b[31m\\\\udcff"' in metrics.text(RunState(), now)

    def test_numbers_that_are_not_finite_are_what_prometheus_calls_them(self) -> None:
        step = Step(1, 1, 0, 0, 0, 0, Samples(8), Seconds(0.1, 0.1, 0.0), loss=float("nan"))
        assert "holdfast_loss" in metrics.text(seen_of([Event(1.0, "rank-0", step)]), stands())
        assert metrics._number(float("nan")) == "NaN"
        assert metrics._number(float("-inf")) == "-Inf"


@pytest.mark.usefixtures("undrawn")
class TestWeb:
    @pytest.fixture
    def site(self, tmp_path: Path) -> web.Site:
        folder = run_in(tmp_path / "run", killed_once())
        return site_of(folder)

    def ask(
        self, address: str, path: str = "/", method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        connection = HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=WITHIN)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        reply = answer.status, dict(answer.getheaders()), answer.read().decode()
        connection.close()
        return reply

    def test_it_serves_the_page_the_metrics_and_nothing_else_on_loopback(self, site: web.Site) -> None:
        with web.served(site) as address:
            assert address.startswith("http://127.0.0.1:")
            code, headers, page = self.ask(address)
            assert (code, headers["X-Run-State"]) == (200, "ended")
            assert "checks of the audit pass" in page
            assert self.ask(address, **{"If-None-Match": headers["ETag"]})[::2] == (304, "")
            code, headers, text = self.ask(address, "/metrics")
            assert (code, headers["Content-Type"]) == (200, metrics.CONTENT_TYPE)
            assert "holdfast_step{" in text
            assert self.ask(address, "/../../etc/passwd")[0] == 404
            assert self.ask(address, "/", "HEAD")[::2] == (200, "")
            assert self.ask(address, "/", "POST")[0] == 501
        with pytest.raises(OSError, match="refused"):
            self.ask(address)

    def test_a_request_by_a_foreign_name_that_resolves_to_this_machine_gets_nothing(self, site: web.Site) -> None:
        with web.served(site) as address:
            for path in ("/", "/metrics"):
                for host in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example"):
                    code, _, text = self.ask(address, path, Host=host)
                    assert (code, "holdfast_step" in text, "audit" in text) == (421, False, False)
                for host in ("localhost", "LOCALHOST:8000", "127.0.0.1"):
                    assert self.ask(address, path, Host=host)[0] == 200

    def test_the_page_is_made_again_only_if_the_run_has_said_something(self, site: web.Site, tmp_path: Path) -> None:
        site.refresh()
        tag = site.ready.tag
        assert site.refresh() == 0.0
        with (tmp_path / "run/history/rank-0.jsonl").open("ab") as file:
            file.write(line(2e9, "rank-0", Open(2)))
        assert site.refresh() > 0.0
        assert site.ready.tag != tag

    def test_that_a_run_has_ended_is_on_the_page_soon_however_long_making_it_takes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(web, "SELDOM", 1e6)
        monkeypatch.setattr(web, "OFTEN", 0.05)
        folder, stop = run_in(tmp_path / "run", killed_once()), Flag()
        with lock.hold(folder):
            site = site_of(folder)
            assert site.ready.state == "trains"
            following = Thread(target=web.follow, args=(site, stop))
            following.start()
        deadline = time.monotonic() + WITHIN
        while site.ready.state == "trains" and time.monotonic() < deadline:
            time.sleep(0.02)
        stop.set()
        following.join(WITHIN)
        assert site.ready.state == "ended"
        assert b"checks of the audit pass" in site.ready.body

    def test_a_run_in_which_nobody_has_written_anything_has_a_page_that_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text('{"script": "train.py"}')
        assert b"there is no history" in site_of(tmp_path).ready.body

    def test_clients_that_say_nothing_do_not_keep_others_from_being_answered(self, site: web.Site) -> None:
        with web.served(site) as address:
            host, port = address.removeprefix("http://").rstrip("/").split(":")
            silent = [socket.create_connection((host, int(port)), timeout=WITHIN) for _ in range(web.MOST_AT_ONCE - 1)]
            assert self.ask(address)[0] == 200
            for client in silent:
                client.close()

    def test_several_may_ask_for_metrics_at_once(self, site: web.Site) -> None:
        with web.served(site) as address, ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda _: self.ask(address, "/metrics"), range(8)))
        assert {code for code, _, _ in replies} == {200}
        assert len({text for _, _, text in replies}) == 1

    def test_a_port_that_is_taken_is_refused_in_one_line(self, site: web.Site) -> None:
        with web.served(site) as address:
            port = int(address.rstrip("/").rpartition(":")[2])
            with pytest.raises(BadInput, match=f"port {port} of 127.0.0.1 is not available"), web.served(site, port):
                pass


@pytest.mark.slow
def test_ctrl_c_ends_the_page_in_order(tmp_path: Path) -> None:
    import signal

    folder = run_in(tmp_path / "run", killed_once())
    command = [sys.executable, "-m", "holdfast", "watch", str(folder), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first_line = process.stdout.readline()
        assert re.match(r"http://127\.0\.0\.1:\d+/ shows ", first_line), process.stderr.read()
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(WITHIN) == 0
        finally:
            process.kill()  # if it did not end, or else we would wait for it here
        assert process.stderr.read() == ""
