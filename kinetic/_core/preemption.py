"""How a host and its function tell each other of preemption and of saves: by files, which programs
that the function starts see, too.

In: nothing. Out: names. Pure.
"""

from __future__ import annotations

VARIABLE = "KINETIC_PREEMPTION"
"""The folder that the files lie in."""
NOTICE = "preempted"
"""From the agent: a host of the gang is taken away. Holds when functions are ended at the latest,
by the clock that `time.monotonic` reads."""
LOOKS = "looks-for-preemption"
"""From the function: it looks for the notice, and needs no SIGTERM."""
SEEN = "saw-preemption"
"""From the function: it has seen the notice, or heard of it, so it ends because of it."""
SAVING = {"persistent": "saving-persistent", "local": "saving-local"}
"""From the function, by tier: it writes a checkpoint of the step that the file holds."""
