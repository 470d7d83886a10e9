"""Every Python block of the documents compiles, and runs unless a comment before it says why it is not run."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from docs_links import documents

from repository import EXAMPLES, ROOT

PAGES = [ROOT / path for path in documents()] + sorted(ROOT.glob("docs/**/*.md"))
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n+)?^```python\n(?P<code>.*?)^```", flags=re.S | re.M)
RUN_ELSEWHERE = {  # pages whose blocks are files that a test runs with the commands of the page
    "docs/tutorial.md": "tests/docs/test_tutorial.py",
    "docs/start/quick-start.md": "tests/docs/test_quick_start.py",
    "docs/workloads.md": "tests/lab/partial/test_own_model.py",
}
TRAINING = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)[1]  # type: ignore[index]


def blocks() -> Iterator[tuple[str, int, str, str | None]]:
    """Yield page, line, code and the reason not to run it, of every Python block."""
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            yield str(page.relative_to(ROOT)), line, match["code"], match["why"]


BLOCKS = [pytest.param(*block, id=f"{block[0]}:{block[1]}") for block in blocks()]


@pytest.fixture(autouse=True)
def settings_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield  # uses `tmp_path`, so that this ends before the current folder is removed: torch may import modules here
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("page", "line", "code", "why"), BLOCKS)
def test_a_block_compiles_and_runs_and_prints_what_it_shows(
    page: str,
    line: int,
    code: str,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiled = compile("\n" * (line - 1) + code, page, "exec")
    if why or page in RUN_ELSEWHERE:
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    if "runs/a" in code:
        trained = {}
        exec(TRAINING.replace("attach()", "attach('runs/a')"), trained)
        trained["run"].close()  # type: ignore[attr-defined]
    capsys.readouterr()
    exec(compiled, {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines()[: len(shown(code))] == shown(code)


def shown(code: str) -> list[str]:
    """Return the output that comments after calls of print show."""
    return re.findall(r"print\(.*# (.*)", code)


def test_blocks_are_found_and_few_are_not_run() -> None:
    everything = [*blocks()]
    assert len(everything) > 10
    assert len([why for *_, why in everything if why]) <= len(everything) / 4
    assert [page for page in RUN_ELSEWHERE if not (ROOT / RUN_ELSEWHERE[page]).exists()] == []
