"""A sweep: one function over many inputs, with one job for each.

    python examples/sweep.py

Results are in the order of the inputs.
"""

import kinetic


@kinetic.run(accelerator="cpu")
def train(rate, steps):
    """Minimise (x - 3)^2 by gradient descent, which diverges if the rate is too large."""
    x = 0.0
    for _ in range(steps):
        x -= rate * 2 * (x - 3)
    if abs(x) > 1e6:
        raise OverflowError(f"rate {rate} is too large")
    return {"rate": rate, "loss": (x - 3) ** 2}


def main():
    inputs = [{"rate": rate, "steps": 40} for rate in (0.01, 0.1, 0.5, 2.0)]
    batch = train.run_async_map(inputs, max_concurrent=2, name="rates")
    print(f"{batch.name} of {len(inputs)} rates")

    for job in batch.as_completed():
        print(f"input {job.group_index} {job.status().lower()}")

    values = batch.results(return_exceptions=True)
    for point, value in zip(inputs, values, strict=True):
        text = value if isinstance(value, Exception) else f"loss {value['loss']:.6f}"
        print(f"rate {point['rate']}: {text}")

    best = min((v for v in values if not isinstance(v, Exception)), key=lambda v: v["loss"])
    print(f"best rate: {best['rate']}")


if __name__ == "__main__":
    main()
