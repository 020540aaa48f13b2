"""The folder that is first on the PYTHONPATH of every program that a function starts; see
`sitecustomize`."""
