"""The shared Ray cluster that the tests start."""

from __future__ import annotations

import json
import urllib.request


def test_it_is_a_cluster_with_a_slice(common_ray):
    request = urllib.request.Request(
        f"{common_ray.address}/api/version",
        headers={"authorization": f"Bearer {common_ray.token}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["ray_version"]
    assert list(common_ray.nodes().values()) == [True] * 4


def test_a_killed_node_is_gone_until_it_is_mended(ray_cluster):
    ray_cluster.kill_node(2)
    assert ray_cluster.nodes() == {1: True, 2: False, 3: True, 4: True}
    ray_cluster.mend()
    assert all(ray_cluster.nodes().values())
