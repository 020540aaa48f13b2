"""`python -m kinetic.runner`: one host, as a backend starts it where hosts are programs.

In: `KINETIC_*` variables (see _host.identity). Out: a `ProgramCode`.
"""

import gc

gc.disable()  # Imports create no garbage, and collections would slow them.

from kinetic._host import program  # noqa: E402

if __name__ == "__main__":
    gc.freeze()  # Otherwise the first collection in a fork would copy every page.
    gc.enable()
    program.leave(program.main())
