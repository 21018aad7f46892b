"""``python -m modelmix``."""

from modelmix.cli import main

main()
