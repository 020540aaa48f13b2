"""Run a decorated Python function on an accelerator slice and get its value back."""
