"""The digests of the collectives of compiled programs."""

from __future__ import annotations

from kinetic._host.worker.fingerprints import digest_collectives

ENTRY = """HloModule jit_loss

%add (a: f32[], b: f32[]) -> f32[] {
}
ENTRY %main.0_spmd (param: f32[4,64]) -> f32[] {
  ROOT %all-reduce = f32[] all-reduce(%sum), channel_id=1, replica_groups=mesh['x'=4,'y'=1] {'x'}, \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(loss)/sum"}
}
"""
GROUPS = "mesh['x'=4,'y'=1] {'x'}"
DEVICES = range(4)


def test_equal_groups_of_devices_have_one_digest_however_they_are_written():
    """Arrays that are split along different dimensions have other names for the same groups."""
    digest = digest_collectives(ENTRY, DEVICES)
    for groups in ("mesh['x'=1,'y'=4] {'y'}", "{{0,1,2,3}}", "[1,4]<=[4]"):
        text = ENTRY.replace(GROUPS, groups).replace("jit(loss)/sum", "jit(loss)/mean")
        assert digest_collectives(text, DEVICES) == digest


def test_other_collectives_groups_and_devices_have_another_digest():
    """Two axes of one mesh, a reduction of another size, pairs, and another order of devices."""
    square = "mesh['x'=2,'y'=2] {'x'}"
    pairs = [
        ENTRY.replace("replica_groups", "source_target_pairs").replace(GROUPS, f"{{{{0,1}},{end}}}")
        for end in ("{1,2}", "{1,3}")
    ]
    texts = [
        ENTRY,
        ENTRY.replace("= f32[] all", "= f32[8] all"),
        *(ENTRY.replace(GROUPS, square.replace("{'x'}", f"{{'{axis}'}}")) for axis in "xy"),
        *(text.replace("all-reduce(", "collective-permute(") for text in pairs),
    ]
    digests = [digest_collectives(text, DEVICES) for text in texts]
    digests.append(digest_collectives(ENTRY, (1, 0, 2, 3)))
    assert len({*digests}) == len(digests)


def test_collectives_of_loops_are_unknown():
    """The same text may run another number of times."""
    body = ENTRY.replace("ENTRY %main", "%body")
    loop = "ENTRY %main (p: f32[]) -> f32[] {\n  ROOT %w = f32[] while(%p), body=%body.0_spmd\n}\n"
    assert not digest_collectives(f"{body}{loop}", DEVICES)
