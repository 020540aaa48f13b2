"""Functions to call inside a job: slices, meshes, metrics, preemption, checkpoints."""
