"""The version of the laboratory."""

__version__ = "0.1.0"
