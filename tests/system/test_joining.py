"""A host's processes join one JAX world: from functions and programs, and behind proxies; some
programs form none."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import gangs
import joining_cases
import pytest
from joining_cases import JOINS, ROOT, TWO, run, write

import kinetic
from kinetic import errors

project = joining_cases.project

JOINED = ["[host 0] 0 2 8", "[host 1] 1 2 8"]


# -- initialize() with no arguments ----------------------------------------------------------------


@pytest.mark.parametrize("joins_jax", ["lazy", False, "program"])
def test_initialize_needs_no_arguments_in_a_function(joins_jax):
    @kinetic.run(accelerator=TWO, joins_jax=joins_jax)
    def joined():
        import jax

        before = jax.distributed.is_initialized()
        jax.distributed.initialize()
        return before, jax.process_count(), jax.device_count()

    assert joined() == (False, 2, 8)


def test_initialize_needs_no_arguments_on_one_host():
    @kinetic.run(accelerator="tpu-v6e-4")
    def joined():
        import jax

        jax.distributed.initialize()
        return jax.distributed.is_initialized(), jax.process_count(), jax.device_count()

    assert joined() == (True, 1, 4)


def test_initialize_needs_no_arguments_in_a_program(project):
    write(project, "train.py", JOINS)
    assert run(project, "train.py") == JOINED


@pytest.mark.long
def test_keras_initializes_with_no_arguments():
    @kinetic.run(accelerator=TWO)
    def joined():
        sys.modules.update(sklearn=None, matplotlib=None)  # Keras would import both.
        import keras

        keras.distribution.initialize()
        return len(keras.distribution.list_devices())

    assert joined() == 8


def test_initialize_after_joining_does_nothing_when_it_agrees_and_says_where_it_does_not():
    @kinetic.run(accelerator=TWO, joins_jax=True)
    def initialize_twice():
        import os

        import jax

        assert jax.distributed.is_initialized()
        jax.distributed.initialize()
        jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2, jax.process_index())
        jax.distributed.initialize(num_processes=2)
        messages = []
        for wrong in (
            {"num_processes": 3},
            {"process_id": 5},
            {"coordinator_address": "127.0.0.1:1"},
        ):
            try:
                jax.distributed.initialize(**wrong)
            except RuntimeError as error:
                messages.append(str(error))
        return messages

    messages = initialize_twice()
    assert len(messages) == 3
    assert all("joined" in each and "process 0 of 2" in each for each in messages)
    assert "num_processes=3" in messages[0]


@pytest.mark.parametrize("joins_jax", ["lazy", False])
def test_who_joins_another_coordinator_is_told_unless_he_has_said_so(joins_jax, capfd):
    """The function joins a coordinator that was written for two other machines, and would wait in
    silence. kinetic warns, unless joins_jax=False."""

    @kinetic.run(accelerator="tpu-v6e-8", joins_jax=joins_jax)
    def pasted():
        import jax
        from jax._src import distributed

        distributed.global_state.initialize = lambda *args, **kwargs: None
        jax.distributed.initialize("10.0.0.1:1234", 2, 1)

    pasted()
    assert ("this host joins 10.0.0.1:1234, not" in capfd.readouterr().err) is bool(joins_jax)


@pytest.mark.long
@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
def test_a_world_of_the_functions_own_is_left_alone(accelerator):
    @kinetic.run(accelerator=accelerator, joins_jax=False, timeout=200)
    def own():
        import socket
        import sys

        if os.environ["KINETIC_HOST_INDEX"] != "0":
            return None
        code = (
            "import jax, sys; jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2])); "
            "print(jax.process_count())"
        )
        # The bound socket keeps other programs off the port.
        with socket.socket() as port:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{port.getsockname()[1]}"
            programs = [
                subprocess.Popen(
                    [sys.executable, "-c", code, address, str(i)], stdout=subprocess.PIPE
                )
                for i in range(2)
            ]
            return [process.communicate()[0].decode().strip() for process in programs]

    assert own() == ["2", "2"]


# -- one world without a call of initialize() ------------------------------------------------------


@pytest.mark.parametrize("how", [["train.py"], ["-m", "train"]])
def test_a_program_that_never_initializes_gets_one_world(project, how):
    write(
        project,
        "train.py",
        "import jax\nprint(jax.process_index(), jax.process_count(), jax.device_count())\n",
    )
    assert run(project, *how) == JOINED


@pytest.mark.long
def test_programs_that_follow_one_another_each_get_one_world(project):
    write(
        project,
        "train.py",
        "import jax\nprint(jax.process_index(), jax.process_count(), jax.device_count())\n",
    )
    both = f"{sys.executable} train.py && {sys.executable} train.py"
    assert run(project, "--", "sh", "-c", both) == sorted(JOINED * 2)


def test_joining_waits_for_the_first_use_unless_it_is_asked_for():
    def count_devices():
        import jax

        return (
            jax.distributed.is_initialized(),
            jax.device_count(),
            jax.distributed.is_initialized(),
        )

    assert kinetic.run(accelerator=TWO)(count_devices)() == (False, 8, True)
    assert kinetic.run(accelerator=TWO, joins_jax=True)(count_devices)() == (True, 8, True)
    assert kinetic.run(accelerator=TWO, joins_jax=False)(count_devices)() == (False, 4, False)


@pytest.mark.parametrize(("accelerator", "hits_by_host"), [(TWO, [1, 1]), ("tpu-v6e-4", [1])])
def test_a_compilation_cache_of_the_user_serves_every_host(tmp_path, accelerator, hits_by_host):
    """The function sets a folder for JAX's cache. Each host finds there what it has compiled in an
    earlier job; no host finds another host's program, which would break the collectives."""

    @kinetic.run(accelerator=accelerator, all_hosts=True)
    def compiled():
        import jax
        import numpy as np

        hits = []
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        mesh = jax.make_mesh((len(jax.devices()),), ("all",))
        over_all = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
        ones = jax.make_array_from_callback((8,), over_all, lambda part: np.ones(8)[part])
        jax.monitoring.register_event_listener(
            lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
        )
        return float(jax.jit(lambda x: (x * x).sum())(ones)), len(hits)

    for expected in ([0] * len(hits_by_host), hits_by_host):
        handle = compiled.run_async()
        assert handle.results(timeout=200) == [(8.0, hits) for hits in expected]
        handle.cleanup()


def test_a_function_that_uses_no_jax_joins_nothing():
    @kinetic.run(accelerator=TWO)
    def plain():
        return sum(range(10))

    assert plain() == 45


def test_children_of_a_function_stand_alone():
    @kinetic.run(accelerator=TWO)
    def parent():
        import multiprocessing
        import sys

        import jax

        if os.environ["KINETIC_HOST_INDEX"] != "0":
            return jax.device_count()
        code = "import jax; print(jax.process_count(), jax.device_count())"
        early = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            spawned = pool.apply(eval, ("__import__('jax').device_count()",))
        count = jax.device_count()
        late = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        return early, spawned, count, late

    assert parent() == ("1 4\n", 4, 8, "1 4\n")


@pytest.mark.long
def test_children_of_a_program_stand_alone(project):
    write(
        project,
        "train.py",
        """
        import multiprocessing, os, subprocess, sys
        import jax
        def count(_): return jax.device_count()
        if __name__ == "__main__" and os.environ["RANK"] == "0":
            print(jax.device_count())
        elif __name__ == "__main__":
            child = subprocess.check_output(
                [sys.executable, "-c", "import jax; print(jax.device_count())"], text=True
            )
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(child.strip(), pool.map(count, [0]), jax.device_count())
        """,
    )
    assert run(project, "--", sys.executable, "train.py") == [
        "[host 0] 8",
        "[host 1] 4 [4] 8",
    ]


def test_the_users_own_sitecustomize_is_run(project):
    (project / "site").mkdir()
    write(project, "site/sitecustomize.py", "import sys\nsys.mine = 'mine'\n")
    write(
        project,
        "train.py",
        "import jax, sys\nprint(sys.mine, jax.process_count(), 'kinetic' in sys.path[0])\n",
    )
    own = f"{project / 'site'}{os.pathsep}{ROOT}"
    output = run(
        project,
        "--",
        "env",
        f"PYTHONPATH_={own}",
        "sh",
        "-c",
        f'PYTHONPATH="$PYTHONPATH:{own}" {sys.executable} train.py',
    )
    assert output == ["[host 0] mine 2 False", "[host 1] mine 2 False"]


@pytest.mark.long
def test_jax_preemption_service_can_be_switched_on():
    def service():
        import jax
        from jax._src import distributed

        jax.devices()
        return distributed.global_state.preemption_sync_manager is not None

    def configured():
        import jax

        jax.config.update("jax_enable_preemption_service", True)
        return service()

    assert kinetic.run(accelerator=TWO)(service)() is False
    assert (
        kinetic.run(accelerator=TWO, env={"JAX_ENABLE_PREEMPTION_SERVICE": "1"})(service)() is True
    )
    assert (
        kinetic.run(accelerator=TWO, joins_jax=True, env={"JAX_ENABLE_PREEMPTION_SERVICE": "1"})(
            service
        )()
        is True
    )
    assert kinetic.run(accelerator=TWO)(configured)() is True


# -- the number of devices -------------------------------------------------------------------------


ASKS_FOR_EIGHT = """
    import jax
    jax.config.update("jax_num_cpu_devices", 8)
    print(jax.process_index(), jax.local_device_count(), jax.device_count())
"""


@pytest.mark.long
def test_a_program_that_asks_for_virtual_cpus_has_the_chips_of_its_slice(project):
    write(project, "eight.py", ASKS_FOR_EIGHT)
    assert run(project, "eight.py") == ["[host 0] 0 4 8", "[host 1] 1 4 8"]
    assert run(project, "eight.py", accelerator="gpu-l4") == ["[host 0] 0 1 1"]
    assert run(project, "eight.py", accelerator="cpu:2") == [
        "[host 0] 0 8 8"
    ]  # This machine is no simulated slice.


def test_a_function_that_asks_for_virtual_cpus_is_told_how_many_chips_there_are(capfd):
    @kinetic.run(accelerator=TWO, joins_jax=True)
    def count():
        import jax

        jax.config.update("jax_num_cpu_devices", 8)
        return jax.local_device_count(), jax.device_count()

    assert count() == (4, 8)
    notice = "jax_num_cpu_devices=8 has no effect: the number of devices of this simulated host is "
    notice += "fixed at 4"
    assert notice in capfd.readouterr().err


# -- hosts that do not join ------------------------------------------------------------------------


def test_a_host_that_returns_without_jax_ends_the_wait_of_the_others():
    @kinetic.run(accelerator="tpu-v6e-16")
    def only_the_leader():
        import os

        import jax

        return jax.device_count() if os.environ["KINETIC_HOST_INDEX"] in "02" else None

    with pytest.raises(
        errors.HostHung, match="hosts 1, 3 of 4 returned without using JAX"
    ) as caught:
        only_the_leader()
    assert "hosts 0, 2" in str(caught.value)
    assert re.search(r"test_joining.py:\d+ in only_the_leader", str(caught.value))


def test_a_host_that_never_uses_jax_keeps_the_others_waiting_only_so_long():
    @kinetic.run(accelerator=TWO, start_timeout=6)
    def one_is_busy():
        import os
        import time

        import jax

        if os.environ["KINETIC_HOST_INDEX"] == "1":
            time.sleep(1000)
        return jax.device_count()

    with pytest.raises(errors.HostHung, match=r"host 0 of 2 has waited 6 s in JAX for host 1"):
        one_is_busy()


def test_a_program_that_waits_for_others_in_vain_ends(project):
    write(
        project,
        "train.py",
        "import os\nif os.environ['RANK'] == '0':\n    import jax\n    jax.devices()\n",
    )
    with pytest.raises(AssertionError, match="host 1 of 2 returned without using JAX"):
        run(project, "--", sys.executable, "train.py")


def test_the_start_timeout_covers_the_workers(home):
    ran = home.parent / "ran"

    def touch(path):
        open(path, "w").close()

    # On a busy machine the other host may need more than 6 s to start: then try 60 s.
    for limit_s in (6, 60):
        starts = kinetic.run(accelerator=TWO, joins_jax=True, start_timeout=limit_s)(touch)
        handle = starts.run_async(str(ran))
        _, agents = gangs.processes(handle)
        gangs.stop(gangs.worker_of(agents[1]))
        with pytest.raises(errors.GangTimeout) as caught:
            handle.result()
        if caught.value.hosts == (1,):
            break
    assert re.search(rf"host 1 of 2 .*within {limit_s} s", str(caught.value))
    assert "SIGSTOP" in str(caught.value)
    assert not ran.exists()
