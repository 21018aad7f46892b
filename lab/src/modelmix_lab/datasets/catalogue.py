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
        files=(File(cifar.ARCHIVE, "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),),
        members=tuple(File(name, md5, 30_730_000) for name, md5 in cifar.MD5.items()),
        places=("", "cifar10"),
    ),
    "svhn": PublicSet(
        title="SVHN, cropped digits",
        url="http://ufldl.stanford.edu/housenumbers",
        licence="for non-commercial use only; citing Netzer et al., Reading Digits in Natural Images, 2011",
        folder="svhn",
        files=(
            File(svhn.FILES["train"], svhn.MD5["train"], 182_040_794),
            File(svhn.FILES["test"], svhn.MD5["test"], 64_275_384),
        ),
        places=("svhn", ""),
    ),
    "fashion-mnist": PublicSet(
        title="Fashion-MNIST",
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        licence="MIT, (c) 2017 Zalando SE",
        folder="fashion-mnist",
        files=(
            File("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            File("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
            File("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            File("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        ),
        places=("fashion-mnist", "FashionMNIST/raw", ""),
    ),
}

_IS_PRESENT = {"cifar10": cifar.is_present, "svhn": svhn.is_present, "fashion-mnist": fashion.is_present}


def published(name: str) -> PublicSet:
    """The set of this name."""
    if name not in CATALOGUE:
        raise ModelMixError(f"there is no public data set {name!r}: allowed are {', '.join(CATALOGUE)}.")
    return CATALOGUE[name]


def find(name: str, data_dir: str | Path | None = None) -> Path | None:
    """The folder in the data directory that holds files of this set, not yet checked; None if there is none."""
    return _first(name, directory(data_dir), published(name).places)


def held(name: str, path: Path) -> Path | None:
    """Where files of this set lie in this folder, in their usual places below it, or that this is its archive."""
    # What lies in the folder itself wins over the same set below it: the folder is what was given.
    return _first(name, path, ("", *CATALOGUE[name].places))


def _first(name: str, root: Path, places: tuple[str, ...]) -> Path | None:
    return next((root / place for place in places if _IS_PRESENT[name](root / place)), None)
