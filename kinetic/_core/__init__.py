"""The values of a job and the rules about them: frozen, on both sides of the wire, no I/O."""
