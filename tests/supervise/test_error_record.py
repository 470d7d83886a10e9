"""The exception that ends a worker reaches the supervisor in a file, or in shared memory."""

from pathlib import Path
from unittest.mock import ANY

from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInput, StorageFailed
from holdfast.progress import Progress
from holdfast.supervise.error_record import RaisedException, read_error, write_error


def test_an_error_is_recorded_in_the_format_that_torch_reads(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path, memory = tmp_path / "error.json", Progress()
    try:
        raise KeyError("w")
    except KeyError as error:
        write_error(path, memory, error, __file__)
    raised = read_error(path, Progress())
    assert raised is not None
    assert raised == read_error(tmp_path / "none", memory)  # where the disk took nothing
    assert (raised.message, raised.origin) == ("KeyError: 'w'", "script")
    assert raised.place.startswith(f"{__file__}:")
    assert 'raise KeyError("w")' in raised.traceback
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert failure.message["message"] == "KeyError: 'w'"  # type: ignore[index]
    write_error(path, memory, BadInput("give a batch of 1 or more"), __file__)
    assert read_error(path, memory) == RaisedException("give a batch of 1 or more", "", ANY, "refused", "")
    write_error(tmp_path, memory, StorageFailed("no space"), __file__)
    assert read_error(tmp_path, memory) == RaisedException("no space", "", ANY, "storage", "")
    path.write_text('{"message": {"mess')
    assert read_error(path, Progress()) is None
    assert read_error(tmp_path / "none", Progress()) is None


@given(st.text(min_size=1, max_size=30).map(lambda text: text * 200))
def test_an_error_of_any_length_reaches_the_supervisor(text: str) -> None:
    memory = Progress()
    write_error(Path("/dev/full"), memory, RuntimeError(text), __file__)
    raised = read_error(Path("/dev/null"), memory)
    assert raised is not None
    assert raised.message.removeprefix("RuntimeError: ") == text[: len(raised.message) - 14]
