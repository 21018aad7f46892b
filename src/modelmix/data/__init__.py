"""What is trained on: the embedded subset of Fashion-MNIST, idx folders and npz files."""

from modelmix.data.dataset import DataSet, Split, from_arrays, load, to_float

__all__ = ["DataSet", "Split", "from_arrays", "load", "to_float"]
