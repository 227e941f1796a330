"""Images of the `apptainer` driver: what a name may be, the cache on this machine's disk, recipes, builds, eviction.

image = await resolve(config, "host")     # built, unpacked or found; a folder that Apptainer can start from
with hold(image):                         # while it is held it is not evicted
    ...
"""

from workers.sandbox.images.cache import Hold, Image, folders_under, hold
from workers.sandbox.images.resolve import resolve

__all__ = ["Hold", "Image", "folders_under", "hold", "resolve"]
