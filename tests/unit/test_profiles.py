"""Profiles are in one file. Whoever writes, damages or replaces it, a read returns all profiles or
an error that says it is damaged."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kinetic
from kinetic._config import profiles, settings
from kinetic._config.profiles import Profiles
from kinetic.cli.commands.profile import check_readers
from kinetic.errors import CorruptRecord, PreflightError, StoreError, StoreFull, UsageError

DEV = {"project": "my-dev", "zone": "us-central2-b", "cluster": "dev"}
BOTH = (
    Profiles()
    .with_profile("dev", DEV)
    .with_profile("ops", {"cluster": "ops", "namespace": "alice"})
)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True)
words = st.text(
    st.characters(min_codepoint=33, exclude_categories=["C", "Z"]), min_size=1, max_size=12
)
books = st.dictionaries(names, st.dictionaries(st.sampled_from(profiles.FIELDS), words), max_size=4)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "conf" / "kinetic" / "profiles.json"


# -- adding, choosing and removing profiles --------------------------------------------------------


def test_the_first_profile_is_in_use_and_a_removed_one_is_not() -> None:
    assert BOTH.current == "dev"
    assert BOTH.with_current("ops").current == "ops"
    assert BOTH.with_current(None).current is None
    assert BOTH.with_current(None).with_profile("third", DEV).current is None
    assert (BOTH.without("dev").current, list(BOTH.without("dev").by_name)) == (None, ["ops"])
    assert BOTH.without("ops").current == "dev"
    assert BOTH.with_current("ops").with_profile("ops", DEV, force=True) == Profiles(
        {"dev": DEV, "ops": DEV}, "ops"
    )


@pytest.mark.parametrize("name", ["", " ", "-x", ".x", "a b", "a/b", "ä", "a\n", "x" * 65])
def test_an_invalid_name_of_a_profile_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="letters, digits"):
        Profiles().with_profile(name, DEV)


@pytest.mark.parametrize(
    "values",
    [
        {"zoen": "z"},
        {"zone": ""},
        {"zone": "a b"},
        {"zone": "a\n"},
        {"zone": "\x1b[0m"},
        {"zone": 3},
    ],
)
def test_invalid_settings_of_a_profile_are_refused(values: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="dev"):
        Profiles().with_profile("dev", values)


def test_an_unknown_profile_is_refused_with_a_similar_name() -> None:
    with pytest.raises(UsageError, match="already"):
        BOTH.with_profile("dev", DEV)
    for act in (BOTH.get, BOTH.with_current, BOTH.without):
        with pytest.raises(UsageError, match="Did you mean 'dev'"):
            act("dve")
    with pytest.raises(UsageError, match="dev, ops"):
        BOTH.get("zzz")
    with pytest.raises(UsageError, match="kinetic profile create zzz"):
        Profiles().get("zzz")


# -- the file of profiles --------------------------------------------------------------------------


@given(books, st.data())
def test_what_is_written_is_read(book: dict[str, dict[str, str]], data: st.DataObject) -> None:
    current = data.draw(st.sampled_from([None, *book]))
    assert profiles.parse(profiles.render(Profiles(book, current))) == Profiles(book, current)


def test_a_part_of_a_file_and_two_in_one_are_found_and_nothing_else_is_raised() -> None:
    whole = profiles.render(BOTH).rstrip()
    for at in range(len(whole)):
        for broken in (whole[:at], whole + whole[: at + 1]):
            with pytest.raises(CorruptRecord):
                profiles.parse(broken)
        for flip in (0x01, 0x04, 0x07, 0x20, 0x80, 0xFF):
            with contextlib.suppress(CorruptRecord):
                profiles.parse(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])


@given(st.binary(max_size=60))
def test_garbage_is_said_to_be_damaged(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        profiles.parse(b"\0" + data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "null",
        '{"profiles": []}',
        '{"profiles": {"a": 1}}',
        '{"current": "x"}',
        '{"current": []}',
        '{"a": 1}',
        '{"profiles": {"a": {"zoen": "z"}}}',
        '{"profiles": {"a b": {}}}',
        "[" * 100_000,
    ],
)
def test_what_cannot_work_is_said_to_be_damaged(text: str) -> None:
    with pytest.raises(CorruptRecord):
        profiles.parse(text.encode())


def test_a_file_may_be_written_by_hand(place: Path) -> None:
    place.parent.mkdir(parents=True)
    place.write_text('{"profiles": {"dev": {"cluster": "c"}}, "current": "dev"}')
    assert profiles.read(place) == Profiles({"dev": {"cluster": "c"}}, "dev")
    place.write_bytes(profiles.render(BOTH).replace(b"us-central2-b", b"us-central1-b"))
    assert profiles.read(place).get("dev")["zone"] == "us-central1-b"


def test_a_file_with_a_checksum_is_read_and_written_without(place: Path) -> None:
    place.parent.mkdir(parents=True)
    place.write_text(
        '{\n  "checksum": "9a0b1c2d",\n  "current": "dev",\n'
        '  "profiles": {\n    "dev": {\n      "cluster": "c"\n    }\n  }\n}\n'
    )
    assert profiles.read(place) == Profiles({"dev": {"cluster": "c"}}, "dev")
    profiles.change(place, lambda before: before.with_current(None))
    assert "checksum" not in place.read_text()


def test_a_damaged_file_is_never_overwritten(place: Path) -> None:
    profiles.change(place, lambda before: BOTH)
    broken = place.read_bytes()[:-7]
    place.write_bytes(broken)
    with pytest.raises(CorruptRecord, match=f"mv {place}"):
        profiles.change(place, lambda before: before.with_profile("x", DEV, force=True))
    assert place.read_bytes() == broken
    assert [p.name for p in place.parent.iterdir()] == ["profiles.json"]


def test_the_file_is_the_owners_alone_and_a_link_stays_one(place: Path, tmp_path: Path) -> None:
    profiles.change(place, lambda before: before.with_profile("dev", DEV))
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    link = tmp_path / "link.json"
    link.symlink_to(place)
    profiles.change(link, lambda before: before.with_profile("ops", {"cluster": "ops"}))
    assert link.is_symlink()
    assert set(profiles.read(place).by_name) == {"dev", "ops"}


def test_the_unfinished_file_of_a_killed_writer_does_not_stop_the_next_writer(place: Path) -> None:
    place.parent.mkdir(parents=True)
    (place.parent / "profiles.json.new").write_text("{")
    profiles.change(place, lambda before: before.with_profile("dev", DEV))
    assert set(profiles.read(place).by_name) == {"dev"}


def test_of_two_simultaneous_writers_the_last_one_wins(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process writes all of the file while the first one writes: the last writer wins, and
    the file is whole."""
    render = profiles.render

    def render_late(before: Profiles) -> bytes:
        monkeypatch.setattr(profiles, "render", render)
        profiles.change(place, lambda before: before.with_profile("ops", DEV))
        assert set(profiles.read(place).by_name) == {"ops"}
        return render(before)

    monkeypatch.setattr(profiles, "render", render_late)
    profiles.change(place, lambda before: before.with_profile("dev", DEV))
    assert set(profiles.read(place).by_name) == {"dev"}
    assert [p.name for p in place.parent.iterdir()] == ["profiles.json"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, StoreFull), (errno.EACCES, StoreError), (errno.EROFS, StoreError)],
)
def test_a_file_that_cannot_be_written_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StoreError]
) -> None:
    profiles.change(place, lambda before: before.with_profile("dev", DEV))
    before = place.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(kind, match=str(place)):
        profiles.change(place, lambda before: before.with_profile("ops", DEV))
    assert place.read_bytes() == before
    assert [p.name for p in place.parent.iterdir()] == ["profiles.json"]


def test_a_place_that_is_no_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="KINETIC_PROFILES_FILE"):
        profiles.read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="KINETIC_PROFILES_FILE"):
        profiles.change(tmp_path / "file" / "x.json", lambda before: BOTH)
    assert profiles.read(tmp_path / "file" / "x.json") == Profiles()


# -- profiles as a source of settings --------------------------------------------------------------


def kept_in(folder: Path, book: Profiles = BOTH) -> dict[str, str]:
    profiles.change(folder / "profiles.json", lambda before: book)
    return {"HOME": str(folder), "KINETIC_PROFILES_FILE": str(folder / "profiles.json")}


def test_flag_before_environment_before_profile_before_other_tools_before_default(
    tmp_path: Path,
) -> None:
    env = kept_in(tmp_path) | {"KINETIC_ZONE": "env-zone", "GOOGLE_CLOUD_PROJECT": "other"}
    loaded = settings.load(env, flags={"cluster": "flag-cluster"})
    assert loaded.setting("cluster") == settings.Setting("flag-cluster", settings.FLAG)
    assert loaded.setting("zone") == settings.Setting(
        "env-zone", settings.SettingSource(settings.Origin.ENVIRONMENT, "KINETIC_ZONE")
    )
    assert loaded.setting("project") == settings.Setting(
        "my-dev", settings.SettingSource(settings.Origin.PROFILE, "dev")
    )
    assert loaded.setting("namespace") == settings.Setting(None, settings.DEFAULT)
    assert loaded.setting("profile") == settings.Setting(
        "dev", settings.SettingSource(settings.Origin.PROFILES_FILE)
    )
    foreign = settings.load(env | {"KINETIC_PROFILE": "ops"}).setting("project").source
    assert foreign == settings.SettingSource(settings.Origin.OTHER_TOOLS, "GOOGLE_CLOUD_PROJECT")
    assert str(foreign) == "environment GOOGLE_CLOUD_PROJECT"


def test_which_profile_is_read(tmp_path: Path) -> None:
    env = kept_in(tmp_path)
    assert settings.load(env | {"KINETIC_PROFILE": "ops"}).namespace == "alice"
    assert settings.load(env, flags={"profile": "ops"}).setting("profile") == settings.Setting(
        "ops", settings.FLAG
    )
    settings.choose_profile("ops")
    try:
        assert settings.load(env | {"KINETIC_PROFILE": "dev"}).cluster == "ops"
    finally:
        settings.choose_profile(None)
    kept_in(tmp_path, BOTH.with_current(None))
    assert settings.load(env).profile is None
    with pytest.raises(UsageError, match="'opss'"):
        settings.load(env | {"KINETIC_PROFILE": "opss"})
    with pytest.raises(UsageError, match="kinetic profile create dev"):
        settings.load({"HOME": str(tmp_path / "nobody"), "KINETIC_PROFILE": "dev"})


def test_where_profiles_are_kept() -> None:
    assert (
        str(settings.profiles_file({"HOME": "/home/me"}))
        == "/home/me/.config/kinetic/profiles.json"
    )
    assert (
        str(settings.profiles_file({"XDG_CONFIG_HOME": "/conf"})) == "/conf/kinetic/profiles.json"
    )
    assert (
        str(settings.profiles_file({"HOME": "/home/me", "KINETIC_PROFILES_FILE": "~/p.json"}))
        == "/home/me/p.json"
    )
    with pytest.raises(UsageError, match="KINETIC_PROFILES_FILE"):
        settings.profiles_file({})


def test_the_profiles_of_keras_kinetic_are_known_where_there_are_no_others(tmp_path: Path) -> None:
    theirs = tmp_path / ".kinetic" / "profiles.json"
    theirs.parent.mkdir()
    profile = {"cluster": "c", "namespace": "default", "project": "p", "zone": "z"}
    theirs.write_text(json.dumps({"current": "team", "profiles": {"team": profile}}))
    env = {"HOME": str(tmp_path)}
    loaded = settings.load(env)
    assert (loaded.profile, loaded.cluster, loaded.project) == ("team", "c", "p")
    assert settings.profiles_file(env) == loaded.profiles_file == theirs
    with pytest.raises(UsageError, match="a profile in it needs project, zone and cluster"):
        check_readers(theirs, {"cluster": "c", "store": "gs://b"})
    check_readers(theirs, profile)
    check_readers(Path(kept_in(tmp_path)["KINETIC_PROFILES_FILE"]), {"store": "gs://b"})
    ours = tmp_path / ".config/kinetic/profiles.json"
    profiles.change(ours, lambda before: BOTH)
    assert settings.load(env).profile == BOTH.current
    assert settings.load(env | {"XDG_CONFIG_HOME": str(tmp_path / "conf")}).profile == "team"


def test_profiles_are_in_xdg_config_home_if_there_is_no_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "home", lambda: {}[0])
    assert settings.profiles_file({"XDG_CONFIG_HOME": "/conf"}) == Path(
        "/conf/kinetic/profiles.json"
    )


def test_a_damaged_file_stops_whoever_would_read_it(tmp_path: Path) -> None:
    env = kept_in(tmp_path)
    Path(env["KINETIC_PROFILES_FILE"]).write_bytes(b"{")
    with pytest.raises(CorruptRecord, match="damaged"):
        settings.load(env)
    assert settings.load(env, profile={}).project is None


@pytest.mark.starts_processes
def test_a_decorated_function_sees_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    profiles.change(settings.profiles_file(), lambda before: before.with_profile("dev", DEV))
    with pytest.raises(PreflightError, match="get-credentials dev"):
        kinetic.run(accelerator="cpu")(int).run_async()


def test_damage_is_told_once(tmp_path):
    file = tmp_path / "profiles.json"
    file.write_text('{"current"')
    with pytest.raises(CorruptRecord) as caught:
        profiles.read(file)
    assert caught.value.__suppress_context__, "one traceback, not three"
