"""The entry point of the command line: how its process begins and ends.

In: the words after `kinetic`, or a shell's question. Out: an exit code.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from kinetic._system import streams


def main() -> NoReturn:
    """Run the command line of this process, or answer a shell that completes one."""
    streams.replace_closed()
    streams.escape()
    from kinetic.cli import root

    root.answer_shell()
    sys.exit(root.call(sys.argv[1:]))
