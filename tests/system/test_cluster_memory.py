"""Checkpoints in the memory of pods: the next attempt finds the files and restores from them."""

from __future__ import annotations

import pytest
from on_pods import look_again, train_and_die

import kinetic

pytestmark = pytest.mark.double
TWO_HOSTS = "tpu-v6e-8"


def test_each_pod_has_a_folder_of_its_own_that_stays_between_attempts(on_cluster):
    handle = kinetic.run(TWO_HOSTS, retries=1, all_hosts=True)(look_again).run_async()
    marks = handle.results(timeout=300)
    init = "jax-init-info.txt"
    assert marks == [(["1-0", init], "0"), (["1-1", init], "1")]
    handle.cleanup()
    on_cluster.wait_for(lambda: not on_cluster.left_over())


def test_a_training_goes_on_from_the_memory_of_its_pods(on_cluster, home):
    pytest.importorskip("orbax.checkpoint")
    run = kinetic.run(TWO_HOSTS, retries=1, output_dir=home.parent / "run")
    assert run(train_and_die)(6) == ("local", 6.0)
