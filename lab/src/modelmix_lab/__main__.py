"""``python -m modelmix_lab`` is the command ``modelmix-lab``."""

from modelmix_lab.cli import main

main()
