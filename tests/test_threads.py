"""Threads that stay: the results of all items in their order, errors told, and none in a child process."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from ntkfl.threads import in_threads


def test_results_keep_their_order_and_threads_stay() -> None:
    assert in_threads(lambda i: i * i, range(50)) == [i * i for i in range(50)]
    before = threading.active_count()
    assert in_threads(str, [1]) == ["1"]
    assert threading.active_count() == before
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda i: 1 // i, [1, 0])


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked elsewhere")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_starts_threads_of_its_own() -> None:
    assert in_threads(str, [1, 2]) == ["1", "2"]
    child = os.fork()
    if child == 0:
        os._exit(0 if in_threads(str, [3]) == ["3"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
