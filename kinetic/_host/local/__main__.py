"""The zygote as a program: `python -m kinetic._host.local DESCRIPTOR [MODULE ...]`."""

import gc

gc.disable()  # Imports create no garbage, and collections would slow them.

from kinetic._host.local.zygote import main  # noqa: E402

main()
