"""Values of calls that another program made: unpickling them imports modules from that program's
project."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from kinetic._client import result
from kinetic.errors import ResultUnavailable

THREADS = 4


def test_threads_find_the_modules_of_a_project_at_once(tmp_path):
    (tmp_path / "module_of_the_other.py").write_text("VALUE = 7\n")
    plan = SimpleNamespace(
        client_root=str(tmp_path), sys_path_rel=("",), entry_rel="", editable_rel=()
    )
    all_have_failed = threading.Barrier(THREADS)
    board = SimpleNamespace(plan=lambda _: plan)

    def fetch(_):
        failed = []

        def load():
            try:
                import module_of_the_other
            except ModuleNotFoundError as error:
                if not failed:
                    failed.append(True)
                    all_have_failed.wait(60)
                raise ResultUnavailable("its module is missing") from error
            return module_of_the_other.VALUE

        return result._load_in_project(board, None, load)

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(fetch, range(THREADS))) == [7] * THREADS
