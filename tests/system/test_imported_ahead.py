"""Large libraries that the caller has imported are imported once for all its hosts, before the
function begins. A library that cannot be imported so affects no job."""

from __future__ import annotations

import os

import pytest

import kinetic
from kinetic._backends.local import launcher
from kinetic._config import settings


def find_orbax():
    import sys

    was_imported = "orbax.checkpoint" in sys.modules
    import orbax.checkpoint

    return was_imported, hasattr(orbax.checkpoint, "checkpoint_managers")


@pytest.mark.parametrize(("env", "is_imported"), [({}, True), ({"ORBAX_ANYTHING": "1"}, False)])
def test_a_library_of_the_caller_is_there_before_the_function_begins(env, is_imported):
    import orbax.checkpoint  # noqa: F401

    launcher._close_all()
    assert kinetic.run("tpu-v6e-8", env=env)(find_orbax)() == (is_imported, True)


LIBRARIES = {
    "starts_a_thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "ends": "import os\nos._exit(1)",
    "fails": "raise RuntimeError('no')",
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_cannot_be_imported_ahead_spoils_no_job(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / f"{name}.py").write_text(LIBRARIES[name])
    zygotes = []
    for _ in range(2):
        launcher.warm_up((), settings.worker_environ(), libraries=[name])
        assert kinetic.run("cpu")(os.getpid)() > 0
        zygotes.append(list(launcher._zygotes.values())[-1])
    assert zygotes[0] is zygotes[1], "it is told once"
