"""A double of Google Cloud Storage: its JSON API over HTTP, on this machine."""

from gcs.server import Double, Request, serving

__all__ = ["Double", "Request", "serving"]
