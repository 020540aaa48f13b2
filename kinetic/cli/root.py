"""The root of all commands.

In: the words after `kinetic`. Out: an exit code (see `exit_codes`).

Every failure of a command ends here: as `error: …` on stderr and an exit code. Only click and light
modules of kinetic are imported before the command is known.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kinetic.cli import exit_codes, output
from kinetic.cli.lazy import Lazy, LazyGroup, complete_with
from kinetic.version import __version__

if TYPE_CHECKING:
    from kinetic.cli.context import AppContext

_COMMANDS = {
    "run": Lazy(
        "kinetic.cli.commands.run:run",
        "Run a script, a module or a command on an accelerator slice.",
    ),
    "compile": Lazy(
        "kinetic.cli.commands.compiling:compile_",
        "Ask the compiler of a TPU slice whether a function fits.",
    ),
    "jobs": Lazy(
        "kinetic.cli.commands.jobs:jobs",
        "List jobs, read their logs and results, stop and remove them.",
    ),
    "logs": Lazy(
        "kinetic.cli.commands.output:logs",
        "Print what the hosts of a job printed; short for `jobs logs`.",
    ),
    "dashboard": Lazy(
        "kinetic.cli.commands.dashboard:dashboard",
        "Show all jobs in a browser.",
    ),
    "checkpoint": Lazy(
        "kinetic.cli.commands.checkpoint:checkpoint",
        "Look at checkpoints, and size the memory for them.",
    ),
    "accelerators": Lazy(
        "kinetic.cli.commands.accelerators:accelerators",
        "List the accelerators that jobs can ask for.",
    ),
    "profile": Lazy(
        "kinetic.cli.commands.profile:profile", "Name clusters, and choose which one is in use."
    ),
    "config": Lazy(
        "kinetic.cli.commands.config:config", "Show every setting and where its value comes from."
    ),
    "doctor": Lazy(
        "kinetic.cli.commands.doctor:doctor",
        "Check this machine and the cluster, and tidy up after jobs.",
    ),
    "build-image": Lazy(
        "kinetic.cli.commands.build_image:build_image",
        'Build the images of container_image="prebuilt".',
    ),
    "completion": Lazy(
        "kinetic.cli.commands.completion:completion",
        "Print a script for shell completion of `kinetic`.",
    ),
}

_NO_MAKING = (
    "kinetic makes no clusters: it simulates slices on this machine, or uses the cluster of a "
    "kubeconfig that `kinetic profile create` names"
)
_CHECKING = "`kinetic doctor` checks this machine, and the cluster that is configured"
_ABSENT = {
    "init": f"{_NO_MAKING}. {_CHECKING}.",
    "up": f"{_NO_MAKING}. {_CHECKING}.",
    "down": f"{_NO_MAKING}, and there is nothing but jobs' records to remove: see `kinetic jobs "
    "prune`.",
    "status": f"{_NO_MAKING}. {_CHECKING}; `kinetic jobs list` shows what runs.",
    "pool": f"{_NO_MAKING}, with the node pools that it has: see `kinetic accelerators --live`.",
}
"""Commands of keras-kinetic about clusters."""

_OF_JOBS = (
    "list",
    "top",
    "metrics",
    "result",
    "wait",
    "stacks",
    "debug",
    "cancel",
    "cleanup",
    "prune",
)
_ELSEWHERE = {name: f"kinetic jobs {name}" for name in _OF_JOBS} | dict.fromkeys(
    ("ls", "ps"), "kinetic jobs list"
)

_EPILOG = (
    "\b\nExit codes:\n"
    + "\n".join(f"  {code:<4} {meaning}" for code, meaning in exit_codes.TABLE)
    + ("\n  `kinetic run` passes on the exit code of its program.")
)

_EXAMPLES = """Run Python on an accelerator slice and get back what it prints and returns.

With no cluster configured, the slice is simulated on this machine.

\b
Examples:
  kinetic run -a tpu-v6e-16 train.py --epochs 3
  kinetic run -a cpu --detach -- make evaluate
  kinetic jobs list
  kinetic logs -f --last
  kinetic --profile staging jobs list
"""


@click.group(
    cls=LazyGroup,
    lazy=_COMMANDS,
    elsewhere=_ELSEWHERE,
    absent=_ABSENT,
    help=_EXAMPLES,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--profile",
    metavar="NAME",
    shell_complete=complete_with("profiles"),
    help="Use this profile instead of the current one.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show all messages of kinetic's log, and its own tracebacks, as KINETIC_LOG_LEVEL=DEBUG.",
)
@click.version_option(__version__, "--version", prog_name="kinetic", message="%(prog)s %(version)s")
@click.pass_context
def root(ctx: click.Context, /, *, profile: str | None, verbose: bool) -> None:
    """All commands."""
    if profile is not None:
        from kinetic._config import settings

        settings.choose_profile(profile)
        ctx.call_on_close(lambda: settings.choose_profile(None))
    if verbose:
        from kinetic._config import settings

        settings.choose_log_level("DEBUG")


def call(argv: Sequence[str], app: AppContext | None = None) -> int:
    """Run one command line and return its exit code; `app` replaces the configured store and
    backends."""
    code: object = exit_codes.OK
    try:
        with root.make_context("kinetic", list(argv), obj=app) as ctx:
            code = root.invoke(ctx)
        sys.stdout.flush()
    except (click.exceptions.Exit, click.exceptions.Abort, click.ClickException) as problem:
        return _click_failed(problem)
    except BrokenPipeError:
        # The reader has seen enough (`| head`): not an error.
        output.silence_stdout()
    except (Exception, KeyboardInterrupt) as problem:  # noqa: BLE001 - nothing above reports it
        return _report_failure(problem)
    finally:
        if "kinetic._config.settings" in sys.modules:
            sys.modules["kinetic._config.settings"].choose_log_level(None)
    return code if isinstance(code, int) else exit_codes.OK


def answer_shell() -> None:
    """If this process was started by the script for completion, print completions and exit; print
    nothing for a line that is wrong already."""
    try:
        root._main_shell_completion({}, "kinetic")
    except click.ClickException:
        sys.exit(exit_codes.USAGE)


def _click_failed(problem: BaseException) -> int:
    if isinstance(problem, click.exceptions.Exit):
        return problem.exit_code
    if isinstance(problem, click.exceptions.Abort):
        output.notice("Nothing was done.")
        return exit_codes.INTERRUPTED
    return _report_misuse(problem)


def _report_misuse(problem: BaseException) -> int:
    words = problem.format_message() if isinstance(problem, click.ClickException) else str(problem)
    ctx = getattr(problem, "ctx", None)
    if isinstance(problem, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        output.notice(words)
    else:
        output.error(
            words, f"`{ctx.command_path} --help` shows how to use it." if ctx is not None else ""
        )
    return exit_codes.USAGE


def _report_failure(problem: BaseException) -> int:
    why = output.silence_broken_stdout()
    if not why and isinstance(problem, OSError) and problem.errno == errno.ENOSPC:
        why = problem.strerror or ""  # Full disks of stores are errors of their own.
    if why:
        output.error(f"The output could not be written: {why}.")
    elif isinstance(problem, KeyboardInterrupt):
        pass  # the interrupted command has reported what keeps running
    elif _is_debugging():
        output.traceback_of(problem)
    else:
        output.error(*_message_and_hint(problem))
    return exit_codes.of_error(problem)


def _message_and_hint(problem: BaseException) -> tuple[str, str]:
    """The message and a hint: kinetic's errors say what to do; any other is a bug, with the way to
    its traceback."""
    from kinetic.errors import KineticError

    suggestions = getattr(problem, "suggestions", ())
    hint = (
        f"Did you mean {' or '.join(suggestions)}?"
        if suggestions and suggestions[0] not in str(problem)
        else ""
    )
    if isinstance(problem, KineticError):
        return str(problem), hint
    return (
        f"{type(problem).__name__}: {problem}",
        "`kinetic -v …` shows where this came from.",
    )


def _is_debugging() -> bool:
    from kinetic._config import settings
    from kinetic.errors import UsageError

    try:
        return (settings.load(profile={}).log_level or "").upper() == "DEBUG"
    except UsageError:  # a malformed setting may be the very problem being reported
        return False
