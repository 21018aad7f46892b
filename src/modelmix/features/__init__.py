"""Features of images that are not trained on them, and their cache on disk."""

from modelmix.features.cache import cached

__all__ = ["cached"]
