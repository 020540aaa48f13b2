"""What the comparison of the hosts' programs costs, on 4 simulated hosts: processor time
of a program's first call and of later calls, compared with `compare_programs=False`; and how soon a
difference is named."""

from __future__ import annotations

import time

import measure

import kinetic

RUNS, LAYERS, STEPS = 5, 48, 100
HOSTS: dict = {"accelerator": "cpu:1", "slices": 4}
FIRST_COMPARED = 20


def train(*, differs: bool) -> tuple[float, float]:
    """Return the CPU seconds of a program's first call, and of a later one. If the last host
    differs, print when it has called the program."""
    import resource

    import jax
    import jax.numpy as jnp
    import numpy as np

    def cpu_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    batch = np.ones((jax.device_count(), 16), np.float32)
    batch = jax.make_array_from_callback(batch.shape, rows, lambda index: batch[index])
    whole = jax.NamedSharding(mesh, jax.P())
    values = np.tile(np.eye(16, dtype=np.float32), (LAYERS, 1, 1))
    weights = jax.make_array_from_callback(values.shape, whole, lambda index: values[index])
    is_odd = differs and jax.process_index() == jax.process_count() - 1

    @jax.jit
    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(weights: jax.Array) -> jax.Array:
            y = x
            for layer in range(LAYERS):
                y = jnp.sin(y @ weights[layer]) if is_odd else jnp.tanh(y @ weights[layer])
            return jnp.mean(y)

        value, slopes = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * slopes, value

    begun, before = time.time(), cpu_s()
    if differs:
        print(begun, flush=True)
    weights, value = step(weights, batch)
    first = cpu_s() - before
    float(value)
    for _ in range(FIRST_COMPARED):
        weights, value = step(weights, batch)
    float(value)
    before = cpu_s()
    for _ in range(STEPS):
        weights, value = step(weights, batch)
        float(value)
    return first, (cpu_s() - before) / STEPS


def main() -> None:
    with measure.home():
        taken: dict[bool, list] = {True: [], False: []}
        for _ in range(RUNS):
            for compares, runs in taken.items():
                job = kinetic.run(**HOSTS, compare_programs=compares)(train)
                runs.append(job(differs=False))
        begun, event = name_difference()
    # The least of several: other work on the machine only adds to processor time.
    own, bare = (list(map(min, *runs)) for runs in taken.values())
    measure.heading("programs of 4 hosts (floor: compare_programs=False; CPU time)")
    measure.row(f"first call, {LAYERS} layers", own[0], bare[0], "<= 1.01x")
    measure.row("later call", own[1], bare[1], "1x")
    print(f"  a difference is named {event - begun:.1f} s after the last host's call (goal: 2 s)")


def name_difference() -> tuple[float, float]:
    """Return when the host that differs has called its program, and when that was said."""
    job = kinetic.run(**HOSTS)(train).run_async(differs=True)
    while not (events := [each for each in job.events() if each["kind"] == "programs"]):
        time.sleep(0.05)
    job.cancel()
    begun, *_ = job.logs(host=HOSTS["slices"] - 1).split()
    return float(begun), events[0]["time"]


if __name__ == "__main__":
    main()
