"""The nouns of a job and the rules about them: frozen values on both sides of the wire, no I/O."""
