"""`kinetic checkpoint` lists, shows and removes checkpoints in folders and buckets, as Orbax and
`kinetic.Checkpointer` write them."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from cli_fakes import Capture, World
from doubles.gcs import serving

from kinetic._core import layout
from kinetic._store.lease import InFolder, Lease, Owner
from kinetic._store.local import LocalStore
from kinetic._store.open import open_store

LEAVES = [{"name": "['w']", "shape": [4, 2], "dtype": "bfloat16"}, {"name": "['n']", "value": 3}]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of a store in a bucket, which a double of Cloud Storage serves."""
    with serving("bucket") as double:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.uri)
        yield "gs://bucket/run"


@pytest.fixture(params=["folder", "bucket"])
def saved(request: Any, tmp_path: Path) -> Any:
    """Return an address with two complete steps and an incomplete one, and a store on it."""
    in_place = request.param == "bucket"
    where = request.getfixturevalue("bucket") if in_place else str(tmp_path / "run")
    store = open_store(where)
    for step in (4, 20):
        record = {"job_id": "job-0000000a", "hosts": 2, "leaves": LEAVES, "data": [1, 2]}
        about = {"commit_timestamp_nsecs": 1_700_000_000_000_000_000}
        put(store, f"{step}/kinetic/metadata", record)
        put(store, f"{step}/_CHECKPOINT_METADATA", about)
        put(store, f"{step}/metrics/metrics", {"loss": step / 2})
        put(store, f"{step}/state/d/content", {})
        put(store, f"{step}/commit_success.txt", {})
    put(store, "30/state/d/x" if in_place else "30.orbax-checkpoint-tmp-1/state/d/x", {})
    put(store, "notes/of the user", {})
    return where, store


def put(store: Any, key: str, document: Any) -> None:
    store.put(key, json.dumps(document).encode())


def list_steps(world: World, capsys: Capture, where: str) -> list[tuple[int, bool]]:
    assert world("checkpoint", "ls", where, "--json") == 0
    return [(each["step"], each["is_committed"]) for each in json.loads(capsys.readouterr().out)]


ALL = [(4, True), (20, True), (30, False)]


def test_checkpoints_are_listed(world: World, saved: Any, capsys: Capture) -> None:
    where, _ = saved
    assert list_steps(world, capsys, where) == ALL
    assert world("checkpoint", "ls", where) == 0
    header, first, _, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["STEP", "STATE", "AGE", "SIZE", "HOSTS", "JOB", "METRICS"]
    assert first.split()[:2] == ["4", "committed"]
    assert first.split()[-3:] == ["2", "job-0000000a", "loss=2"]
    assert last.split()[:2] == ["30", "unfinished"]


def test_checkpoints_are_listed_by_output_folder_and_by_job_id(
    world: World, tmp_path: Path, capsys: Capture
):
    put(LocalStore(tmp_path / "out"), "checkpoints/7/state/x", {})
    assert list_steps(world, capsys, str(tmp_path / "out")) == [(7, True)]
    ref = replace(world.job("job-0000000a"), output_dir=str(tmp_path / "out"))
    world.store.put(layout.JobKeys(ref.job_id).ref, json.dumps(ref.to_json()).encode())
    assert list_steps(world, capsys, "job-0000000a") == [(7, True)]
    world.job("job-0000000b")
    assert world("checkpoint", "ls", "job-0000000b") == 3
    assert "Give the path or URI" in capsys.readouterr().err


def test_the_newest_is_inspected(world: World, saved: Any, capsys: Capture) -> None:
    where, _ = saved
    assert world("checkpoint", "inspect", where) == 0
    out = capsys.readouterr().out
    assert f"Folder      {where}/20\n" in out
    assert "By          job-0000000a, 2 hosts\n" in out
    assert "Numbers     8\n" in out
    assert "Iterators   the positions of 2 hosts\n" in out
    assert "['w']  (4, 2)  bfloat16  16 B" in out
    assert world("checkpoint", "inspect", where, "--step", "4", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["step"], document["leaves"]) == (4, LEAVES)
    assert world("checkpoint", "inspect", where, "--step", "30") == 3
    assert "committed steps: 4, 20" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("committed_at", "marked", "listed_as"),
    [
        ([1, 1, 1], [2, 3], [True, True, True]),  # Step 1 is older than Orbax's marks.
        ([1, 1, 1], [1, 2], [True, True, False]),
        ([1, 1, None], [], [True, True, False]),  # Step 3 has no commit time.
        ([1, None, 1], [3], [True, False, True]),
        ([1, 1, 1], [], [True, True, True]),
    ],
)
def test_unfinished_steps_of_other_programs_are_listed_as_incomplete(
    world: World,
    tmp_path: Path,
    capsys: Capture,
    committed_at: list[int | None],
    marked: list[int],
    listed_as: list[bool],
) -> None:
    store = LocalStore(tmp_path / "run")
    for step, at in enumerate(committed_at, 1):
        put(store, f"{step}/default/_METADATA", {})
        about = {"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": at}
        put(store, f"{step}/_CHECKPOINT_METADATA", about)
        if step in marked:
            put(store, f"{step}/commit_success.txt", {})
    rows = list_steps(world, capsys, str(tmp_path / "run"))
    assert rows == [*zip((1, 2, 3), listed_as, strict=True)]


def test_a_file_is_no_folder_of_checkpoints(world: World, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "model.bin").write_text("")
    assert world("checkpoint", "ls", str(tmp_path / "model.bin")) == 1
    err = capsys.readouterr().err
    assert "model.bin cannot be read: Not a directory" in err
    assert "KINETIC_HOME" not in err


def test_a_file_that_may_not_be_read_is_told_without_advice_about_the_store(
    world: World, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = str(tmp_path / "run")
    put(LocalStore(tmp_path / "run"), "4/kinetic/metadata", {})

    def refuse(path: str) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kinetic._store.files.open_regular", refuse)
    assert world("checkpoint", "ls", where) == 1
    err = capsys.readouterr().err
    assert f"{where} cannot be read: Permission denied" in err
    assert "KINETIC_HOME" not in err


def test_what_another_program_has_saved(world: World, tmp_path: Path, capsys: Capture) -> None:
    put(LocalStore(tmp_path / "run"), "3/default/d/x", {})
    assert world("checkpoint", "inspect", str(tmp_path / "run")) == 0
    assert "by another program" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "remaining"),
    [
        (["--step", "4"], ALL[1:]),
        (["--unfinished"], ALL[:2]),
        (["--step", "4", "--step", "20"], ALL[2:]),
        (["--all"], []),
    ],
)
def test_steps_are_removed(
    world: World, saved: Any, options: list[str], remaining: Any, capsys: Capture
):
    where, store = saved
    assert world("checkpoint", "rm", where, "--yes", *options) == 0
    assert f"Removed {3 - len(remaining)} of 3 checkpoints" in capsys.readouterr().out
    assert list_steps(world, capsys, where) == remaining
    assert store.has("notes/of the user")


def answer_no(monkeypatch: Any) -> list[str]:
    """Answer no to all questions, as on a terminal; return the list that collects them."""
    questions: list[str] = []

    def decline(text: str, **_: object) -> None:
        questions.append(text)
        raise click.Abort

    monkeypatch.setattr("click.confirm", decline)
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
    return questions


@pytest.mark.parametrize(("numbers", "what"), [((4,), "step 4"), ((4, 20), "steps 4, 20")])
def test_rm_asks_before_it_removes_and_refuses_without_a_terminal(
    world: World, saved: Any, numbers: Any, what: str, monkeypatch: Any, capsys: Capture
):
    questions = answer_no(monkeypatch)
    steps = [word for number in numbers for word in ("--step", str(number))]
    assert world("checkpoint", "rm", saved[0], *steps) == 130
    assert questions[0].startswith(f"Remove {what} (")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert world("checkpoint", "rm", saved[0], *steps) == 2
    assert "Add --yes to confirm" in capsys.readouterr().err
    assert list_steps(world, capsys, saved[0]) == ALL


def test_rm_and_ls_of_a_missing_step_or_folder_fail(
    world: World, saved: Any, capsys: Capture
) -> None:
    where, _ = saved
    assert world("checkpoint", "rm", where, "--yes", "--step", "5") == 3
    assert world("checkpoint", "rm", where, "--yes") == 2
    assert world("checkpoint", "ls", f"{where}-not") == 3
    assert list_steps(world, capsys, where) == ALL


def test_a_folder_that_a_job_writes_is_left_alone(world: World, tmp_path: Path, capsys: Capture):
    where = tmp_path / "run"
    put(LocalStore(where), "4/kinetic/metadata", {})
    held = Lease(InFolder(where), str(where), Owner("job-0000000a", "t", 1, "m"))
    held.acquire()
    try:
        assert world("checkpoint", "rm", str(where), "--yes", "--all") == 1
        assert "being written by job-0000000a" in capsys.readouterr().err
        assert list_steps(world, capsys, str(where)) == [(4, True)]
        assert world("checkpoint", "rm", str(where), "--yes", "--all", "--force") == 0
    finally:
        held.release()
    assert not InFolder(where).is_held()


def test_the_formula_is_shown(world: World, capsys: Capture) -> None:
    assert world("checkpoint", "size", "--params", "70e9", "--hosts", "32") == 0
    out = capsys.readouterr().out
    assert "70,000,000,000 parameters x 12 bytes" in out
    assert "840 GB / 32 hosts of a slice" in out
    assert "= 26.25 GB\n" in out
    assert "52.5 GB x 1.15" in out
    assert out.endswith("60.375 GB per host: a ramdisk of at least 57579Mi.\n")


def test_size_takes_the_number_of_hosts_from_the_accelerator(world: World, capsys: Capture) -> None:
    words = ("checkpoint", "size", "--params", "1e9", "-a", "tpu-v6e-16", "--json")
    assert world(*words) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["hosts"], document["part_bytes"]) == (4, 3e9)
    assert world("checkpoint", "size", "--params", "1e9") == 2
    assert world("checkpoint", "size", "--params", "0", "--hosts", "1") == 2


@pytest.fixture(params=["folder", "bucket"])
def foreign(request: Any, tmp_path: Path) -> Any:
    """Return an address with checkpoints of Orbax's manager, not kinetic's, and a store on it."""
    in_place = request.param == "bucket"
    where = request.getfixturevalue("bucket") if in_place else str(tmp_path / "run")
    store = open_store(where)
    keys = [{"key": "params"}, {"key": "w"}]
    for step in (4, 20):
        put(store, f"{step}/items/_METADATA", {"tree_metadata": {"x": {"key_metadata": keys}}})
        put(store, f"{step}/items/manifest.ocdbt", {})
        put(store, f"{step}/_CHECKPOINT_METADATA", {"item_handlers": {"items": "a.b"}})
        put(store, f"{step}/commit_success.txt", {})
    return where, store


def test_checkpoints_of_others_are_shown_and_left_as_they_are(
    world: World, foreign: Any, capsys: Capture
) -> None:
    where, store = foreign
    before = list(store.list(""))
    assert list_steps(world, capsys, where) == [(4, True), (20, True)]
    assert world("checkpoint", "ls", where) == 0
    assert "were written by Orbax" in capsys.readouterr().err
    assert world("checkpoint", "inspect", where) == 0
    out = capsys.readouterr().out
    assert "Program     Orbax\nItems       items\n" in out
    assert out.endswith("LEAF\nparams.w\n")
    assert world("checkpoint", "inspect", where, "--json") == 0
    assert json.loads(capsys.readouterr().out)["program"] == "Orbax"
    assert world("checkpoint", "size", where, "--hosts", "2") == 0
    assert f"{where}/20" in capsys.readouterr().out
    assert list(store.list("")) == before
    assert world("checkpoint", "rm", where, "--step", "4", "--yes") == 0
    assert list(store.list("")) == [key for key in before if not key.startswith("4/")]


def test_rm_names_the_program_that_wrote_foreign_checkpoints(
    world: World, foreign: Any, monkeypatch: Any, capsys: Capture
) -> None:
    questions = answer_no(monkeypatch)
    assert world("checkpoint", "rm", foreign[0], "--all") == 130
    assert questions[0].endswith(f"from {foreign[0]}, written by Orbax?")


def test_folders_of_an_unknown_program_are_never_removed(
    world: World, foreign: Any, capsys: Capture
) -> None:
    where, store = foreign
    for key in list(store.list("")):
        store.delete(key)
    put(store, "5/weights.npz", {})
    for ask in (["--all"], ["--step", "5"], ["--unfinished"]):
        assert world("checkpoint", "rm", where, *ask, "--yes", "--force") == 2
        assert "no checkpoints of kinetic or Orbax" in capsys.readouterr().err
    assert list(store.list("")) == ["5/weights.npz"]


def test_numbered_folders_beside_checkpoints_are_the_users(
    world: World, saved: Any, capsys: Capture
) -> None:
    """Numbered folders of logs, above or among the steps, are neither listed nor removed."""
    where, store = saved
    put(store, "1/log.txt", {})
    assert world("checkpoint", "rm", where, "--all", "--yes") == 0
    assert "Checkpoints skipped" in capsys.readouterr().err or where.startswith("gs://")
    above = open_store(where.rpartition("/")[0])
    put(above, "0/log.txt", {})
    put(above, "1/log.txt", {})
    for step in (4, 20):
        put(above, f"checkpoints/{step}/kinetic/metadata", {"job_id": "job-0000000a", "hosts": 2})
        put(above, f"checkpoints/{step}/commit_success.txt", {})
    put(above, "checkpoints/kinetic-owner.json", {})
    assert list_steps(world, capsys, above.uri) == [(4, True), (20, True)]
    assert world("checkpoint", "rm", above.uri, "--all", "--yes") == 0
    keys = [key for key in above.list("") if "kinetic-owner" not in key]
    assert {"0/log.txt", "1/log.txt"} <= {*keys}
    assert not any(key.startswith("checkpoints/") for key in keys)


@pytest.mark.parametrize("foreign", ["folder"], indirect=True)
def test_one_checkpoint_is_no_folder_of_steps(world: World, foreign: Any, capsys: Capture) -> None:
    where, store = foreign
    before = list(store.list(""))
    assert world("checkpoint", "ls", f"{where}/20/items") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["-", "committed"]
    assert world("checkpoint", "inspect", f"{where}/20/items") == 0
    assert "Step        without a number" in capsys.readouterr().out
    assert world("checkpoint", "rm", f"{where}/20/items", "--all", "--yes") == 2
    assert "is a single checkpoint" in capsys.readouterr().err
    assert list(store.list("")) == before


def test_formats_that_are_not_ours_are_named(world: World, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert world("checkpoint", "ls", str(tmp_path)) == 0
    assert "no checkpoints of kinetic or Orbax" in (err := capsys.readouterr().err)
    assert err.endswith(", only of safetensors.\n")
    assert world("checkpoint", "ls", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_size_is_of_a_model_or_of_a_checkpoint(world: World, capsys: Capture) -> None:
    assert world("checkpoint", "size", "--hosts", "1") == 2
    assert world("checkpoint", "size", "x", "--params", "1", "--hosts", "1") == 2
    assert "either --params or the URI" in capsys.readouterr().err
