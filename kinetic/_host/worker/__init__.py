"""The worker: the process on a host that runs the function."""
