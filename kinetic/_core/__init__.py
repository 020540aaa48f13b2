"""The data of jobs and the rules about it, for callers and hosts: frozen values, no I/O."""
