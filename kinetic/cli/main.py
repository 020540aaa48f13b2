"""The entry point of the command line: start and end of its process."""

from __future__ import annotations

import sys
from typing import NoReturn

from kinetic._system import streams


def main() -> NoReturn:
    """Run the command line of this process, or print completions for a shell."""
    streams.replace_closed()
    streams.escape()
    from kinetic.cli import root

    root.complete_for_shell()
    sys.exit(root.call(sys.argv[1:]))
