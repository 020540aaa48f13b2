"""Functions whose hosts run different programs, and functions that only look so. Hosts import this
module instead of the tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

SHARED = "shared"


class Slice:
    """The devices of all hosts, arrays on them, and whether this host is the odd one."""

    def __init__(self):
        import jax

        self.mesh = jax.make_mesh((jax.device_count(),), ("x",))
        self.n = jax.device_count()
        self.is_odd = jax.process_index() == jax.process_count() - 1

    def array(self, rows=None, dtype="float32", spec=("x",)):
        import jax
        import jax.numpy as jnp
        import numpy as np

        shape = (rows or self.n, self.n)
        sharding = jax.NamedSharding(self.mesh, jax.P(*spec))
        whole = np.ones(shape, jnp.dtype(dtype))
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])


def mean(x):
    import jax.numpy as jnp

    return jnp.mean(x)


def run(function, *args, **options):
    """Run a program over all devices, and wait for its value."""
    import jax

    return float(jax.jit(function, **options)(*args))


def shape(here):
    return run(mean, here.array(2 * here.n if here.is_odd else here.n))


def dtype(here):
    return run(mean, here.array(dtype="bfloat16" if here.is_odd else "float32"))


def branch(here):
    def train_step(x):
        if here.is_odd:
            return mean(x * 3)
        return mean(x - 3)

    return run(train_step, here.array())


def dict_order(here):
    import jax.numpy as jnp

    losses = {"sine": jnp.sin, "cosine": jnp.cos}
    if here.is_odd:
        losses = dict(reversed(losses.items()))

    def train_step(x):
        return sum(mean(loss(x)) for loss in losses.values())

    return run(train_step, here.array())


def static_seed(here):
    import jax

    def train_step(x, seed):
        return mean(x + jax.random.normal(jax.random.key(seed), x.shape))

    return run(train_step, here.array(), 17 if here.is_odd else 23, static_argnums=1)


def other_module(here):
    folder = Path.cwd() / "versions"
    folder.mkdir(exist_ok=True)
    text = f"def layer(x):\n    return x {'*' if here.is_odd else '-'} 2\n"
    (folder / "layers_of_model.py").write_text(text)
    sys.path.insert(0, str(folder))
    layers = importlib.import_module("layers_of_model")
    return run(lambda x: mean(layers.layer(x)), here.array())


def last_batch(here):
    import jax
    import numpy as np

    step = jax.jit(mean)
    sharding = jax.NamedSharding(here.mesh, jax.P("x"))
    rows = 4 * 7 if here.is_odd else 4 * 8
    data = np.ones((rows, 4), np.float32)
    for start in range(0, rows, 16):
        batch = jax.make_array_from_process_local_data(sharding, data[start : start + 16])
        float(step(batch))


def skipped_in_except(here):
    def check(x):
        return mean(x * x)

    x = here.array()
    try:
        if here.is_odd:
            raise OSError("the shard cannot be read")
        run(check, x)
    except OSError:
        pass
    return run(mean, x)


def sharding(here):
    return run(mean, here.array(spec=(None, "x") if here.is_odd else ("x",)))


def flags(here):
    options = {"xla_cpu_enable_fast_math": True} if here.is_odd else None
    return run(mean, here.array(), compiler_options=options)


def donation(here):
    import jax

    def train_step(x):
        return x - mean(x)

    step = jax.jit(train_step, donate_argnums=(0,) if here.is_odd else ())
    return jax.block_until_ready(step(here.array())).shape


def host_data(here):
    import jax

    is_large = here.is_odd

    def train_step(x):
        return jax.lax.cond(is_large, lambda x: mean(x * 5), lambda x: mean(x - 5), x)

    return run(train_step, here.array())


def stale_file(here):
    config = Path.cwd() / "width.txt"
    config.write_text("2" if here.is_odd else "4")
    width = int(config.read_text())
    return run(lambda x: mean(x[:, :width]), here.array())


def other_order(here):
    def evaluate(x):
        return mean(x * x)

    x, programs = here.array(), [mean, evaluate]
    return [run(program, x) for program in (programs[::-1] if here.is_odd else programs)]


def warm_up(here):
    import jax

    def warm(x):
        return mean(x + 1)

    x = here.array()
    if here.is_odd:
        jax.jit(warm)(x)
    return run(mean, x)


def differ(fault):
    """Run a function whose hosts differ."""
    globals()[fault](Slice())


# -- the same programs on all hosts


def each_on_its_own_devices(here):
    import jax
    import numpy as np

    rows = 3 + jax.process_index()
    local = jax.make_mesh((jax.local_device_count(),), ("x",), devices=jax.local_devices())
    data = np.ones((rows * jax.local_device_count(), 2), np.float32)
    jax.jit(mean)(jax.device_put(data, jax.NamedSharding(local, jax.P("x"))))
    return run(mean, here.array())


def leader_rounds_the_loss(here):
    import jax

    loss = jax.jit(mean, out_shardings=jax.NamedSharding(here.mesh, jax.P()))(here.array())
    if jax.process_index() == 0:
        print(float(loss * 100), loss + 1)
    return run(lambda x: mean(x * 2), here.array())


def leader_reads_the_cost(here):
    import jax

    x = here.array()
    if jax.process_index() == 0:
        jax.jit(lambda x: mean(x * 7)).lower(x).compile().cost_analysis()
    return run(mean, x)


def own_rows(here):
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    me = jax.process_index()
    multihost_utils.sync_global_devices("begin")
    multihost_utils.process_allgather(np.array([me]))
    multihost_utils.broadcast_one_to_all(np.array([me]))
    sharding = jax.NamedSharding(here.mesh, jax.P("x"))
    rows = np.full((8, 2), me, np.float32)
    return run(mean, jax.make_array_from_process_local_data(sharding, rows))


def own_numbers(here):
    import jax
    import jax.numpy as jnp
    import numpy as np

    me = jax.process_index()
    rows = np.full((jax.local_device_count(), 3), me, np.float32)
    jax.pmap(lambda x: jax.lax.pmean(x, "i"), axis_name="i")(rows)
    x = here.array()
    print("per second", jnp.sum(x) / (1.5 + me), jnp.mean(x) * me)

    def step(x):
        jax.debug.callback(lambda total: None, jnp.sum(x))
        return mean(x)

    whole = jax.device_put(np.ones((8, 8), np.float32), jax.NamedSharding(here.mesh, jax.P()))
    if me == 0:
        jax.jit(lambda x: jnp.tanh(x @ x).sum())(whole).block_until_ready()
    return run(step, x)


def threads_in_any_order(here):
    import threading

    import jax

    x = here.array()
    compiled = jax.jit(lambda x: mean(x * 4)).lower(x).compile()
    begun = threading.Thread(target=lambda: jax.jit(lambda y: y * 2)(x))
    begun.start()
    first = float(compiled(x))
    begun.join()
    return first + run(mean, x)


def dumps_apart(here):
    """Give a program an option that names a folder of this host."""
    import tempfile

    import jax

    options = {"xla_dump_to": tempfile.mkdtemp()}
    return float(jax.jit(mean, compiler_options=options)(here.array()))


def host_without_devices(here):
    """Call programs over the devices of the first two hosts, some of them also on the third."""
    import jax
    import numpy as np

    mesh = jax.make_mesh((here.n // 3 * 2,), ("x",), devices=jax.devices()[: here.n // 3 * 2])
    total = jax.jit(mean, out_shardings=jax.NamedSharding(mesh, jax.P()))
    ones = np.ones(mesh.size, np.float32)
    rows = jax.NamedSharding(mesh, jax.P("x"))
    part = jax.make_array_from_callback(
        ones.shape, rows, lambda index: ones[index], dtype=ones.dtype
    )
    if total(part).addressable_shards:
        float(jax.jit(lambda x, y: mean(x) + mean(y))(part, np.full(3, 1.0)))
    jax.jit(lambda x, y: mean(x) - mean(y))(part, np.full(3, min(jax.process_index(), 1) // 2))
    return run(mean, here.array())


def agree(program):
    """Run a function whose hosts run the same programs."""
    globals()[program](Slice())
    return "done"


def train_on_own_rows(*, are_same):
    """Give a step over all devices a batch of NumPy: the hosts' own rows, or the same on all."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    here = Slice()

    def train_step(weights, batch):
        return jnp.sum(weights) + jnp.mean(batch["ids"])

    me = jax.process_index()
    loss = jax.jit(train_step)(here.array(), {"ids": np.full((4, 8), 7 if are_same else me)})
    print("steps per second", loss / (1 + me))
    return float(loss)


def train_on_steps(*, steps, differs_at):
    """Call a step over all devices with a batch of NumPy, which differs in one call."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    here = Slice()
    step = jax.jit(lambda weights, batch: jnp.sum(weights) + jnp.mean(batch))
    weights = here.array()
    for number in range(1, steps + 1):
        rows = number + (number == differs_at and here.is_odd)
        loss = step(weights, np.full((4, 8), rows))
    return float(loss)


def train_in_thread(*, are_same):
    """Have a thread, in which no line of this file runs, call a step with a host's own rows."""
    from concurrent.futures import ThreadPoolExecutor

    import jax
    import jax.numpy as jnp
    import numpy as np

    weights = Slice().array()
    rows = np.full(8, 7 if are_same else jax.process_index())

    @jax.jit
    def train_step(weights, rows):
        return jnp.sum(weights) + jnp.mean(rows)

    with ThreadPoolExecutor() as pool:
        return float(pool.submit(train_step, weights, rows).result())


def train_from_own_seed(*, are_same):
    """Make replicated weights from a seed; JAX does not check that all hosts make the same."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    here = Slice()
    seed = 0 if are_same else jax.process_index()
    values = np.random.default_rng(seed).normal(size=(8, 8)).astype("float32")
    replicated = jax.NamedSharding(here.mesh, jax.P())
    weights = jax.make_array_from_callback((8, 8), replicated, lambda index: values[index])

    @jax.jit
    def train_step(weights, batch):
        return weights - 0.1 * jnp.mean(batch), jnp.mean(batch)

    for _ in range(30):
        weights, loss = train_step(weights, here.array())
    return float(loss)


def return_own_loss(*, are_same):
    """Declare the loss of a host's own shard to be that of all."""
    from functools import partial

    import jax
    import jax.numpy as jnp
    import numpy as np

    here = Slice()
    rows = jax.NamedSharding(here.mesh, jax.P("x"))
    values = np.arange(here.n, dtype="float32") ** (not are_same)
    batch = jax.make_array_from_callback((here.n,), rows, lambda index: values[index])

    @jax.jit
    @partial(jax.shard_map, mesh=here.mesh, in_specs=jax.P("x"), out_specs=jax.P(), check_vma=False)
    def train_step(batch):
        parts = jax.lax.psum(batch, "x")
        return {"loss": jnp.mean(batch), "sum": jnp.mean(parts)}

    for _ in range(3):
        loss = train_step(batch)["loss"]
    return float(loss)
