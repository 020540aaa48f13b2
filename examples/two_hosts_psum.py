"""A collective over two hosts.

    python examples/two_hosts_psum.py

`tpu-v6e-8` is a 2x4 slice: 2 hosts with 4 chips each. Every host runs the function. kinetic has
already joined the hosts with `jax.distributed`, so `jax.devices()` has all 8 devices and a `psum`
sums over both hosts. The call returns the leader's value.
"""

import kinetic


@kinetic.run(accelerator="tpu-v6e-8")
def sum_over_the_slice():
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = jax.device_count()
    print(
        f"host {jax.process_index()} of {jax.process_count()}: {jax.local_device_count()} of "
        f"{devices} devices",
        flush=True,
    )

    # One number per device, 0 to 7. Each host creates only the part on its own devices.
    mesh = jax.make_mesh((devices,), ("chips",))
    numbers = np.arange(devices, dtype=np.float32)
    spread = jax.make_array_from_callback(
        numbers.shape, NamedSharding(mesh, P("chips")), lambda part: numbers[part]
    )

    add_up = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "chips"), mesh=mesh, in_specs=P("chips"), out_specs=P()
        )
    )
    total = add_up(spread)
    return {
        "hosts": jax.process_count(),
        "devices": devices,
        "total": float(total.addressable_data(0)[0]),
    }


def main():
    answer = sum_over_the_slice()
    print(f"psum over {answer['devices']} devices on {answer['hosts']} hosts: {answer['total']:g}")


if __name__ == "__main__":
    main()
