"""The laboratory of ModelMix: the paper's figures, tables and theorems, benchmark data sets and synthetic images.

Importing it adds its data sets, features, networks and attacks to those that recipes know by name.
"""

from modelmix_lab._version import __version__
from modelmix_lab.kinds import register

__all__ = ["__version__"]

register()
