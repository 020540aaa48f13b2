"""`kinetic profile`, `kinetic config`, `kinetic --profile` and shell completion, from argv to exit
code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from doubles.gcs import serving

import kinetic
from kinetic._config import profiles, settings
from kinetic._core import layout
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store.local import LocalStore
from kinetic.cli.root import call, complete_for_shell, root

Capture = pytest.CaptureFixture[str]
ROOT = Path(kinetic.__file__).parent.parent
DEV = ("--project", "my-dev", "--zone", "us-central2-b", "--cluster", "dev")


def kn(*argv: str) -> int:
    return call(argv)


@pytest.fixture
def two() -> None:
    profiles.change(
        settings.profiles_file(),
        lambda before: before.with_profile(
            "dev", {"project": "my-dev", "zone": "us-central2-b"}
        ).with_profile("ops", {"cluster": "ops"}),
    )


# -- profile ---------------------------------------------------------------------------------------


def test_the_life_of_a_profile(capsys: Capture) -> None:
    assert kn("profile", "ls") == 0
    assert kn("profile", "create", "dev", *DEV) == 0
    assert "current" in capsys.readouterr().out
    assert kn("profile", "create", "ops", "--cluster", "ops", "--namespace", "alice") == 0
    assert "kinetic profile use ops" in capsys.readouterr().err
    assert kn("profile", "ls") == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["NAME", *map(str.upper, profiles.FIELDS)],
        ["*", "dev", "my-dev", "us-central2-b", "dev", "-", "-", "-", "-", "-"],
        ["ops", "-", "-", "ops", "alice", "-", "-", "-", "-"],
    ]
    assert kn("profile", "use", "ops") == 0
    assert settings.load().cluster == "ops"
    assert kn("profile", "show", "--json") == 0
    assert capsys.readouterr().out.endswith(
        '"name": "ops",\n  "in_use": true,\n  "cluster": "ops",\n  "namespace": "alice"\n}\n'
    )
    assert kn("profile", "unset") == 0
    assert settings.load().cluster is None
    assert kn("profile", "show") == 2
    assert kn("profile", "use", "ops") == 0
    assert kn("profile", "rm", "ops", "-y") == 0
    assert "There is no current profile" in capsys.readouterr().out
    assert kn("profile", "ls", "--json") == 0
    assert [(p["name"], p["in_use"]) for p in json.loads(capsys.readouterr().out)] == [
        ("dev", False)
    ]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("use", "dve"), "Did you mean 'dev'?"),
        (("show", "dve"), "Did you mean 'dev'?"),
        (("rm", "dve", "-y"), "Did you mean 'dev'?"),
        (("rm", "dev"), "--yes"),
        (("create", "dev", "--zone", "z"), "--force"),
        (("create", "a b", "--zone", "z"), "letters, digits"),
        (("create", "new", "--zone", "a b"), "without blanks"),
        (("create", "new"), "--project"),
        (("create",), "NAME is missing"),
    ],
)
def test_what_cannot_work_changes_nothing(
    argv: tuple[str, ...], words: str, capsys: Capture
) -> None:
    before = settings.profiles_file().read_bytes()
    assert kn("profile", *argv) == 2
    assert words in capsys.readouterr().err
    assert settings.profiles_file().read_bytes() == before


@pytest.mark.usefixtures("two")
def test_a_profile_is_replaced_by_force(capsys: Capture) -> None:
    assert kn("profile", "create", "dev", "--zone", "z", "--force") == 0
    assert profiles.read(settings.profiles_file()).by_name["dev"] == {"zone": "z"}


def test_what_no_option_says_is_taken_from_our_own_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("KINETIC_ZONE", "env-zone")
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "of-other-tools")
    assert kn("profile", "create", "dev", "--cluster", "c") == 0
    assert profiles.read(settings.profiles_file()).by_name["dev"] == {
        "zone": "env-zone",
        "cluster": "c",
    }


def test_on_a_terminal_the_rest_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    answers = iter(["dev", "p", " c-1 ", "", "y"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _prompt: next(answers))
    monkeypatch.setenv("KINETIC_ZONE", "env-zone")
    assert kn("profile", "create") == 0
    assert profiles.read(settings.profiles_file()).by_name["dev"] == {
        "project": "p",
        "zone": "env-zone",
        "cluster": "c-1",
    }
    assert list(answers) == ["y"]


@pytest.mark.usefixtures("two")
def test_a_damaged_file_is_told_and_kept(capsys: Capture) -> None:
    place = settings.profiles_file()
    place.write_bytes(place.read_bytes()[:-9])
    broken = place.read_bytes()
    for argv in (
        ("profile", "ls"),
        ("profile", "use", "dev"),
        ("profile", "create", "x", "--zone", "z"),
        ("jobs", "list"),
        ("config",),
    ):
        assert kn(*argv) == 5
        assert f"mv {place}" in capsys.readouterr().err
    assert place.read_bytes() == broken


# -- --profile and config --------------------------------------------------------------------------


@pytest.mark.usefixtures("two")
def test_a_profile_for_one_command(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kn("--profile", "ops", "config", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cluster"] == {"value": "ops", "source": "profile ops"}
    assert document["profile"] == {"value": "ops", "source": "flag"}
    assert settings.load().profile == "dev"  # The profile applies to that command only.
    assert kn("--profile", "opps", "jobs", "list") == 2
    assert settings.load().profile == "dev"
    assert kn("--profile", "ops", "profile", "ls") == 0
    out, err = capsys.readouterr()
    assert "*  ops" in out
    assert "--profile" in err
    monkeypatch.setenv("KINETIC_PROFILE", "ops")
    assert kn("profile", "show") == 0
    out, err = capsys.readouterr()
    assert out.startswith("Profile:    ops (current)")


@pytest.mark.usefixtures("two")
def test_config_shows_every_setting_with_its_source(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("KINETIC_ZONE", "env-zone")
    assert kn("config", "show", "--cluster", "mine") == 0
    rows = {
        line.split()[0]: re.split(r" {2,}", line)[1:]
        for line in capsys.readouterr().out.splitlines()[1:]
    }
    assert rows["zone"] == ["env-zone", "environment KINETIC_ZONE"]
    assert rows["cluster"] == ["mine", "flag"]
    assert rows["project"] == ["my-dev", "profile dev"]
    assert rows["home"] == [str(home), "environment KINETIC_HOME"]
    assert rows["grace_s"] == ["5", "default"]
    assert rows["no_tty_debug"] == ["no", "default"]
    assert rows["pod_python"] == ["-", "default"]
    assert set(rows) == set(settings.names())
    assert kn("config", "hide") == 2


@pytest.mark.starts_processes
def test_without_profiles_none_of_their_code_is_loaded() -> None:
    code = (
        "import sys; from kinetic.cli.root import call; call(['jobs', 'list']); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {
        "kinetic._config.profiles",
        "kinetic._config.environment",
        "logging",
        "kinetic._core.spec",
    } & set(done.stdout.split())


# -- completion ------------------------------------------------------------------------------------


def complete(*words: str) -> list[str]:
    """List the completions that a shell would offer for the last word."""
    *before, prefix = words
    completer = ShellComplete(root, {}, "kinetic", "")
    return [item.value for item in completer.get_completions(before, prefix)]


@pytest.mark.usefixtures("two")
def test_names_are_completed(home: Path) -> None:
    store = LocalStore(home)
    for number in (1, 2):
        ref = JobRef(
            f"job-0000000{number}", Place("local", "gke"), "cpu", "f", "f", number, store.uri
        )
        store.put(layout.JobKeys(ref.job_id).ref, json.dumps(ref.to_json()).encode())
    assert complete("jobs", "logs", "job-") == ["job-00000002", "job-00000001"]
    assert complete("jobs", "logs", "00000001") == ["00000001"]
    assert complete("jobs", "cancel", "job-") == []
    assert complete("run", "-a", "tpu-v6e-1") == ["tpu-v6e-1", "tpu-v6e-16", "tpu-v6e-128"]
    assert complete("accelerators", "gpu-l4")[0] == "gpu-l4"
    assert complete("--profile", "") == ["dev", "ops"]
    assert complete("profile", "use", "o") == ["ops"]
    assert complete("comp") == ["compile", "completion"]
    # A misspelt command must not print its error into the line.
    assert complete("stauts", "") == complete("")
    assert "--all-hosts" in complete("run", "--a")
    # Arguments after -- belong to the program: the shell offers files.
    assert complete("run", "-a", "cpu", "train.py", "--a") == ["--a"]
    assert complete("run", "-a", "cpu:4", "--det") == ["--detach"]
    assert complete("run", "-a", "tpu-v6e-16:s") == ["tpu-v6e-16:spot"]
    assert complete("run", "-a", "cpu:s") == []
    assert complete("run", "--backend", "g") == ["gke"]
    store.put(layout.AttemptKeys("job-00000002", 1).outcome, b"{}")
    assert complete("jobs", "logs", "job-00000002", "--attempt", "") == ["2", "1"]
    assert complete("jobs", "logs", "job-00000001", "--attempt", "") == ["1"]
    assert complete("jobs", "logs", "--attempt", "") == []
    assert complete("jobs", "list", "--state", "fa") == ["failed"]
    assert {"list", "top", "prune"} <= set(complete("jobs", ""))


def test_batches_are_completed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert kn("profile", "create", "here", "--store", str(tmp_path)) == 0
    for number, group in enumerate(("grp-aa000001", "grp-aa000002", "grp-aa000002", None)):
        ref = JobRef(
            f"job-0000000{number}", Place("local", "local"), "cpu", "f", "f", number, store.uri
        )
        ref = replace(ref, group_id=group)
        store.put(layout.JobKeys(ref.job_id).ref, json.dumps(ref.to_json()).encode())
    assert complete("--profile", "here", "jobs", "wait", "g") == ["grp-aa000002", "grp-aa000001"]
    assert complete("--profile", "here", "jobs", "list", "--group", "grp-aa000001") == [
        "grp-aa000001"
    ]
    assert "job-00000003" in complete("--profile", "here", "jobs", "wait", "")


def test_jobs_of_the_profile_on_the_line_are_completed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "far")
    ref = JobRef("job-0000000f", Place("local", "local"), "cpu", "f", "f", 1, store.uri)
    store.put(layout.JobKeys(ref.job_id).ref, json.dumps(ref.to_json()).encode())
    assert kn("profile", "create", "near", "--store", str(tmp_path / "near")) == 0
    assert kn("profile", "create", "far", "--store", store.uri) == 0
    assert complete("jobs", "logs", "job-") == []
    assert complete("--profile", "far", "jobs", "logs", "job-") == ["job-0000000f"]
    assert complete("jobs", "logs", "job-") == [], "for that line only"


def test_a_completion_that_fails_offers_nothing() -> None:
    place = settings.profiles_file()
    place.parent.mkdir(parents=True)
    place.write_bytes(b"{")
    assert complete("--profile", "") == []
    assert complete("jobs", "logs", "") == []


@pytest.mark.starts_processes
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str, capsys: Capture) -> None:
    assert kn("completion", shell) == 0
    assert f"_KINETIC_COMPLETE={shell}_complete" in capsys.readouterr().out
    assert kn("completion", "tcsh") == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kinetic jobs st", ["plain,status", "plain,stacks"]),
        ("kinetic nosuch --wrong ", []),
        ("kinetic run -a cpu --nosuch", []),
    ],
)
def test_a_shell_is_answered(
    line: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("_KINETIC_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    with pytest.raises(SystemExit):
        complete_for_shell()
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[: len(words)] == words


def test_help_is_whole(capsys: Capture) -> None:
    commands = [
        "profile",
        *(f"profile {c}" for c in ("create", "ls", "use", "unset", "show", "rm")),
    ]
    for words in (*commands, "config", "doctor", "completion", "jobs top"):
        assert kn(*words.split(), "--help") == 0
        out = capsys.readouterr().out
        assert "Example" in out, words
        assert max(map(len, out.splitlines())) <= 100, words


def test_a_profile_with_an_address_names_no_store(capsys: Capture) -> None:
    assert kn("profile", "create", "lab", "--address", "http://head:8265") == 0
    capsys.readouterr()
    assert kn("profile", "show", "lab", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["address"], "store" in document) == ("http://head:8265", False)


def test_a_profile_names_a_store(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kn("profile", "create", "far", "--cluster", "c", "--store", "gs://far") == 0
    capsys.readouterr()
    assert kn("config", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["store"] == {"value": "gs://far", "source": "profile far"}
    with serving("far") as double:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.uri)
        assert kn("jobs", "list") == 0
        assert double.calls()["list"]
    assert "no jobs yet" in capsys.readouterr().err
