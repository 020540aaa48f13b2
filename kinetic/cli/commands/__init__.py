"""One module per command or family of commands, imported when the command is used."""
