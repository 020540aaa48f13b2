"""A double of Google Cloud Storage: its JSON API over HTTP, on this machine."""

from gcs.server import serving
from gcs.state import Double, Request

__all__ = ["Double", "Request", "serving"]
