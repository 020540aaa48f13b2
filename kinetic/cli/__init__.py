"""The command line: `kinetic run`, `kinetic jobs`, `kinetic accelerators`."""
