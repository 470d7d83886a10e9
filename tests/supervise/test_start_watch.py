"""The line of a script that a worker is in is found in the stack that the worker printed."""

from holdfast.supervise.start_watch import where

STACK = """Current thread 0x0000ffff (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/me/train.py", line 12 in prepare
  File "/home/me/train.py", line 30 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_innermost_line_of_the_script_and_the_call_in_it_are_named() -> None:
    assert where(STACK, "/home/me/train.py") == " (train.py:12, which called barrier in distributed_c10d.py:5356)"


def test_without_a_line_of_the_script_the_innermost_call_is_named() -> None:
    assert where(STACK, "/home/me/other.py") == " (barrier in distributed_c10d.py:5356)"


def test_a_worker_that_did_not_answer_has_no_place() -> None:
    assert where("", "/home/me/train.py") == ""
