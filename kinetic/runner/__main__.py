"""`python -m kinetic.runner`: the program that a backend starts for one host.

In: `KINETIC_*` variables (see _host.identity). Out: the exit code, a `ProgramCode`.
"""

import gc

gc.disable()  # Imports create no garbage, and collections would slow them down.

from kinetic._host import program  # noqa: E402

if __name__ == "__main__":
    gc.freeze()  # Otherwise the first collection in a fork would copy every page.
    gc.enable()
    program.leave(program.main())
