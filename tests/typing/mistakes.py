"""Mistakes that a type checker must find: the lines that end in an error code. Checked by
test_typing, never run."""

from __future__ import annotations

import kinetic


@kinetic.run(accelerator="cpu")
def train(steps: int) -> str:
    return "x" * steps


class Trainer:
    @kinetic.run("cpu")
    def fit(self, steps: int) -> float:
        return float(steps)


train("1")  # expect: arg-type
train()  # expect: call-arg
train(1, 2)  # expect: call-arg
train(step=1)  # expect: call-arg
train.run_async("1")  # expect: arg-type
train.local("1")  # expect: arg-type
number: int = train(1)  # expect: assignment
Trainer().fit("1")  # expect: arg-type
Trainer().fit()  # expect: call-arg
kinetic.run(accelerator=1)  # expect: arg-type
kinetic.run("cpu", env={"A": 1})  # expect: dict-item
kinetic.run("tpu-v6e-16", controller="one")  # expect: arg-type
kinetic.run("cpu", timeouts=1)  # expect: call-arg
train.with_options(timeouts=1)  # expect: call-arg
train.with_options(retries="1")  # expect: arg-type
train.with_options(timeout="1h")("1")  # expect: arg-type
kinetic.submit()  # expect: attr-defined
kinetic.attach("job-1").statuss()  # expect: attr-defined
