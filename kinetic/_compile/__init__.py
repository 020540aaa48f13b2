"""The real TPU compiler without a TPU: programs of JAX, as they would be on a slice."""
