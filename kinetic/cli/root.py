"""The root command.

Every failure of a command is reported here, as `error: …` on stderr and an exit code. Only click
and light modules of kinetic are imported until the command is known.
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
        "Check without a TPU whether a function compiles for a slice and fits.",
    ),
    "init": Lazy(
        "kinetic.cli.commands.clusters:init",
        "Join a cluster, create one, or find out what does not work.",
    ),
    "up": Lazy("kinetic.cli.commands.clusters:up", "Create a cluster, after showing its price."),
    "down": Lazy("kinetic.cli.commands.clusters:down", "Remove a cluster."),
    "status": Lazy("kinetic.cli.commands.clusters:status", "Show a cluster and what it costs now."),
    "pool": Lazy(
        "kinetic.cli.commands.clusters:pool", "Add, remove and list node pools of a cluster."
    ),
    "jobs": Lazy(
        "kinetic.cli.commands.jobs:jobs",
        "List jobs, read their logs and results, stop and remove them.",
    ),
    "logs": Lazy(
        "kinetic.cli.commands.output:logs",
        "Print the logs of a job; short for `kinetic jobs logs`.",
    ),
    "session": Lazy(
        "kinetic.cli.commands.session:session",
        "Hold slices, so that calls run on them without waiting for machines.",
    ),
    "dashboard": Lazy(
        "kinetic.cli.commands.dashboard:dashboard",
        "Show all jobs in a browser.",
    ),
    "checkpoint": Lazy(
        "kinetic.cli.commands.checkpoint:checkpoint",
        "List, inspect and remove checkpoints, and size memory for them.",
    ),
    "accelerators": Lazy(
        "kinetic.cli.commands.accelerators:accelerators",
        "List the accelerators that jobs can use.",
    ),
    "profile": Lazy(
        "kinetic.cli.commands.profile:profile",
        "Save cluster settings under names and switch between them.",
    ),
    "config": Lazy(
        "kinetic.cli.commands.config:config", "Show every setting and where its value comes from."
    ),
    "doctor": Lazy(
        "kinetic.cli.commands.doctor:doctor",
        "Check this machine and the cluster, and report leftovers of jobs.",
    ),
    "build-image": Lazy(
        "kinetic.cli.commands.build_image:build_image",
        'Build the container images for container_image="prebuilt".',
    ),
    "completion": Lazy(
        "kinetic.cli.commands.completion:completion",
        "Print a completion script for your shell.",
    ),
}

_JOB_SUBCOMMANDS = (
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
_ELSEWHERE = {name: f"kinetic jobs {name}" for name in _JOB_SUBCOMMANDS} | {
    "ls": "kinetic jobs list",
    "ps": "kinetic jobs list",
    "stop": "kinetic jobs cancel` or `kinetic session stop",
    "version": "kinetic --version",
}

_EPILOG = (
    "\b\nExit codes:\n"
    + "\n".join(f"  {code:<4} {meaning}" for code, meaning in exit_codes.TABLE)
    + ("\n  `kinetic run` exits with the exit code of its program.")
)

_HELP = """Run Python on an accelerator slice and get its output and return value back.

Without a configured cluster, the slice is simulated on this machine.

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
    help=_HELP,
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
    help="Show debug messages and tracebacks of kinetic, like KINETIC_LOG_LEVEL=DEBUG.",
)
@click.version_option(__version__, "--version", prog_name="kinetic", message="%(prog)s %(version)s")
@click.pass_context
def root(ctx: click.Context, /, *, profile: str | None, verbose: bool) -> None:
    """Apply the options that stand before the command."""
    if profile is not None:
        from kinetic._config import settings

        settings.choose_profile(profile)
        ctx.call_on_close(lambda: settings.choose_profile(None))
    if verbose:
        from kinetic._config import settings

        settings.choose_log_level("DEBUG")


def call(argv: Sequence[str], app: AppContext | None = None) -> int:
    """Run one command line and return its exit code. `app` replaces the configured store and
    backends, for tests."""
    code: object = exit_codes.OK
    try:
        with root.make_context("kinetic", list(argv), obj=app) as ctx:
            code = root.invoke(ctx)
        sys.stdout.flush()
    except (click.exceptions.Exit, click.exceptions.Abort, click.ClickException) as problem:
        return _click_failed(problem)
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): not an error.
        output.silence_stdout()
    except (Exception, KeyboardInterrupt) as problem:  # noqa: BLE001 - nothing above reports it
        return _report_failure(problem)
    finally:
        if "kinetic._config.settings" in sys.modules:
            sys.modules["kinetic._config.settings"].choose_log_level(None)
    return code if isinstance(code, int) else exit_codes.OK


def complete_for_shell() -> None:
    """If the shell's completion script started this process, print completions and exit. Print
    nothing if the line typed so far is invalid."""
    try:
        root._main_shell_completion({}, "kinetic")
    except click.ClickException:
        sys.exit(exit_codes.USAGE)


def _click_failed(problem: BaseException) -> int:
    if isinstance(problem, click.exceptions.Exit):
        return problem.exit_code
    if isinstance(problem, click.exceptions.Abort):
        output.notice(
            "Nothing was done, because you interrupted the command or did not confirm it."
        )
        return exit_codes.INTERRUPTED
    words = problem.format_message() if isinstance(problem, click.ClickException) else str(problem)
    ctx = getattr(problem, "ctx", None)
    if isinstance(problem, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        output.notice(words)
    else:
        output.error(words, f"See `{ctx.command_path} --help`." if ctx is not None else "")
    return exit_codes.USAGE


def _report_failure(problem: BaseException) -> int:
    why = output.silence_broken_stdout()
    if not why and isinstance(problem, OSError) and problem.errno == errno.ENOSPC:
        why = problem.strerror or ""  # Stores report full disks themselves.
    if why:
        output.error(f"The output could not be written: {why}.")
    elif isinstance(problem, KeyboardInterrupt):
        pass  # The interrupted command has already said which job keeps running.
    elif _is_debugging():
        output.traceback_of(problem)
    else:
        output.error(*_message_and_hint(problem))
    return exit_codes.of_error(problem)


def _message_and_hint(problem: BaseException) -> tuple[str, str]:
    """Return the message and a hint. kinetic's errors explain themselves. Any other exception is a
    bug, so its hint says how to print the traceback."""
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
        "Run it again as `kinetic -v …` to see the traceback.",
    )


def _is_debugging() -> bool:
    from kinetic._config import settings
    from kinetic.errors import UsageError

    try:
        return (settings.load(profile={}).log_level or "").upper() == "DEBUG"
    except UsageError:  # A malformed setting may be the problem that is being reported.
        return False
