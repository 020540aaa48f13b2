"""A job whose image cannot be pulled: its error says why, and nothing is left in the cluster."""

from __future__ import annotations

import pytest

import kinetic
from kinetic.errors import JobFailed, SetupFailed

pytestmark = pytest.mark.double


@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-16"])
def test_an_image_that_cannot_be_pulled_fails_the_job(on_cluster, accelerator):
    image = "example.com/does-not-exist:1"
    with pytest.raises(
        SetupFailed, match=rf"The image {image} cannot be pulled: .*container_image="
    ):
        kinetic.run(accelerator=accelerator, container_image=image)(abs)(-1)
    on_cluster.wait_for(lambda: not on_cluster.left_over())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "Example/Trainer"}, r"'Example/Trainer' is not a valid image name: .*format"),
        ({"imagePullPolicy": "Never"}, r"does not have the image .* and may not pull it: .*Never"),
    ],
)
def test_an_image_that_the_clusters_own_rules_have_spoilt(on_cluster, change, message):
    def admit(resource, obj):
        if resource.kind == "Job":
            obj["spec"]["template"]["spec"]["containers"][0] |= change

    on_cluster.admit_with(admit)
    with pytest.raises(JobFailed, match=message):
        kinetic.run("cpu")(abs)(-1)
    on_cluster.wait_for(lambda: not on_cluster.left_over())
