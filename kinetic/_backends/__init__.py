"""The backends that run jobs: one protocol, one package per kind of place."""
