"""Data of the Hugging Face hub on a node whose pods share a folder: fetched once, kept in use.

In: programs that prepare the data of a job as the agent of a pod does, a hub on this machine. Out:
where it lies, and what was asked of the hub.
"""

from __future__ import annotations

import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("google.cloud.storage")

import test_hub_data
import test_node_cache
from test_hub_data import FILES, found
from test_node_cache import pod, swept

endpoint = test_hub_data.endpoint
double, cache = test_node_cache.double, test_node_cache.cache
SOURCE = "hf://owner/images"


def fetched(endpoint) -> list[str]:
    return [line for line in endpoint.asked if "/resolve/" in line]


@test_hub_data.without_datasets
def test_the_second_job_of_a_node_fetches_nothing_of_the_hub(tmp_path, double, cache, endpoint):
    with pod(tmp_path, 1, cache, SOURCE) as first:
        assert first.is_relative_to(cache)
        assert found(first) == FILES
        assert not swept()
    assert fetched(endpoint)
    endpoint.asked.clear()
    with pod(tmp_path, 2, cache, SOURCE) as second:
        assert second == first
        assert found(second) == FILES
    assert not fetched(endpoint)
    assert not double.calls(), "what the hub has does not go through the bucket"
    assert swept()
    assert not list(cache.glob("data-*"))
