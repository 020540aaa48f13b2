"""The nouns of the flow: frozen values that both sides of the wire read and write. No I/O."""
