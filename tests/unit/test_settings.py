"""Settings: precedence, sources, invalid values, and the variables that a job inherits."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._config import environment, settings
from kinetic._core.variables import looks_secret
from kinetic.errors import UsageError, UsageTypeError

HOME = {"HOME": "/home/me"}


def test_defaults_are_below_the_home_folder():
    defaults = settings.load(HOME)
    assert str(defaults.home) == "/home/me/.local/share/kinetic"
    assert str(defaults.cache_dir) == "/home/me/.cache/kinetic"
    assert (defaults.start_timeout_s, defaults.grace_s, defaults.preload) == (600.0, 5.0, "auto")
    assert defaults.setting("home") == settings.Setting(defaults.home, settings.DEFAULT)


def test_xdg_folders_are_used_and_relative_ones_ignored():
    assert str(settings.load(HOME | {"XDG_DATA_HOME": "/data"}).home) == "/data/kinetic"
    assert (
        str(settings.load(HOME | {"XDG_DATA_HOME": "data"}).home) == "/home/me/.local/share/kinetic"
    )


def test_a_tilde_means_the_home_of_that_environment():
    assert str(settings.load(HOME | {"KINETIC_HOME": "~/k"}).home) == "/home/me/k"


@pytest.mark.parametrize(
    ("flags", "environ", "profile", "value", "source"),
    [
        ({"zone": "f"}, {"KINETIC_ZONE": "e"}, {"zone": "p"}, "f", "flag"),
        ({"zone": None}, {"KINETIC_ZONE": "e"}, {"zone": "p"}, "e", "environment KINETIC_ZONE"),
        ({}, {"KINETIC_ZONE": ""}, {"zone": "p"}, "p", "profile"),
        ({}, {}, {}, None, "default"),
    ],
)
def test_precedence(flags, environ, profile, value, source):
    loaded = settings.load(HOME | environ, flags=flags, profile=profile)
    zone = loaded.setting("zone")
    assert (zone.value, str(zone.source)) == (value, source)


def test_a_project_of_other_tools_is_known_but_is_no_cluster():
    loaded = settings.load(HOME | {"GOOGLE_CLOUD_PROJECT": "p"})
    assert loaded.project == "p"
    assert loaded.cluster_settings == {}
    assert list(settings.load(HOME | {"KINETIC_PROJECT": "p"}).cluster_settings) == ["project"]
    assert list(settings.load(HOME, flags={"cluster": "c"}).cluster_settings) == ["cluster"]


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("KINETIC_CONTEXT_SIZE_WARN_MB", "lots"),
        ("KINETIC_PAYLOAD_SIZE_WARN_MB", "-1"),
        ("KINETIC_START_TIMEOUT_S", "0"),
        ("KINETIC_GRACE_S", "nan"),
        ("KINETIC_NO_DEFAULT_EXCLUDES", "maybe"),
        ("KINETIC_COMPARE_PROGRAMS", "maybe"),
        ("KINETIC_PRELOAD", "sometimes"),
        ("KINETIC_HOME", "a\0b"),
        ("KINETIC_HOME", "relative/home"),
        ("KINETIC_HOME", "~other/home"),
    ],
)
def test_a_bad_value_is_a_usage_error_that_names_the_variable(variable, text):
    with pytest.raises(UsageError, match=variable):
        settings.load(HOME | {variable: text})


def test_an_unknown_flag_is_refused():
    with pytest.raises(UsageError, match="'zoen'"):
        settings.load(HOME, flags={"zoen": "a"})


@pytest.mark.parametrize(
    ("texts", "value"), [("1 true T yes y ON", True), ("0 false f No n off", False)]
)
def test_switches(texts, value):
    for text in texts.split():
        assert (
            settings.load(HOME | {"KINETIC_NO_DEFAULT_EXCLUDES": text}).no_default_excludes is value
        )


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("off", False), ("inputs", "inputs"), ("strict", "strict")]
)
def test_comparisons_of_programs(text, value):
    """The setting takes a switch, or the name of a stricter comparison."""
    loaded = settings.load(HOME | {"KINETIC_COMPARE_PROGRAMS": text})
    assert loaded.compare_programs == value


def test_the_process_environment_is_the_default(home):
    assert settings.load().home == home


def test_a_worker_is_recognised_by_the_folder_of_its_host(tmp_path):
    own = {"KINETIC_JOB_ID": "job-1", "KINETIC_PREEMPTION": str(tmp_path)}
    assert settings.on_host(own)
    assert not settings.on_host({})


def test_the_id_of_a_job_alone_makes_no_worker_and_is_named_once(tmp_path, caplog):
    """KINETIC_JOB_ID is set, but this is no worker: the user, or the shell of an ended job,
    exported it. It is ignored, with one warning."""
    settings._ignore_job.cache_clear()
    by_hand, inherited = {"KINETIC_JOB_ID": "job-1"}, {"KINETIC_PREEMPTION": str(tmp_path / "gone")}
    for environ in (by_hand, by_hand | inherited, by_hand):
        assert not settings.on_host(environ)
    (record,) = caplog.records
    assert "KINETIC_JOB_ID 'job-1' is ignored" in record.getMessage()
    assert "not part of a running job" in record.getMessage()


# -- variables and secrets that a job gets ---------------------------------------------------------

ENV = {"SEED": "1", "WANDB_PROJECT": "p", "WANDB_API_KEY": "k"}
ENV |= {"PATH": "/bin", "PYTHONPATH": "x", "PYTHONHOME": "/usr"}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["SEED"], {"SEED"}),
        (["WANDB_*"], {"WANDB_PROJECT", "WANDB_API_KEY"}),
        (["P*"], set()),
        (["PATH"], {"PATH"}),
        (["*"], {"SEED", "WANDB_PROJECT", "WANDB_API_KEY"}),
        (["MISSING", "NONE_*"], set()),
        ([], set()),
    ],
)
def test_captured(patterns, names):
    assert environment.select_env_vars(patterns, ENV) == {n: ENV[n] for n in names}


def test_what_is_captured_is_logged_by_name_and_secrets_are_warned_about(caplog):
    environment._warn_once.cache_clear()
    caplog.set_level(logging.INFO, "kinetic")
    environment.select_env_vars(["WANDB_*"], ENV | {"WANDB_API_KEY": "hunter2"})
    assert "WANDB_API_KEY, WANDB_PROJECT" in caplog.text
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING"]
    assert "WANDB_API_KEY" in caplog.records[1].getMessage()
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("patterns", ["SEED", {"SEED": 1}, 3])
def test_capture_wants_a_list(patterns):
    with pytest.raises(UsageTypeError, match="list"):
        environment.select_env_vars(patterns, ENV)


@pytest.mark.parametrize("pattern", ["A B", "*A", "A*B", "", "A=", "1A"])
def test_capture_refuses_what_is_no_name(pattern):
    with pytest.raises(UsageError, match="capture_env_vars"):
        environment.select_env_vars([pattern], ENV)


def test_a_missing_secret_is_named():
    assert environment.secret_values(["SEED"], ENV) == {"SEED": "1"}
    with pytest.raises(UsageError, match="HF_TOKEN, which secrets= names, is not set"):
        environment.secret_values(["SEED", "HF_TOKEN"], ENV)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *environment._INHERITED,
                "LC_ALL",
                "https_proxy",
                "HF_TOKEN",
                "API_KEY",
                "AWS_X",
                "KINETIC_X",
            ]
        ),
        st.text(),
    )
)
def test_a_local_host_inherits_nothing_that_looks_like_a_secret(environ):
    inherited = settings.worker_environ(environ)
    # The value of GOOGLE_APPLICATION_CREDENTIALS is only a path, which other programs need too.
    secret = {name for name in inherited if looks_secret(name)}
    assert secret <= {"GOOGLE_APPLICATION_CREDENTIALS"}
    assert set(environ) - set(inherited) <= {"HF_TOKEN", "API_KEY", "AWS_X", "KINETIC_X"}


def test_the_store_is_the_home_unless_it_is_named():
    loaded = settings.load(HOME | {"KINETIC_HOME": "~/k"})
    assert loaded.setting("store") == settings.Setting(
        "/home/me/k", settings.SettingSource(settings.Origin.HOME)
    )
    assert loaded.folder == loaded.home

    named = settings.load(HOME | {"KINETIC_STORE": "~/jobs"})
    assert named.setting("store") == settings.Setting(
        "/home/me/jobs", settings.SettingSource(settings.Origin.ENVIRONMENT, "KINETIC_STORE")
    )
    assert str(named.folder) == "/home/me/jobs"

    file = settings.load(HOME | {"KINETIC_STORE": "file:///a%20b"})
    assert (file.store, str(file.folder)) == ("file:///a%20b", "/a b")

    distant = settings.load(HOME, profile={"store": "gs://some"})
    assert distant.setting("store") == settings.Setting(
        "gs://some", settings.SettingSource(settings.Origin.PROFILE)
    )
    assert distant.folder == distant.home


def test_a_store_in_a_relative_folder_is_refused():
    with pytest.raises(UsageError, match="KINETIC_STORE must be an absolute path"):
        settings.load(HOME | {"KINETIC_STORE": "jobs"})


def test_folders_for_temporary_files():
    named = settings.temporary_folders({"TMPDIR": "/scratch", "TEMP": "", "TMP": "/t"})
    assert named[:2] == (Path("/scratch"), Path("/t"))
    assert Path("/tmp") in settings.temporary_folders({})


def test_the_reference_lists_what_a_simulated_host_inherits():
    page = Path(__file__).parents[2] / "docs/reference/settings.md"
    listed = page.read_text()
    assert [name for name in environment._INHERITED if f"`{name}`" not in listed] == []


def test_variables_that_look_like_those_of_settings_are_found():
    meant = {"KINETIC_BACKND": "BACKEND", "KINTEIC_ZONE": "ZONE", "kinetic_queue": "QUEUE"}
    others = ("KINETIC_SLICES", "KINETIC_NAME", "KINETIC_CLUSTER", "KINDLY", "PATH")
    names = settings.names().values()
    misspelt = environment.find_misspelt(names, dict.fromkeys((*meant, *others)))
    assert misspelt == {name: f"KINETIC_{end}" for name, end in meant.items()}
