"""Workers, agents and slices of an elastic job are killed at random. The job returns the right
value, and leaves no process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import kinetic
from kinetic._core import layout
from kinetic._system import processes

pytestmark = [pytest.mark.timeout(900), pytest.mark.settles_within(60)]
STEPS = 120
KILLS = 4
TRAINING_KILLS = int(os.environ.get("KINETIC_TEST_KILLS", "1"))
PATIENCE_S = 700.0


def count(folder):
    """Add up the numbers of all steps, from the last saved step and sum."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    saved = Path(folder, "saved")
    step, total = json.loads(saved.read_text()) if saved.exists() else (0, 0)
    while step < STEPS:
        everyone = multihost_utils.process_allgather(np.array([step])).reshape(-1)
        step, total = step + 1, total + int(everyone.sum()) // everyone.size
        if jax.process_index() == 0:
            saved.with_suffix(".new").write_text(json.dumps([step, total]))
            saved.with_suffix(".new").rename(saved)
        multihost_utils.sync_global_devices("saved")
        if kinetic.should_reform():
            kinetic.reform()
        time.sleep(0.02)
    return total


def victims(supervisor, choose):
    """Choose a worker, an agent, or all agents of a slice; return their pids. () if the choice does
    not exist at the moment."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        agents = {
            int(host): pid for host, pid in json.loads(supervisor.read_text())["agents"].items()
        }
        what, host = choose.choice(["worker", "agent", "slice"]), choose.choice(sorted(agents))
        if what == "slice":
            return [pid for each, pid in agents.items() if each // 2 == host // 2]
        if what == "agent":
            return [agents[host]]
        below = processes.children(agents[host])
        return [pid for pid in below if processes.command_line(pid).startswith(b"kinetic-worker")]
    return []


def kill(handle, home, choose, wanted, read_phase=lambda: ""):
    """Kill processes at random moments until `wanted` have been killed or the job has ended. Return
    the job's phase at each kill."""
    supervisor = home / layout.JobKeys(handle.job_id).prefix / "local/supervisor.json"
    deadline, phases = time.monotonic() + PATIENCE_S + 10 * wanted, []
    while len(phases) < wanted and not handle.status().ended:
        assert time.monotonic() < deadline, f"only {len(phases)} kills"
        time.sleep(choose.uniform(0.0, 4.0))
        for pid in victims(supervisor, choose):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                phases.append(read_phase())
    return phases


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_random_kills(home, tmp_path, seed):
    remote = kinetic.run("tpu-v6e-8", slices=(1, 2), on_slice_loss="shrink", max_failures=50)(count)
    handle = remote.run_async(str(tmp_path))
    kill(handle, home, random.Random(seed), KILLS)
    assert handle.result(timeout=PATIENCE_S) == STEPS * (STEPS - 1) // 2


def train(folder, least):
    """Train with both tiers of checkpoints, at least `least` steps and until the file "enough"
    exists. Write the current phase (restore, compile, save, step) to the file "phase"."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def now(phase):
        if jax.process_index() == 0:
            Path(folder, "phase.new").write_text(f"{phase} on {kinetic.num_slices()}")
            Path(folder, "phase.new").rename(Path(folder, "phase"))

    mesh = kinetic.make_mesh(dcn={"data": -1}, ici={"fsdp": -1})
    batch = NamedSharding(mesh, P(("data", "fsdp")))
    split, everywhere = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())

    def draw(step):  # not in JAX: it would compile for a second
        return np.random.default_rng(step).standard_normal((96, 16), np.float32)

    @jax.jit
    def update(weights, x):
        x = jax.lax.with_sharding_constraint(x, batch)
        slope = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - jnp.sin(x)) ** 2))(weights)
        return jax.lax.with_sharding_constraint(weights - 0.1 * slope, split)

    now("restore")
    with kinetic.Checkpointer(Path(folder, "saved"), every=10, local_every=1) as checkpoints:
        begun = jax.jit(lambda: jnp.eye(16), out_shardings=split)()
        state, step = checkpoints.restore({"weights": begun})
        now("compile")
        while True:
            state["weights"] = jax.block_until_ready(update(state["weights"], draw(step)))
            now("save")
            checkpoints.save(step, state)
            now("step")
            step += 1
            may_end = step >= least and Path(folder, "enough").exists()
            if np.max(multihost_utils.process_allgather(np.array([may_end]))):
                break
            time.sleep(0.02)
    whole = jax.jit(lambda w: w, out_shardings=everywhere)(state["weights"])
    return step, np.asarray(whole)


@pytest.mark.long
@pytest.mark.timeout(5000)
@pytest.mark.parametrize("on_loss", ["wait", "shrink"])
def test_a_training_under_random_kills_ends_with_the_weights_of_an_undisturbed_one(
    home, tmp_path, on_loss, record_property
):
    """The final weights must equal those of a training without kills. KINETIC_TEST_KILLS is the
    number of kills; the default is small."""
    phase, begin = tmp_path / "phase", time.monotonic()
    remote = kinetic.run(
        "tpu-v6e-8",
        slices=(1 if on_loss == "shrink" else 2, 2),
        on_slice_loss=on_loss,
        max_failures=1000,
    )(train)
    handle = remote.run_async(str(tmp_path), 30)
    read_phase = lambda: phase.read_text() if phase.exists() else "start"  # noqa: E731
    phases = kill(handle, home, random.Random(7), TRAINING_KILLS, read_phase)
    (tmp_path / "enough").touch()
    steps, weights = handle.result(timeout=PATIENCE_S + 10 * TRAINING_KILLS)
    summary = (
        f"{len(phases)} kills, {steps} steps, {time.monotonic() - begin:.0f} s: {Counter(phases)}"
    )
    record_property("kills", summary)
    print(summary)
    calm = tmp_path / "calm"
    calm.mkdir()
    (calm / "enough").touch()
    # "wait": the bits are equal only with as many processes. "shrink": one process is enough.
    controller = {"controller": "single"} if on_loss == "shrink" else {}
    expected = kinetic.run("tpu-v6e-8", slices=2, **controller)(train)(str(calm), steps)
    assert len(phases) >= TRAINING_KILLS
    assert steps == expected[0]
    if on_loss == "wait":
        np.testing.assert_array_equal(weights, expected[1])
    else:
        np.testing.assert_allclose(weights, expected[1], rtol=1e-4, atol=1e-6)
