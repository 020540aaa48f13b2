"""Compile JAX programs with the real TPU compiler, on a machine without a TPU."""
