"""Rules of ``dataflow`` for views, slices and indices: operations that move entries and compute nothing."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from modelmix.gradients.aten_rules import as_list, is_tensor, positive
from modelmix.gradients.dataflow import ALL, PUBLIC, Call, PerSample, Value, rule, same_size

# Views.


@rule("view", "_unsafe_view", "reshape", sizes=("size", "shape"))
def view(call: Call) -> Value:
    """Samples stay together if as many entries lie in front of them before and after."""
    where = call.rows_dim("self")
    if "dtype" in call.arguments and isinstance(call["dtype"], torch.dtype):
        raise call.refuse("view of a tensor as another type")
    if where is None:
        return PUBLIC
    there = call.growing(call.out.shape)
    before, after = call.shape("self")[:where], tuple(call.out.shape)[: there[0]] if there else ()
    if len(there) != 1 or call.growing(after) or int(prod(before)) != int(prod(after)):
        raise call.refuse("reshape mixes samples with another dimension")
    return PerSample(there[0])


@rule("permute", "transpose", "t", "movedim", "swapaxes", "numpy_T")
def permute(call: Call) -> Value:
    where, rank = call.rows_dim("self"), call.rank("self")
    if where is None:
        return PUBLIC
    order = list(range(rank))
    if call.name.startswith("aten::permute"):
        order = positive(call["dims"], rank)
    elif call.name.startswith("aten::transpose"):
        a, b = positive([call["dim0"], call["dim1"]], rank)
        order[a], order[b] = b, a
    elif call.name in ("aten::t", "aten::t_"):
        order.reverse()
    else:
        raise call.refuse(f"{call.name} is not known to keep samples apart")
    return PerSample(order.index(where))


@rule("expand", sizes=("size",))
def expand(call: Call) -> Value:
    """A public tensor that is repeated for every sample holds samples from then on."""
    where, rank = call.rows_dim("self"), len(call.out.shape)
    if where is not None:
        return PerSample(where + rank - call.rank("self"))
    there = call.growing(call.out.shape)
    if not there:
        return PUBLIC
    own = there[0] - (rank - call.rank("self"))
    if len(there) > 1 or (own >= 0 and call.shape("self")[own] != 1):
        raise call.refuse("a constant has an entry for every place in the batch")
    return PerSample(there[0])


@rule("repeat", sizes=("repeats",))
def repeat(call: Call) -> Value:
    """Not of the samples' dimension, whose order would change; a public tensor may be repeated for every sample."""
    where, rank = call.rows_dim("self"), len(call.out.shape)
    if where is None:
        return call.of_shape(call.out.shape)
    there = where + rank - call.rank("self")
    if call["repeats"][there] != 1:
        raise call.refuse()
    return PerSample(there)


@rule("unsqueeze")
def unsqueeze(call: Call) -> Value:
    where = call.rows_dim("self")
    if where is None:
        return PUBLIC
    return PerSample(where + (call["dim"] % len(call.out.shape) <= where))


@rule("squeeze")
def squeeze(call: Call) -> Value:
    """At least two samples are always run, so that theirs is never a dimension of size one."""
    where = call.rows_dim("self")
    if where is None:
        return PUBLIC
    shape = call.shape("self")
    dims = positive(call["dim"], len(shape)) if "dim" in call.arguments else range(len(shape))
    return PerSample(where - sum(d < where and shape[d] == 1 for d in dims))


@rule("slice", "slice_backward", "slice_scatter", sizes=("end", "input_sizes"))
def slice_(call: Call) -> Value:
    """Of another dimension than the samples', or all of them."""
    name = "grad_output" if "grad_output" in call.arguments else "self"
    where = call.rows_dim(name)
    if "src" in call.arguments:
        where = call.aligned([call["self"], call["src"]], call.rank("self"))
        if where is not None and not (call.value("self") == call.value("src") == PerSample(where)):
            raise call.refuse()
    rank = len(call.out.shape)
    dim, start, end = call["dim"] % rank, call["start"] or 0, call["end"]
    if dim == where and not isinstance(end, fx.Node) and end is not None and end < ALL:
        raise call.refuse("a slice of the batch")  # in small batches all of it is taken, in larger ones it is not
    if isinstance(start, fx.Node) or (isinstance(end, fx.Node) and dim != where):
        raise call.refuse("slice computes with the number of samples")
    if where is None:
        return PUBLIC
    if dim == where:
        same = same_size(call.shape(name)[dim], call.out.shape[dim])
        if start != 0 or call["step"] != 1 or not same or "src" in call.arguments:
            raise call.refuse("a slice of the batch")
    return PerSample(where)


@rule("select", "select_backward", "select_scatter", sizes=("input_sizes",))
def select(call: Call) -> Value:
    backward = "grad_output" in call.arguments
    scatter = "src" in call.arguments
    where = call.rows_dim("grad_output" if backward else "self")
    if where is None:
        call.require_public(*(("src",) if scatter else ()))
        return PUBLIC
    rank = len(call.out.shape) if backward else call.rank("self")
    dim = call["dim"] % rank
    if backward:
        return PerSample(where + (dim <= where))
    if dim == where:
        raise call.refuse("one sample is picked out of the batch")
    if scatter:
        call.require_rows(where - (dim < where), "src")
        return PerSample(where)
    return PerSample(where - (dim < where))


@rule(
    "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk",
    "unsafe_split_with_sizes",
)  # fmt: skip
def split(call: Call) -> list[Value]:
    where = call.rows_dim("self")
    found: Value = PUBLIC
    if where is not None:
        dim = call["dim"] % call.rank("self")
        if dim == where:
            raise call.refuse()
        found = PerSample(where - (call.name.startswith("aten::unbind") and dim < where))
    return [found] * len(call.out)


@rule("cat", "concat", "stack")
def join(call: Call) -> Value:
    """All of them hold samples in the same dimension, and are not put behind each other in that one."""
    nodes, rank = call["tensors"], len(call.out.shape)
    values = [call.value_of(n) for n in nodes]
    if all(v is PUBLIC for v in values):
        return PUBLIC
    first, dim, new = values[0], call["dim"] % rank, "stack" in call.name
    if not isinstance(first, PerSample) or any(v != first for v in values) or (dim == first.dim and not new):
        raise call.refuse()
    return PerSample(first.dim + (new and dim <= first.dim))


@rule("unfold", "unfold_backward", sizes=("input_sizes",))
def unfold(call: Call) -> Value:
    backward = "grad_in" in call.arguments
    where = call.rows_dim("grad_in" if backward else "self")
    if where is None:
        return PUBLIC
    rank = len(call.out.shape) if backward else call.rank("self")
    if call["dim" if backward else "dimension"] % rank == where:
        raise call.refuse()
    return PerSample(where)


@rule("diagonal")
def diagonal(call: Call) -> Value:
    where, rank = call.rows_dim("self"), call.rank("self")
    if where is None:
        return PUBLIC
    dims = positive([call["dim1"], call["dim2"]], rank)
    if where in dims:
        raise call.refuse()
    return PerSample(where - sum(d < where for d in dims))


@rule("constant_pad_nd")
def constant_pad(call: Call) -> Value:
    where = call.rows_dim("self")
    if where is None:
        return PUBLIC
    padded = call["pad"][2 * (call.rank("self") - 1 - where) :][:2]
    if any(isinstance(p, fx.Node) or p != 0 for p in padded):
        raise call.refuse()
    return PerSample(where)


@rule("_assert_tensor_metadata")
def nothing(call: Call) -> None:
    """It returns nothing."""


# Gathering and scattering.


@rule("embedding")
def embedding(call: Call) -> Value:
    """Rows of a public table: one list of them for every sample."""
    call.require_public("weight")
    where = call.rows_dim("indices")
    return PUBLIC if where is None else PerSample(where)


def _place(call: Call, indices: list[Any], table: Any) -> Value:
    """Where samples lie in ``table[indices]``."""
    used = [i for i, index in enumerate(indices) if index is not None]
    given = [indices[i] for i in used]
    if any(n.meta["val"].dtype in (torch.bool, torch.uint8) for n in given):
        raise call.refuse("a mask picks entries out of a tensor")
    block = max((len(n.meta["val"].shape) for n in given), default=0)
    beside = not used or used == list(range(used[0], used[-1] + 1))
    first = used[0] if beside and used else 0
    inside, own = call.aligned(given, block), call.value_of(table)
    if own is PUBLIC:
        return PUBLIC if inside is None else PerSample(first + inside)
    if not isinstance(own, PerSample) or inside is not None or own.dim in used:
        raise call.refuse("samples are picked by their place in the batch")
    ahead = sum(i < own.dim for i in used)
    return PerSample(own.dim - ahead + (block if not beside or first < own.dim else 0))


@rule("index", "_unsafe_index")
def index(call: Call) -> Value:
    return _place(call, as_list(call["indices"]), call["self"])


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(call: Call) -> Value:
    """Values go where reading at the same indices would find them; each sample's into its own."""
    there = _place(call, as_list(call["indices"]), call["self"])
    own = call.value("self")
    if own is PUBLIC:
        if there is not PUBLIC:
            raise call.refuse("samples are written into one tensor")
        call.require_public("values")
        return PUBLIC
    read = len(call.shape("self")) - sum(i is not None for i in as_list(call["indices"]))
    read += max((len(n.meta["val"].shape) for n in as_list(call["indices"]) if n is not None), default=0)
    if call.value("values") is not PUBLIC and call.aligned([call["values"]], read) != there.dim:  # type: ignore[union-attr]
        raise call.refuse("samples are written into each other's places")
    return own  # type: ignore[no-any-return]


@rule("gather", "scatter", "scatter_add", "scatter_reduce")
def gather(call: Call) -> Value:
    """Along another dimension than the samples', which lie in the same one of all arguments; or from a public table."""
    names = [n for n in ("self", "index", "src") if is_tensor(call.get(n))]
    values = [call.value(n) for n in names]
    if all(v is PUBLIC for v in values):
        call.require_public("value")
        return PUBLIC
    dim = call["dim"] % max(1, call.rank("self"))
    where = call.rows_dim("index")
    if call.name == "aten::gather" and values[0] is PUBLIC and where == dim:
        return PerSample(dim)
    call.require_public("value")
    if where is None or dim == where or any(v != PerSample(where) for v in values):
        raise call.refuse()
    if not all(same_size(call.shape(n)[where], call.shape("self")[where]) for n in names):
        raise call.refuse()
    return PerSample(where)


@rule("index_select", "index_add", "index_copy", "index_fill")
def index_select(call: Call) -> Value:
    where, chosen, rank = call.rows_dim("self"), call.rows_dim("index"), call.rank("self")
    dim = call["dim"] % max(1, rank)
    if call.name == "aten::index_select" and where is None:
        return PUBLIC if chosen is None else PerSample(dim)
    source = next((n for n in ("source", "value") if n in call.arguments), None)
    if where is None:
        call.require_public("index", *((source,) if source else ()))
        return PUBLIC
    if chosen is not None or dim == where:
        raise call.refuse("samples are picked by their place in the batch")
    if source == "source":
        call.require_rows(where, source)
    elif source:
        call.require_public(source)
    return PerSample(where)


@rule("tril", "triu")
def triangle(call: Call) -> Value:
    return within_last(call, "self", 2)


def within_last(call: Call, name: str, count: int) -> Value:
    """Value an operation within the last dimensions, of which none is the samples'."""
    where = call.rows_dim(name)
    if where is None:
        return PUBLIC
    if where >= call.rank(name) - count:
        raise call.refuse()
    return PerSample(where)
