"""A double of Google Cloud for `kinetic up`: GKE, a project's APIs and quotas, machine types,
buckets, and the API servers of the clusters that it makes.

Every request is checked against Google's published discovery documents (`discovery.json.xz`: the
methods and schemas that are used, of the revisions that google-api-python-client 2.202.0 has), and
those to GKE are parsed with google-cloud-container's own protobuf types. A field that either does
not know is an error. `double.problems` lists them. It has never been compared with Google itself.
"""

from doubles.google_cloud.server import GoogleDouble, Killed, Refusal, serving

__all__ = ["GoogleDouble", "Killed", "Refusal", "serving"]
