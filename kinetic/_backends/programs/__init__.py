"""A slice whose hosts are programs on this machine, joined over TCP."""
