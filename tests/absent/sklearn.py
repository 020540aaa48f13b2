"""Keeps Keras from importing a library for a second in each process: it is as if not installed."""

raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
