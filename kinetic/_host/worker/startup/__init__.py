"""A folder that is first on the PYTHONPATH of every program that is started on a host; see
`sitecustomize`."""
