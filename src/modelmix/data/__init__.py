"""What is trained on: the embedded subset of Fashion-MNIST, public sets by name, idx folders and npz files."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelmix.data.dataset import DataSet, Split, from_arrays, load, to_float

__all__ = ["DataSet", "Split", "from_arrays", "load", "to_float"]


def __getattr__(name: str) -> Any:
    # Tensors need torch; fetching and checking files must not.
    if name not in __all__:
        raise AttributeError(f"module 'modelmix.data' has no attribute {name!r}")
    from modelmix.data import dataset

    return getattr(dataset, name)
