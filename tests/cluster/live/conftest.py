"""The small API server, for every test of this room."""

from cluster_api import serving as serving
