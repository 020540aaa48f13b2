"""`python -m kinetic.runner`: hosts that no supervisor forked, joined by a coordinator over TCP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kinetic._core import layout
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Gang, GangSpec
from kinetic._core.options import Options
from kinetic._core.outcome import judge
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Plan
from kinetic._pickling import call, results
from kinetic._pickling.modules import Shipped
from kinetic._rpc.server import Coordinator
from kinetic._store.local import LocalStore

TOKEN = "a-token-of-the-test"


def devices():
    import jax

    print(f"host {jax.process_index()} speaks")
    return jax.device_count()


@pytest.fixture
def plan(home):
    store = LocalStore(home)
    packed = call.pack(devices, (), {}, env_vars={}, shipped=Shipped())
    store.put(layout.blob(packed.digest), packed.data)
    made = Plan(
        job_id="job-00c0ffee",
        name="devices",
        place=Place("gke"),
        options=Options(resolve("tpu-v6e-8")),
        payload=Blob(packed.digest, packed.size_bytes),
        versions=packed.versions,
        created_at=0.0,
    )
    store.put(layout.plan(made.job_id), json.dumps(made.to_json()).encode())
    return made


def start_host(plan: Plan, index: int, home: Path, target: str) -> subprocess.Popen[bytes]:
    told = {
        "KINETIC_STORE": str(home),
        "KINETIC_JOB_ID": plan.job_id,
        "KINETIC_HOST_INDEX": str(index),
        "KINETIC_HOSTS": str(plan.hosts),
        "KINETIC_COORDINATOR": target,
        "KINETIC_TOKEN": TOKEN,
        "KINETIC_SCRATCH": str(home.parent / f"scratch-{index}"),
        "KINETIC_SIMULATED": "1",
    }
    return subprocess.Popen([sys.executable, "-m", "kinetic.runner"], env=dict(os.environ) | told)


async def gang_of_programs(plan: Plan, home: Path) -> Gang:
    gang = Gang(GangSpec(hosts=plan.hosts), time.monotonic())
    coordinator = Coordinator(gang, TOKEN)
    target = await coordinator.start("127.0.0.1:0")
    hosts = [start_host(plan, i, home, target) for i in range(plan.hosts)]
    await coordinator.wait_finished()
    codes = await asyncio.gather(*(asyncio.to_thread(host.wait) for host in hosts))
    await coordinator.stop()
    assert codes == [0] * plan.hosts
    return gang


def test_hosts_of_their_own_form_a_gang(plan, home):
    gang = asyncio.run(gang_of_programs(plan, home))
    assert [report.exit for report in gang.reports] == [Exit.RETURNED] * 2
    outcome = judge(plan.hosts, gang.reports, now=0.0)
    assert outcome.ok
    store = LocalStore(home)
    assert results.unpack_value(store.get(layout.result(plan.job_id, 1, 0))) == 8
    assert [store.get(layout.log(plan.job_id, 1, i)) for i in (0, 1)] == [
        b"host 0 speaks\n",
        b"host 1 speaks\n",
    ]


def test_a_host_that_is_not_told_who_it_is_says_so():
    env = {name: value for name, value in os.environ.items() if not name.startswith("KINETIC_")}
    done = subprocess.run(
        [sys.executable, "-m", "kinetic.runner"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "KINETIC_STORE is not set" in done.stderr
