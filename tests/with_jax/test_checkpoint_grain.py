"""Examples that Grain repeats or skips after the number of hosts has changed: as many as
docs/how-to/elastic-data.md states. The tests need `pip install grain`."""

from __future__ import annotations

import collections

import pytest

from kinetic._in_job.checkpoint import positions
from kinetic.errors import CheckpointMismatch

grain = pytest.importorskip("grain")

EXAMPLES, BATCH = 96, 24


def block(data, host, hosts):
    return data[host * EXAMPLES // hosts : (host + 1) * EXAMPLES // hosts]


def elastic(data, host, hosts):
    shard = grain.sharding.ShardOptions(host, hosts)
    return grain.experimental.ElasticIterator(data.shuffle(seed=0), BATCH, shard)


WAYS = {
    "shuffle, slice": lambda data, host, hosts: data.shuffle(seed=0)[host::hosts],
    "slice, shuffle": lambda data, host, hosts: data[host::hosts].shuffle(seed=0),
    "block, shuffle": lambda *shared: block(*shared).shuffle(seed=0),
    "shuffle, block": lambda data, *shared: block(data.shuffle(seed=0), *shared),
}


def begin(way, host, hosts):
    """Return one host's iterator over its share of the examples."""
    data = grain.MapDataset.source(range(EXAMPLES))
    if way == "elastic":
        return elastic(data, host, hosts)
    if way == "batch, slice":
        return iter(data.shuffle(seed=0).batch(6)[host::hosts].to_iter_dataset())
    name, _, size = way.partition("/")
    size = int(size or BATCH // hosts)
    return iter(WAYS[name](data, host, hosts).batch(size).to_iter_dataset())


@pytest.mark.parametrize(
    ("way", "twice", "never"),
    [
        ("elastic", 0, 0),
        ("shuffle, slice", 0, 0),
        ("shuffle, slice/6", 24, 0),
        ("batch, slice", 24, 0),
        ("slice, shuffle", 32, 32),
        ("block, shuffle", 22, 22),
        ("shuffle, block", 24, 24),
    ],
)
def test_which_examples_are_read_on_two_hosts_after_four(way, twice, never):
    counts, saved = collections.Counter(), []
    for host in range(4):
        batches = begin(way, host, 4)
        counts.update(int(n) for _ in range(2) for n in next(batches))
        saved.append(positions.take_position(batches))
    for host in range(2):
        batches = begin(way, host, 2)
        positions.put_back(batches, saved, host, 2)
        assert positions.is_elastic(batches) is (way == "elastic")
        counts.update(int(n) for batch in batches for n in batch)
    assert sum(count > 1 for count in counts.values()) == twice
    assert EXAMPLES - len(counts) == never


def test_a_loader_of_shards_is_refused():
    def loader(host):
        shard = grain.sharding.ShardOptions(host, 2)
        sampler = grain.samplers.IndexSampler(EXAMPLES, shard, shuffle=True, seed=0, num_epochs=1)
        return iter(grain.DataLoader(data_source=range(EXAMPLES), sampler=sampler))

    saved = []
    for host in range(2):
        batches = loader(host)
        next(batches)
        saved.append(positions.take_position(batches))
    with pytest.raises(CheckpointMismatch, match="which differ"):
        positions.put_back(loader(0), saved, 0, 1)
