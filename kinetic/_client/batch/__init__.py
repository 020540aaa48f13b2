"""Batches: one function over many inputs, a job for each."""
