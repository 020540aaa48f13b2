"""One function over many inputs: submitted, watched and collected together."""
