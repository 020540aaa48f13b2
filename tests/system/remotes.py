"""Decorated functions that tests call. Hosts import this module instead of the tests: importing
pytest would take longer than the job."""

from __future__ import annotations

import os
import threading
import time

import kinetic


@kinetic.run(accelerator="cpu")
def square(x):
    return x * x


@kinetic.run(accelerator="cpu")
def fail_on_odd(x):
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x


@kinetic.run(accelerator="cpu")
def wait_for(path, value):
    print(f"waiting for {value}", flush=True)
    while not os.path.exists(path):
        time.sleep(0.02)
    return value


@kinetic.run(accelerator="tpu-v6e-8", all_hosts=True)
def whoami(fails_on=-1, large=0):
    import jax

    host = jax.process_index()
    if host == fails_on:
        raise ValueError(f"host {host} cannot")
    return host, b"x" * large


@kinetic.run(accelerator="tpu-v6e-8", all_hosts=True)
def lock_on(host):
    import jax

    return threading.Lock() if jax.process_index() == host else None


@kinetic.run(accelerator="cpu")
async def add_later(x):
    import asyncio

    if x < 0:
        raise ValueError(f"{x} is negative")
    await asyncio.sleep(0)
    return x + 1


@kinetic.run(accelerator="cpu")
async def outer(x):
    return (
        [await add_later.aio(x), await add_later.aio(x + 1)]
        if hasattr(add_later, "aio")
        else [await add_later(x), await add_later(x + 1)]
    )


@kinetic.run(accelerator="cpu")
def submits():
    return add_later.run_async(1)
