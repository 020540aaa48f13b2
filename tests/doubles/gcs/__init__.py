"""A double of Google Cloud Storage: its JSON API over HTTP, on this machine."""

from doubles.gcs.server import serving
from doubles.gcs.state import Double, Request

__all__ = ["Double", "Request", "serving"]
