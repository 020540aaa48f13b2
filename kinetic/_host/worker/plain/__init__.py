"""Empty stand-ins for the user's sitecustomize and usercustomize; see `interpreter.customize`."""
