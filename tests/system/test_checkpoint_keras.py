"""`kinetic.keras.Checkpointer`: a killed `model.fit` continues from its checkpoint, with losses
that are equal to the last bit."""

from __future__ import annotations

import pytest
from on_saving_hosts import fits

import kinetic

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_epochs_go_on_in_another_job(tmp_path):
    train = kinetic.run("cpu")(fits)
    run = {"folder": str(tmp_path / "run"), "best": "loss"}
    two = {"epochs": 2} | run
    four = {"epochs": 4} | run
    begun, (epochs, whole) = train(two, {"epochs": 4, "folder": str(tmp_path / "whole")})
    assert epochs == [0, 1, 2, 3]
    assert begun == ([0, 1], whole[:2])
    assert train(four, four) == [([2, 3], whole[2:]), ([], [])]


@pytest.mark.long
def test_a_host_is_killed_in_the_third_epoch(tmp_path):
    train = kinetic.run("cpu:2", slices=2, retries=1)(fits)
    # Each epoch has 4 batches, so the host dies in the first batch of the third epoch.
    dies = {"folder": str(tmp_path / "run"), "die_in": 9, "local_every": None}
    (epochs, losses), (_, whole) = train(
        {"epochs": 4} | dies, {"epochs": 4, "folder": str(tmp_path / "whole")}
    )
    assert len(whole) == 4
    assert epochs[-1] == 3
    assert len(epochs) in (2, 3), "the end of the second epoch may not have been committed"
    assert losses == whole[epochs[0] :]
