"""The command line: parse, call, print."""

from modelmix.cli.app import main

__all__ = ["main"]
