"""The version, in a module of its own so that reading it imports nothing.

In: nothing. Out: `__version__`. Called by the package, the packager and the runner's version check.
"""

__version__ = "0.1.0"
