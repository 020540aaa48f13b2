"""A slice on this machine: the zygote and the supervisor."""
