"""One of four hosts fails: the caller gets that host's exception, with its type and traceback.

    python examples/failing_host.py

Host 2 raises before a collective that the other three hosts wait in. Left alone, they would wait
forever. Here the gang ends at once, and the error is the cause, not its echo on the other hosts.
"""

import kinetic


class BadShard(ValueError):
    """What this example raises: an exception class of the caller's."""


def read_shard(host):
    if host == 2:
        raise BadShard("shard 2 has 0 rows")
    return float(host)


@kinetic.run(accelerator="tpu-v6e-16")
def load_and_add():
    import jax
    from jax.experimental import multihost_utils

    value = read_shard(jax.process_index())
    print(f"host {jax.process_index()} waits for the others", flush=True)
    return float(multihost_utils.process_allgather(jax.numpy.array(value)).sum())


def main():
    try:
        load_and_add()
    except BadShard as error:
        print(f"caught {type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", []):
            print(note)
    else:
        raise SystemExit("host 2 should have failed")


if __name__ == "__main__":
    main()
