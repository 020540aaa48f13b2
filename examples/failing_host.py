"""One of four hosts fails: the caller gets its exception, with type and traceback.

    python examples/failing_host.py

Host 2 raises an exception while the other three hosts wait for it in a collective. kinetic ends all
hosts at once, and the caller gets the original error instead of its consequences on other hosts.
"""

import kinetic


class BadShard(ValueError):
    """An exception class of the caller."""


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
