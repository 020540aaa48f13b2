"""Functions that tests run on hosts. Hosts import this module instead of the tests: importing
pytest would take longer than the job."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import kinetic


def psum_of_indices():
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("d",))
    x = jax.make_array_from_callback(
        (n,), NamedSharding(mesh, P("d")), lambda i: np.arange(n, dtype=np.float32)[i]
    )
    total = jax.jit(
        jax.shard_map(lambda a: jax.lax.psum(a, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    )(x)
    return float(np.asarray(total.addressable_data(0))[0])


def host_index():
    import jax

    return jax.process_index()


def end_with(how):
    if how == "os._exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(4)
    if how == "sys.exit text":
        sys.exit("a word of goodbye")
    if how == "segfault":
        import ctypes

        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "unpicklable":
        return (i for i in range(3))
    return sys.exit(0)


def wait_at_first(marker):
    """Create a mark and wait for ever in the first attempt; return in later ones."""
    mark = Path(f"{marker}-{os.environ['KINETIC_HOST_INDEX']}")
    if mark.exists():
        return f"attempt {os.environ['KINETIC_ATTEMPT']}"
    mark.touch()
    while True:
        time.sleep(0.05)


def return_when_told(marker):
    Path(marker).touch()
    while Path(marker).exists():
        time.sleep(0.01)
    return "value"


def second_time(marker):
    """Raise in the first attempt, wait to be killed in the second, return in the third."""
    attempt = int(os.environ["KINETIC_ATTEMPT"])
    if attempt == 1:
        raise ValueError("at first")
    if attempt == 2:
        Path(marker).touch()
        time.sleep(1000)
    return attempt


def clean_up_slowly(marker):
    print("running", flush=True)
    try:
        time.sleep(1000)
    finally:
        Path(marker).touch()
        time.sleep(1000)


INIT = "jax-init-info.txt"
"""The file that GKE's multi-tier checkpointing writes into a host's ramdisk."""


def list_marks(name="mark"):
    """Create a file in this host's local folder. Return the folder's path, and its file names
    before and after all hosts have done so."""
    import jax
    from jax.experimental import multihost_utils

    folder = Path(os.environ["KINETIC_LOCAL_DIR"])
    before = sorted(path.name for path in folder.iterdir())
    (folder / f"{name}-{jax.process_index()}").touch()
    multihost_utils.sync_global_devices("marked")
    return str(folder), before, sorted(path.name for path in folder.iterdir())


def list_marks_twice():
    """Leave and list marks as `list_marks` does, with a new name in each attempt; die after the
    first."""
    marks = list_marks(os.environ["KINETIC_ATTEMPT"])
    if os.environ["KINETIC_ATTEMPT"] == "1":
        os._exit(7)
    return marks


def join_as_told():
    """Join JAX with the rank and address in GKE's init file, as MaxText does. Host 0 then dies in
    the first attempt."""
    import jax

    file = Path(os.environ["KINETIC_LOCAL_DIR"], INIT)
    rank, address, rest = file.read_text().split("\n")
    jax.distributed.initialize(coordinator_address=address, process_id=int(rank))
    if os.environ["KINETIC_ATTEMPT"] == "1":
        if rank == "0":
            os._exit(7)
        time.sleep(100)  # The death of host 0 ends this host, too.
    mine = Path(file).parent.joinpath("mine")
    mine.write_text(rank)
    return int(rank), jax.process_index(), len(jax.devices()), rest, mine.read_text()


def join_when_alone():
    """In attempt 1, lose slice 0. Then join JAX with the rank and address in GKE's init file;
    return the rank and the number of processes."""
    import jax

    if kinetic.attempt() == 1:
        jax.devices()
        if kinetic.slice_index() == 0:
            os._exit(7)
        time.sleep(100)
    rank, address, _ = Path(os.environ["KINETIC_LOCAL_DIR"], INIT).read_text().split("\n")
    jax.distributed.initialize(coordinator_address=address, process_id=int(rank))
    return rank, jax.process_count()


def find_folder():
    return Path(os.environ["KINETIC_LOCAL_DIR"]).is_dir()


def one_waits(folder):
    import jax
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("all are there")
    if jax.process_index() == 1:
        while not Path(folder, "go on").exists():
            time.sleep(0.5)
    multihost_utils.sync_global_devices("all go on")
    return "done"


class Odd(Exception):
    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


def flood_then_wait(marker):
    block = (b"y" * 99 + b"\n") * 10_000
    for _ in range(200_000_000 // len(block)):
        os.write(1, block)
    os.write(1, b"no line end " * 100_000)
    Path(marker).touch()
    time.sleep(1000)


class ExitsWhenPickled(Exception):
    def __reduce__(self):
        sys.exit(9)


def fails_twice():
    """Raise on every host in attempts 1 and 2, return in the third."""
    attempt = int(os.environ["KINETIC_ATTEMPT"])
    print("this is attempt", attempt)
    if attempt < 3:
        raise LookupError(f"not in attempt {attempt}")
    return attempt


def prints_lines():
    attempt = os.environ["KINETIC_ATTEMPT"]
    for number in range(3):
        print(f"{attempt}:{number}", flush=True)
    if attempt != "3":
        raise LookupError(attempt)


def sleep_long(marker):
    print("running", flush=True)
    Path(f"{marker}-{os.environ['KINETIC_HOST_INDEX']}").touch()
    time.sleep(1000)


def return_when_let_go(marker):
    Path(f"{marker}-{os.environ['KINETIC_HOST_INDEX']}").touch()
    while not Path(f"{marker}-let-go").exists():
        time.sleep(0.01)
    return "value"


def step_now_and_then(marker):
    """Meet in a collective every 0.8 s, so that the host is mostly silent, but never for long."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    multihost_utils.process_allgather(np.ones(1))
    Path(f"{marker}-{jax.process_index()}").touch()
    flags = np.zeros(1)
    while not flags.all():
        time.sleep(0.8)
        flags = multihost_utils.process_allgather(np.ones(1) * Path(f"{marker}-let-go").exists())
    return "value"


def pause():
    signal.pause()


def sleep_in_native_code():
    ctypes.CDLL(None).sleep(1000)


def sleep_in_native_code_that_holds_the_lock():
    ctypes.PyDLL(None).sleep(1000)


def poll_in_native_code():
    ctypes.CDLL(None).poll(None, 0, -1)


def wait_for_a_signal():
    signal.sigwait({signal.SIGUSR1})


THREADS = 50


def wait_in_many_threads():
    waits = threading.Event()
    for _ in range(THREADS):
        threading.Thread(target=waits.wait, daemon=True).start()
    wait_beside_them(waits)


def wait_beside_them(waits):
    """Wait for an event. The function's name in a stack shows that a thread has really begun: one
    that is being started has no frame yet."""
    waits.wait()


def see_slices():
    """Return (slice, slices, process) of all hosts, (process, slice) of all devices, whether JAX's
    own hybrid mesh has the same devices, and a sum over all slices."""
    import jax
    import numpy as np
    from jax.experimental import mesh_utils, multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    position = kinetic.slice_index(), kinetic.num_slices(), jax.process_index()
    devices = [(d.process_index, d.slice_index) for d in jax.devices()]
    mesh = kinetic.make_mesh(dcn={"data": 2}, ici={"fsdp": 4, "tensor": -1})
    hybrid = mesh_utils.create_hybrid_device_mesh((1, 4, 2), (2, 1, 1))
    spread = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "tensor")))
    numbers = jax.make_array_from_callback((16,), spread, lambda part: np.arange(16.0)[part])
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(numbers)
    everywhere = multihost_utils.process_allgather(np.array(position)).reshape(-1, 3).tolist()
    return everywhere, devices, bool((hybrid == mesh.devices).all()), float(total)


def see_axes():
    """Return the slice indices of devices along the axes of several meshes."""
    import jax
    import numpy as np

    both = kinetic.make_mesh({"data": 2}, {"data": 4, "tensor": -1})
    slices = [sorted({d.slice_index for d in row}) for row in both.devices]
    some = kinetic.make_mesh({"replica": -1}, {"x": 2}, devices=jax.devices()[6:10])
    return (
        dict(both.shape),
        slices,
        dict(kinetic.make_mesh().shape),
        np.vectorize(lambda d: d.id)(some.devices).tolist(),
    )


def quick():
    return "value"


def slow():
    print("running", flush=True)
    time.sleep(1000)


def leave_pools():
    from concurrent.futures import ThreadPoolExecutor

    global pools
    pools = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("idle", "busy")]
    pools[0].submit(print, "done").result()
    begun = threading.Event()
    pools[1].submit(lambda: (begun.set(), time.sleep(1000)))
    begun.wait()


def leave_a_pool(work):
    from concurrent.futures import ProcessPoolExecutor

    global pool
    pool = ProcessPoolExecutor(1)
    pool.submit(print, "done").result()
    if work:
        pool.submit(time.sleep, 1000)


VALUE_BYTES = 300_000


def make_folders_anew(marker):
    """Create `__pycache__` in the source tree after the home was removed, as a late import would:
    the removed folders must not come back."""
    tree = os.getcwd()
    Path(marker).touch()
    while (Path(marker).parent / "home").exists():
        time.sleep(0.001)
    time.sleep(0.1)
    os.makedirs(f"{tree}/__pycache__", exist_ok=True)
    time.sleep(1000)


def print_until_told(marker):
    Path(marker).touch()
    while Path(marker).exists():
        print("still here")
        time.sleep(0.01)
    return b"x" * VALUE_BYTES
