"""The public data sets that have a name: what is published, where, on which terms, and where it lies here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from modelmix.data import fashion
from modelmix.data.directory import directory
from modelmix.errors import ModelMixError
from modelmix_lab.datasets import cifar, svhn
from modelmix_lab.datasets.checksum import File


@dataclass(frozen=True)
class PublicSet:
    """A data set as its authors publish it.

    Args:
        title: its proper name.
        url: where the files are, without their names.
        licence: the terms, in one line.
        folder: where the files lie within the data directory.
        files: what is downloaded.
        members: what the only file, an archive, unpacks to; empty where the files are used as they are.
        places: folders within the data directory in which the set is looked for, the usual one first.
    """

    title: str
    url: str
    licence: str
    folder: str
    files: tuple[File, ...]
    members: tuple[File, ...] = ()
    places: tuple[str, ...] = ()


CATALOGUE = {
    "cifar10": PublicSet(
        title="CIFAR-10",
        url="https://www.cs.toronto.edu/~kriz",
        licence="no formal licence; for research, citing Krizhevsky, Learning Multiple Layers of Features from Tiny "
        "Images, 2009",
        folder=cifar.FOLDER,
        files=(
            File(cifar.ARCHIVE, "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", 170_052_171),
        ),
        members=tuple(File(name, f"md5:{md5}", 30_730_000) for name, md5 in cifar.MD5.items()),
        places=("", "cifar10"),
    ),
    "svhn": PublicSet(
        title="SVHN, cropped digits",
        url="http://ufldl.stanford.edu/housenumbers",
        licence="for non-commercial use only; citing Netzer et al., Reading Digits in Natural Images, 2011",
        folder="svhn",
        files=(
            File(
                "train_32x32.mat",
                "sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                182_040_794,
            ),
            File(
                "test_32x32.mat", "sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b", 64_275_384
            ),
        ),
        places=("svhn", ""),
    ),
    "fashion-mnist": PublicSet(
        title="Fashion-MNIST",
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        licence="MIT, (c) 2017 Zalando SE",
        folder="fashion-mnist",
        files=(
            File(
                "train-images-idx3-ubyte.gz",
                "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                26_421_880,
            ),
            File(
                "train-labels-idx1-ubyte.gz",
                "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                29_515,
            ),
            File(
                "t10k-images-idx3-ubyte.gz",
                "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                4_422_102,
            ),
            File(
                "t10k-labels-idx1-ubyte.gz",
                "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                5_148,
            ),
        ),
        places=("fashion-mnist", "FashionMNIST/raw", ""),
    ),
}

_IS_PRESENT = {"cifar10": cifar.is_present, "svhn": svhn.is_present, "fashion-mnist": fashion.is_present}


def published(name: str) -> PublicSet:
    """Return the public set of this name."""
    if name not in CATALOGUE:
        raise ModelMixError(f"there is no public data set {name!r}: allowed are {', '.join(CATALOGUE)}.")
    return CATALOGUE[name]


def find(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Return the folder in the data directory that holds files of this set, not yet checked; None if there is none."""
    return _first(name, directory(data_dir), published(name).places)


def held(name: str, path: Path) -> Path | None:
    """Return where files of this set lie in or below this folder, or ``path`` if it is their archive; else None."""
    # What lies in the folder itself wins over the same set below it: the folder is what was given.
    return _first(name, path, ("", *CATALOGUE[name].places))


def _first(name: str, root: Path, places: tuple[str, ...]) -> Path | None:
    return next((root / place for place in places if _IS_PRESENT[name](root / place)), None)
