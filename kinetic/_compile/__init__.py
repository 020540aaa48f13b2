"""The real TPU compiler without a TPU: JAX programs compiled as they would be on a slice."""
