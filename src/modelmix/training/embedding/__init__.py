"""Gradient embedding (Yu et al. 2021): a few directions that public samples suggest, and what they leave over.

Every step has a basis V of its own, computed from public samples at the released state. So V is public: given what was
released before, it is a constant, and the two sums of a step are bounded sums like any other. Embeddings V^T g get
noise in proportion to their number of coordinates, residuals g - V V^T g have a smaller clip.

What is summed obeys the bounds that ``EmbeddingMechanism`` counts on, whatever V is and however roughly e and r were
computed: nothing here rests on orthonormal columns or on V e + r being g to the last bit, only utility does. So on an
accelerator e and r are products of factors rounded to 11 bits, and what is measured is measured in float64 on the
numbers that are summed, with V e in float64 where a bound is on it. The margin is that of ``clipping``.
"""

from modelmix.training.embedding.basis import Basis, columns, find_basis
from modelmix.training.embedding.clip import EmbeddingClip
from modelmix.training.embedding.public import Embedding, random_labels

__all__ = ["Basis", "Embedding", "EmbeddingClip", "columns", "find_basis", "random_labels"]
