"""Fixed features of images: the scattering transform, its cache on disk, and normalisations with their price."""

from modelmix.features.cache import cached
from modelmix.features.normalisation import ChannelNormalisation, group_normalise, private_channel_normalisation
from modelmix.features.scattering import Scattering

__all__ = ["ChannelNormalisation", "Scattering", "cached", "group_normalise", "private_channel_normalisation"]
