"""Builds the embedded subset of Fashion-MNIST from a folder that holds the four canonical idx files.

    python tools/embed_fashion_mnist.py FOLDER

The choice is deterministic: the first images of each class, in the order of the official files, kept in that order.
So are the bytes, for one version of liblzma; the table printed at the end goes to EMBEDDED in modelmix/data/fashion.py.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

from modelmix.data import fashion, idx

TARGET = Path(__file__).parent.parent / "src" / "modelmix" / "data" / "embedded"
PER_CLASS = {"train": 2780, "test": 400}
MOST_BYTES = 11_500_000


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in range(len(fashion.CLASSES))]))


def main(source: Path) -> None:
    arrays = fashion.folder(source)
    if not fashion.is_official(arrays):
        sys.exit(f"{source} does not hold the official Fashion-MNIST.")
    total = (TARGET / "LICENSE.txt").stat().st_size
    for part, count in PER_CLASS.items():
        chosen = first_of_each_class(arrays[f"y_{part}"], count)
        for key in (f"x_{part}", f"y_{part}"):
            array = arrays[key][chosen]
            path = TARGET / fashion.EMBEDDED[key][0]
            idx.write(path, array.transpose(0, 2, 1) if array.ndim == 3 else array)
            packed = path.read_bytes()
            total += len(packed)
            print(f'    "{key}": ("{path.name}", "{hashlib.sha256(packed).hexdigest()}"),  # {len(packed):,} bytes')
    print(f"{total:,} bytes in all, at most {MOST_BYTES:,}")
    if total > MOST_BYTES:
        sys.exit("That is too much: lower PER_CLASS.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/embed_fashion_mnist.py FOLDER")
    main(Path(sys.argv[1]))
