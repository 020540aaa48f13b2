"""Restores from the persistent tier where slices are replicas: one of them reads.

In: states of many types on two slices. Out: the same bits on all devices; who has read them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import kinetic

pytestmark = pytest.mark.timeout(600)

ROWS = 1 << 12
"""Of 512 bytes or more: all arrays with rows are large enough to be sent."""


def save_and_restore():
    """Return which leaves differ, and how many bytes were read to restore them."""
    import jax
    import ml_dtypes
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = kinetic.make_mesh()  # "data" over slices, "fsdp" within
    types = [np.float32, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn, np.uint32, bool]

    kinds = (jax.sharding.AxisType.Explicit,) * 2
    explicit = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)

    def made(content, spec, over=mesh):
        return jax.make_array_from_callback(
            content.shape, NamedSharding(over, spec), lambda part: content[part]
        )

    def state(blank):
        luck = np.random.default_rng(1)

        def content(columns, dtype):
            if blank:
                return np.zeros((ROWS, columns), dtype)
            if dtype is bool:
                return luck.integers(0, 2, (ROWS, columns), bool)
            raw = luck.integers(0, 256, (ROWS, columns * np.dtype(dtype).itemsize), np.uint8)
            return raw.view(dtype)  # any bits: also -0.0 and all kinds of NaN

        inside = {np.dtype(t).name: made(content(512, t), P("fsdp")) for t in types}
        return inside | {
            "everywhere": made(content(128, np.float32), P()),
            "nobody's copy": made(content(512, np.float32), P(("data", "fsdp"))),
            "explicit": made(content(512, np.uint16), P("fsdp"), explicit),
            "over slices": made(content(512, np.float32), P("data")),
            "complex": made(content(128, np.complex64), P("fsdp")),
            "small": made(content(1, np.int8), P("fsdp")),
            "own": jax.numpy.full(3, 0.0 if blank else 5.0),
            "number": 0 if blank else 7,
            "nothing": None,
            "key": jax.random.key(0 if blank else 9),
        }

    def bits(value):
        if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        shards = getattr(value, "addressable_shards", None)
        return value if shards is None else [np.asarray(s.data).tobytes() for s in shards]

    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    wanted = state(blank=False)
    with kinetic.Checkpointer(local_every=None) as ckpt:
        ckpt.save(0, wanted, force=True)
    for _ in range(2):  # the first time, modules are read as well
        like = state(blank=True)
        with kinetic.Checkpointer(local_every=None) as ckpt:
            before = bytes_read()
            found, start = ckpt.restore(like)
            read = bytes_read() - before
    assert start == 1
    wrong = [name for name in wanted if bits(found[name]) != bits(wanted[name])]
    wrong += [
        name
        for name, value in found.items()
        if isinstance(value, jax.Array) and value.sharding != like[name].sharding
    ]
    return wrong, read


def test_one_slice_reads_what_both_need(tmp_path):
    # Two hosts in each slice.
    run = kinetic.run("tpu-v6e-8", slices=2, all_hosts=True, output_dir=str(tmp_path))
    job = run(save_and_restore).run_async()
    job.result()
    assert [wrong for wrong, _ in job.results()] == [[]] * 4
    read = [size for _, size in job.results()]
    # Host 2 reads for host 3 what is divided among slices.
    assert max(read[2:]) < 10e6 < 15e6 < min(read[:2]), read
    assert "which 3 of 4 hosts have read for all." in job.logs()
