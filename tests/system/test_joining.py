"""How processes of a host become one world: in functions and in programs, behind proxies, and not
at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import gangs
import pytest

import kinetic
from kinetic import errors

ROOT = Path(kinetic.__file__).parent.parent
KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
TWO = "tpu-v6e-8"
PROXIES = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "grpc_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "GRPC_PROXY",
)
NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not answer."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def run(project: Path, *argv: str, accelerator: str = TWO, **variables: str) -> list[str]:
    """Run a program on all hosts; return the lines of all of them, in order."""
    env = {k: v for k, v in os.environ.items() if k.lower() not in PROXIES}
    done = subprocess.run(
        [*KINETIC, "run", "-a", accelerator, "--all-hosts", *argv],
        cwd=project,
        env=env | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proxy" not in done.stderr.lower(), done.stderr
    return sorted(done.stdout.splitlines())


def write(project: Path, name: str, text: str) -> str:
    (project / name).write_text(textwrap.dedent(text))
    return name


JOINS = """
    import jax
    assert not jax.distributed.is_initialized()
    jax.distributed.initialize()
    assert jax.distributed.is_initialized()
    print(jax.process_index(), jax.process_count(), jax.device_count())
"""
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


@pytest.mark.parametrize("how", [["train.py"], ["-m", "train"], ["--", sys.executable, "train.py"]])
def test_initialize_needs_no_arguments_in_a_program(project, how):
    write(project, "train.py", JOINS)
    assert run(project, *how) == JOINED


def test_keras_initializes_with_no_arguments():
    @kinetic.run(accelerator=TWO)
    def joined():
        import keras

        keras.distribution.initialize()
        return len(keras.distribution.list_devices())

    assert joined() == 8


def test_initialize_after_joining_does_nothing_when_it_agrees_and_says_where_it_does_not():
    @kinetic.run(accelerator=TWO, joins_jax=True)
    def again():
        import os

        import jax

        assert jax.distributed.is_initialized()
        jax.distributed.initialize()
        jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2, jax.process_index())
        jax.distributed.initialize(num_processes=2)
        told = []
        for wrong in (
            {"num_processes": 3},
            {"process_id": 5},
            {"coordinator_address": "127.0.0.1:1"},
        ):
            try:
                jax.distributed.initialize(**wrong)
            except RuntimeError as error:
                told.append(str(error))
        return told

    told = again()
    assert len(told) == 3
    assert all("joined" in each and "process 0 of 2" in each for each in told)
    assert "num_processes=3" in told[0]


@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
def test_a_world_of_the_functions_own_is_left_alone(accelerator):
    @kinetic.run(accelerator=accelerator, joins_jax=False, timeout=200)
    def own():
        import socket
        import subprocess
        import sys

        code = (
            "import jax, sys; jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2])); "
            "print(jax.process_count())"
        )
        with socket.socket() as port:  # stays bound: the kernel gives it to no other program
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{port.getsockname()[1]}"
            made = [
                subprocess.Popen(
                    [sys.executable, "-c", code, address, str(i)], stdout=subprocess.PIPE
                )
                for i in range(2)
            ]
            return [process.communicate()[0].decode().strip() for process in made]

    assert own() == ["2", "2"]


# -- one world without a word ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [["train.py"], ["-m", "train"], ["--", "sh", "-c", f"{sys.executable} train.py"]]
)
def test_a_program_that_never_initializes_gets_one_world(project, how):
    write(
        project,
        "train.py",
        "import jax\nprint(jax.process_index(), jax.process_count(), jax.device_count())\n",
    )
    assert run(project, *how) == JOINED


def test_programs_that_follow_one_another_each_get_one_world(project):
    write(
        project,
        "train.py",
        "import jax\nprint(jax.process_index(), jax.process_count(), jax.device_count())\n",
    )
    both = f"{sys.executable} train.py && {sys.executable} train.py"
    assert run(project, "--", "sh", "-c", both) == sorted(JOINED * 2)


def test_joining_waits_for_the_first_use_unless_it_is_asked_for():
    def seen():
        import jax

        return (
            jax.distributed.is_initialized(),
            jax.device_count(),
            jax.distributed.is_initialized(),
        )

    assert kinetic.run(accelerator=TWO)(seen)() == (False, 8, True)
    assert kinetic.run(accelerator=TWO, joins_jax=True)(seen)() == (True, 8, True)
    assert kinetic.run(accelerator=TWO, joins_jax=False)(seen)() == (False, 4, False)


def test_a_function_that_uses_no_jax_joins_nothing():
    @kinetic.run(accelerator=TWO)
    def plain():
        return sum(range(10))

    assert plain() == 45


def test_children_of_a_function_stand_alone():
    @kinetic.run(accelerator=TWO)
    def parent():
        import multiprocessing
        import subprocess
        import sys

        import jax

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


def test_children_of_a_program_stand_alone(project):
    write(
        project,
        "train.py",
        """
        import multiprocessing, subprocess, sys
        import jax
        def count(_): return jax.device_count()
        if __name__ == "__main__":
            child = subprocess.check_output(
                [sys.executable, "-c", "import jax; print(jax.device_count())"], text=True
            )
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(child.strip(), pool.map(count, [0]), jax.device_count())
        """,
    )
    assert run(project, "--", sys.executable, "train.py") == [
        "[host 0] 4 [4] 8",
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
    said = run(
        project,
        "--",
        "env",
        f"PYTHONPATH_={own}",
        "sh",
        "-c",
        f'PYTHONPATH="$PYTHONPATH:{own}" {sys.executable} train.py',
    )
    assert said == ["[host 0] mine 2 False", "[host 1] mine 2 False"]


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


# -- not all hosts ---------------------------------------------------------------------------------


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

    for limit_s in (6, 60):  # again if this machine is too busy to start the other host in time
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


# -- proxies, and programs that are not JAX --------------------------------------------------------


@pytest.mark.parametrize("joins_jax", [True, "lazy"])
def test_the_hosts_talk_to_each_other_past_every_proxy(joins_jax, monkeypatch):
    for name in PROXIES:
        monkeypatch.setenv(name, NOWHERE)
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_grpc_proxy", "example.net")

    @kinetic.run(
        accelerator=TWO,
        joins_jax=joins_jax,
        env={"grpc_proxy": NOWHERE, "no_grpc_proxy": "example.net"},
    )
    def seen():
        import os

        import jax

        return (
            jax.device_count(),
            os.environ["https_proxy"],
            os.environ["no_proxy"].split(","),
            os.environ["no_grpc_proxy"],  # noqa: SIM112
        )

    count, proxy, direct, direct_grpc = seen()
    assert (count, proxy) == (8, NOWHERE)
    assert {"example.org", "127.0.0.1", "localhost"} <= set(direct)
    assert direct_grpc.startswith("example.net,")


def test_a_program_joins_past_proxies_that_it_sets_itself(project):
    write(
        project,
        "train.py",
        f"import os\nfor name in {PROXIES!r}: os.environ[name] = {NOWHERE!r}\n"
        "os.environ['no_proxy'] = 'example.org'\nimport jax\nprint(jax.device_count())\n",
    )
    assert run(project, "--", sys.executable, "train.py", https_proxy=NOWHERE) == [
        "[host 0] 8",
        "[host 1] 8",
    ]


def test_programs_of_other_frameworks_find_their_variables():
    @kinetic.run(accelerator=TWO)
    def variables():
        import os
        import socket

        with socket.socket() as free:
            if os.environ["RANK"] != "0":
                return None
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            free.listen()
        names = (
            "MASTER_ADDR",
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "PET_NNODES",
            "PET_NODE_RANK",
        )
        return [os.environ[name] for name in names], os.environ["MASTER_PORT"] == os.environ[
            "PET_MASTER_PORT"
        ]

    assert variables() == (["127.0.0.1", "0", "2", "0", "1", "2", "0"], True)


def test_every_host_is_told_the_same_port(project):
    said = run(project, "--", "sh", "-c", "echo $MASTER_PORT $JAX_COORDINATOR_ADDRESS")
    assert len({re.sub(r"^\[host \d\] ", "", line) for line in said}) == 1


def test_programs_meet_jax_also_where_the_function_captured_a_path_of_its_own(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"/nowhere{os.pathsep}{ROOT}")

    @kinetic.run(accelerator=TWO, joins_jax="program", capture_env_vars=["PYTHONPATH"])
    def start():
        import subprocess
        import sys

        return subprocess.check_output(
            [sys.executable, "-c", "import jax; print(jax.device_count())"], text=True
        )

    assert start() == "8\n"


def test_a_fork_that_imports_jax_first_stands_alone():
    # A variable of JAX's: it is not imported ahead.
    @kinetic.run(accelerator=TWO, env={"JAX_TRACEBACK_FILTERING": "off"})
    def fork():
        import os
        import sys

        assert "jax" not in sys.modules
        pid = os.fork()
        if pid == 0:
            import jax

            os._exit(jax.device_count())
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert fork() == 4


def test_slices_of_one_host_each_are_one_world() -> None:
    @kinetic.run(accelerator="cpu:2", slices=3)
    def total() -> tuple[float, int, int]:
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(jax.devices(), ("x",))
        ones = jax.make_array_from_callback(
            (6,), NamedSharding(mesh, PartitionSpec("x")), lambda _: jnp.ones(1)
        )
        return float(jax.jit(jnp.sum)(ones)), jax.process_count(), jax.local_device_count()

    assert total() == (6.0, 3, 2)


def test_a_program_on_slices_of_one_host_each(project: Path) -> None:
    script = write(project, "joins.py", JOINS)
    assert run(project, "--slices", "2", script, accelerator="cpu:2") == [
        "[host 0] 0 2 4",
        "[host 1] 1 2 4",
    ]
