"""The command line: parse, call, print."""

from modelmix_lab.cli.app import main

__all__ = ["main"]
