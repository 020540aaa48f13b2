"""The version, in a module of its own so that reading it imports nothing.

In: nothing. Out: `__version__`.
"""

__version__ = "0.3.0"
