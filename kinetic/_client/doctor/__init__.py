"""`kinetic doctor`: checks of this machine, the configured cluster, the store, old jobs."""
