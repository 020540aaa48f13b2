"""Where jobs run: one protocol, one module per place."""
