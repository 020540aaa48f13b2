"""Simulated slices on this machine: the zygote and the supervisor."""
