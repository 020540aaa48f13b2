"""Every environment variable of keras-kinetic keeps its meaning in kinetic."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import kinetic
from kinetic._client import planning
from kinetic._client.planning import Planned
from kinetic._config import environment, settings, verbosity
from kinetic._core.place import Place
from kinetic._source import manifest
from kinetic.errors import UsageError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a package; the working directory is the package's folder."""
    top = tmp_path / "project"
    (top / "package" / ".venv").mkdir(parents=True)
    (top / "pyproject.toml").write_text("")
    (top / "package" / "code.py").write_text("x = 1\n")
    (top / "package" / "requirements.txt").write_text("")
    (top / "package" / ".venv" / "lib.py").write_text("")
    monkeypatch.chdir(top / "package")
    return top


def planned(func=len, **options) -> Planned:
    call = kinetic.run(accelerator="cpu", **options)(func)
    return planning.plan_call(
        func, ("x",), {}, call.options, settings=settings.load(), place=Place("local")
    )


def list_files(plan: Planned) -> list[str]:
    assert plan.bundle is not None
    return [
        entry.path
        for entry in manifest.decode(plan.bundle.manifest)
        if isinstance(entry, manifest.File)
    ]


@pytest.mark.parametrize(
    ("variable", "field"),
    [
        ("KINETIC_PROJECT", "project"),
        ("KINETIC_ZONE", "zone"),
        ("KINETIC_CLUSTER", "cluster"),
        ("KINETIC_NAMESPACE", "namespace"),
        ("KINETIC_BASE_IMAGE_REPO", "base_image_repo"),
        ("KINETIC_RESERVATION", "reservation"),
        ("GOOGLE_CLOUD_PROJECT", "project"),
    ],
)
def test_what_names_a_cluster_is_read_and_an_argument_wins(variable, field, monkeypatch):
    monkeypatch.setenv(variable, "theirs")
    assert getattr(settings.load(), field) == "theirs"
    assert getattr(settings.load(flags={field: "mine"}), field) == "mine"


def test_a_project_of_ones_own_comes_before_the_clouds(monkeypatch):
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "cloud")
    monkeypatch.setenv("KINETIC_PROJECT", "own")
    assert settings.load().project == "own"


def test_a_profile_is_chosen_by_name_from_a_file_that_is_named(tmp_path, monkeypatch):
    file = tmp_path / "profiles.json"
    monkeypatch.setenv("KINETIC_PROFILES_FILE", str(file))
    assert settings.load().profiles_file == file
    profile = {"project": "p", "zone": "z", "cluster": "c"}
    file.write_text(json.dumps({"current": None, "profiles": {"dev": profile}}))
    monkeypatch.setenv("KINETIC_PROFILE", "dev")
    chosen = settings.load()
    assert (chosen.profile, chosen.project, chosen.zone, chosen.cluster) == ("dev", "p", "z", "c")
    monkeypatch.setenv("KINETIC_ZONE", "nearer")
    assert settings.load().zone == "nearer"


def test_output_dir_is_made_absolute_here_and_an_argument_wins(project, monkeypatch):
    assert planned().plan.output_dir is None
    monkeypatch.setenv("KINETIC_OUTPUT_DIR", "out")
    assert planned().plan.output_dir == str(project / "package" / "out")
    assert planned(output_dir="/else").plan.output_dir == "/else"
    monkeypatch.setenv("KINETIC_OUTPUT_DIR", "gs://bucket/out")
    assert planned().plan.output_dir == "gs://bucket/out"


def test_no_tty_debug(monkeypatch):
    assert not settings.load().no_tty_debug
    monkeypatch.setenv("KINETIC_NO_TTY_DEBUG", "1")
    assert settings.load().no_tty_debug


@pytest.mark.starts_processes
def test_the_debug_window_can_be_set(monkeypatch):
    assert planned(debug=True).plan.limits.debug_wait_s == 600
    monkeypatch.setenv("KINETIC_DEBUG_WAIT_TIMEOUT", "30")
    assert planned(debug=True).plan.limits.debug_wait_s == 30


def test_the_package_root(project, monkeypatch):
    assert "code.py" in list_files(planned())
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(project))
    assert "package/code.py" in list_files(planned())
    for wrong in (project / "nowhere", project / "package" / ".venv"):
        monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(wrong))
        with pytest.raises(UsageError, match="KINETIC_PACKAGE_ROOT"):
            planned()


def test_default_excludes_can_be_switched_off(project, monkeypatch):
    assert ".venv/lib.py" not in list_files(planned())
    monkeypatch.setenv("KINETIC_NO_DEFAULT_EXCLUDES", "1")
    assert ".venv/lib.py" in list_files(planned())


def test_a_large_source_tree_is_warned_of(project, monkeypatch):
    (project / "package" / "big.bin").write_bytes(bytes(3_000_000))
    assert planned().warnings == ()
    monkeypatch.setenv("KINETIC_CONTEXT_SIZE_WARN_MB", "2")
    (warning,) = planned().warnings
    assert "big.bin (3.0 MB)" in warning


@pytest.mark.starts_processes
def test_a_large_payload_is_warned_of(project, monkeypatch):
    held = b"x" * 3_000_000

    def look(_):
        return len(held)

    assert planned(look).warnings == ()
    monkeypatch.setenv("KINETIC_PAYLOAD_SIZE_WARN_MB", "2")
    (warning,) = planned(look).warnings
    assert "3.0 MB" in warning


@pytest.mark.parametrize("text", ["1", "0", "false"])
def test_a_variable_of_clusters_that_are_made_is_accepted(text, monkeypatch):
    monkeypatch.setenv("KINETIC_FORCE_DESTROY", text)
    settings.load()
    assert environment.find_misspelt(settings.names().values(), settings.variables()) == {}


@pytest.mark.parametrize(
    ("text", "level"),
    [("debug", "DEBUG"), ("INFO", "INFO"), ("warn", "WARNING"), ("FATAL", "CRITICAL")],
)
def test_the_log_level_is_read(text, level, monkeypatch):
    monkeypatch.setenv("KINETIC_LOG_LEVEL", text)
    assert settings.load().log_level == level


def test_a_wrong_log_level_is_told(monkeypatch):
    monkeypatch.setenv("KINETIC_LOG_LEVEL", "loud")
    with pytest.raises(UsageError, match="KINETIC_LOG_LEVEL must be DEBUG"):
        settings.load()


@pytest.mark.starts_processes
def test_messages_are_shown_where_the_variable_is_set_and_only_there(monkeypatch):
    logger, messages = logging.getLogger("kinetic"), []
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(verbosity, "show", messages.append)
    call = kinetic.run(accelerator="cpu")(len)
    call.plan("x")
    assert messages == []
    monkeypatch.setenv("KINETIC_LOG_LEVEL", "info")
    call.plan("x")
    assert messages == ["INFO"]


def test_a_program_that_has_set_up_logging_keeps_its_handlers(monkeypatch):
    logger = logging.getLogger("kinetic")
    own = logging.NullHandler()
    monkeypatch.setattr(logger, "handlers", [own])
    before = logger.level
    try:
        verbosity.show("DEBUG")
        assert (logger.handlers, logger.level) == ([own], logging.DEBUG)
    finally:
        logger.setLevel(before)


def test_capturing_all_of_ours_does_not_put_the_callers_folder_in_place_of_the_hosts():
    environ = {"KINETIC_OUTPUT_DIR": "here", "KINETIC_JOB_ID": "job", "KINETIC_MINE": "1"}
    assert environment.select_env_vars(["KINETIC_*"], environ) == {"KINETIC_MINE": "1"}
    assert environment.select_env_vars(["KINETIC_OUTPUT_DIR"], environ) == {
        "KINETIC_OUTPUT_DIR": "here"
    }


def test_messages_name_us_once(monkeypatch, capsys):
    logger = logging.getLogger("kinetic")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(verbosity, "_ours", None)
    before = logger.level
    try:
        verbosity.show("DEBUG")
        logger.warning("kinetic: the tree is large")
        logging.getLogger("kinetic.submission").debug("sent")
    finally:
        logger.setLevel(before)
    assert capsys.readouterr().err == "kinetic: the tree is large\nkinetic.submission: sent\n"
