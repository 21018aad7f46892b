"""How each ATen operation treats samples that lie in one dimension of its arguments; see ``independence``.

A rule returns where samples lie in the results, or refuses. What a rule does not say is refused: it is held against the
shapes of the results afterwards, and every argument that is computed from samples must be one that the rule asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from modelmix.gradients.engines.independence import ALL, OPAQUE, PUBLIC, Call, Rows, Value, rule, same_size


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


def _positive(dims: Any, rank: int) -> list[int]:
    return [d % rank for d in _list(dims)] if rank else []


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


# Entry by entry, after broadcasting.

_POINTWISE = """
    abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min copysign cos cosh deg2rad digamma
    div elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac frexp ge gelu gt hardshrink
    hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf le
    leaky_relu lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
    logit lt masked_fill maximum minimum mish mul mvlgamma nan_to_num ne neg nextafter polygamma positive pow
    rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh
    softplus softshrink special_bessel_j0 special_entr special_erfcx special_i0e special_i1 special_i1e
    special_log_ndtr special_ndtri special_xlog1py special_zeta sqrt square sub tan tanh threshold trunc where xlogy
    _prelu_kernel real imag conj _conj _neg_view resolve_conj resolve_neg angle complex polar elu_backward
    gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward
    log_sigmoid_forward log_sigmoid_backward logit_backward mish_backward rrelu_with_noise_backward sigmoid_backward
    silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward _prelu_kernel_backward
    native_dropout native_dropout_backward _fused_dropout fill copy clone detach alias lift_fresh lift_fresh_copy
    lift _to_copy contiguous bernoulli zero squared_relu uniform normal exponential log_normal cauchy geometric
    random
"""


@rule(*_POINTWISE.split())
def pointwise(call: Call) -> Any:
    """Entry i of every result comes from entry i of every argument."""
    results = list(call.out) if isinstance(call.out, tuple | list) else [call.out]
    rank = max(len(t.shape) for t in results)
    where = call.aligned(call.tensors(), rank)
    if where is None:
        return [PUBLIC] * len(results) if isinstance(call.out, tuple | list) else PUBLIC
    if where < 0:
        raise call.refuse()
    found = [Rows(where) if len(t.shape) == rank and call.growing(t.shape) else OPAQUE for t in results]
    return found if isinstance(call.out, tuple | list) else found[0]


@rule(
    "mse_loss", "mse_loss_backward", "binary_cross_entropy", "binary_cross_entropy_backward", "smooth_l1_loss",
    "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward", "soft_margin_loss", "soft_margin_loss_backward",
)  # fmt: skip
def unreduced(call: Call) -> Any:
    """A loss entry by entry, unless it is reduced."""
    if call["reduction"] != 0:
        _all_public(call, "a loss reduced over the batch")
    return pointwise(call)


def _all_public(call: Call, otherwise: str) -> None:
    if any(call.value_of(n) is not PUBLIC for n in call.tensors()):
        raise call.refuse(otherwise)


# Constants and random draws.


@rule(
    "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "rand", "randn", "randint", "scalar_tensor",
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    sizes=("size",),
)  # fmt: skip
def created(call: Call) -> Value:
    """All entries are alike, or drawn independently, however many samples there are."""
    call.require_public(*(name for name in ("fill_value", "low", "high") if name in call.arguments))
    return call.of_shape(call.out.shape)


@rule(
    "arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "randperm", "hann_window",
    "hamming_window", "blackman_window", "bartlett_window", "kaiser_window",
)  # fmt: skip
def constant(call: Call) -> Value:
    """Numbers, of a fixed shape: no argument is computed from the number of samples."""
    return PUBLIC


_FILLS = ("fill_", "copy_", "zero_", "uniform_", "normal_", "bernoulli_", "random_", "exponential_")


@rule("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", sizes=("size", "stride"))
def uninitialised(call: Call) -> Value:
    """Memory that held something else before; it must be overwritten before anything reads it."""
    users = sorted(call.node.users)
    whole = users and isinstance(users[0].target, torch._ops.OpOverload)
    if not whole or users[0].args[0] is not call.node or users[0].target._opname not in _FILLS:  # type: ignore[union-attr]
        raise call.refuse("the model reads memory that it has not written")
    if "stride" in call.arguments and not _is_contiguous(call.out):
        raise call.refuse("places of a tensor may overlap")
    return call.of_shape(call.out.shape)


def _is_contiguous(t: torch.Tensor) -> bool:
    """Whether strides are those of rows behind each other, by their expressions: asking the numbers would guard."""
    expected: Any = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if not same_size(stride, expected):
            return False
        expected = expected * size
    return True


# Operations along some dimensions.


@rule(
    "sum", "mean", "amax", "amin", "prod", "any", "all", "var", "std", "var_mean", "std_mean", "logsumexp", "norm",
    "linalg_vector_norm", "max", "min", "argmax", "argmin", "median", "nanmedian", "mode", "kthvalue", "nansum",
    "count_nonzero", "aminmax",
)  # fmt: skip
def reduction(call: Call) -> Any:
    """Over dimensions that are not the samples'; over all of them if none is named."""
    several = isinstance(call.out, tuple | list)
    if "other" in call.arguments:  # max and min of two tensors
        return pointwise(call)
    found: Value = PUBLIC
    where = call.rows_dim("self")
    if where is not None:
        rank = call.rank("self")
        dims = _positive(call.get("dim"), rank)
        if not dims or where in dims:
            raise call.refuse()
        found = Rows(where if call.get("keepdim") else where - sum(d < where for d in dims))
    return [found] * len(call.out) if several else found


@rule(
    "_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "softmax",
    "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort", "topk", "glu",
    "glu_backward", "flip", "roll", "_fft_r2c", "_fft_c2r", "_fft_c2c",
)  # fmt: skip
def along(call: Call) -> Any:
    """Results have the dimensions of the argument, and mix entries along some of them."""
    first = call.tensors()[0]
    rank = len(first.meta["val"].shape)
    where = call.aligned(call.tensors(), rank)
    found: Value = PUBLIC
    if where is not None:
        dims = _positive(call["dims" if "dims" in call.arguments else "dim"], rank)
        if where in dims or not dims or any(len(n.meta["val"].shape) != rank for n in call.tensors()):
            raise call.refuse()
        found = Rows(where)
    return [found] * len(call.out) if isinstance(call.out, tuple | list) else found


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
    return Rows(there[0])


@rule("permute", "transpose", "t", "movedim", "swapaxes", "numpy_T")
def permute(call: Call) -> Value:
    where, rank = call.rows_dim("self"), call.rank("self")
    if where is None:
        return PUBLIC
    order = list(range(rank))
    if call.name.startswith("aten::permute"):
        order = _positive(call["dims"], rank)
    elif call.name.startswith("aten::transpose"):
        a, b = _positive([call["dim0"], call["dim1"]], rank)
        order[a], order[b] = b, a
    elif call.name in ("aten::t", "aten::t_"):
        order.reverse()
    else:
        raise call.refuse(f"{call.name} is not known to keep samples apart")
    return Rows(order.index(where))


@rule("expand", sizes=("size",))
def expand(call: Call) -> Value:
    """A public tensor that is repeated for every sample holds samples from then on."""
    where, rank = call.rows_dim("self"), len(call.out.shape)
    if where is not None:
        return Rows(where + rank - call.rank("self"))
    there = call.growing(call.out.shape)
    if not there:
        return PUBLIC
    own = there[0] - (rank - call.rank("self"))
    if len(there) > 1 or (own >= 0 and call.shape("self")[own] != 1):
        raise call.refuse("a constant has an entry for every place in the batch")
    return Rows(there[0])


@rule("repeat", sizes=("repeats",))
def repeat(call: Call) -> Value:
    """Not of the samples' dimension, whose order would change; a public tensor may be repeated for every sample."""
    where, rank = call.rows_dim("self"), len(call.out.shape)
    if where is None:
        return call.of_shape(call.out.shape)
    there = where + rank - call.rank("self")
    if call["repeats"][there] != 1:
        raise call.refuse()
    return Rows(there)


@rule("unsqueeze")
def unsqueeze(call: Call) -> Value:
    where = call.rows_dim("self")
    if where is None:
        return PUBLIC
    return Rows(where + (call["dim"] % len(call.out.shape) <= where))


@rule("squeeze")
def squeeze(call: Call) -> Value:
    """At least two samples are always run, so that theirs is never a dimension of size one."""
    where = call.rows_dim("self")
    if where is None:
        return PUBLIC
    shape = call.shape("self")
    dims = _positive(call["dim"], len(shape)) if "dim" in call.arguments else range(len(shape))
    return Rows(where - sum(d < where and shape[d] == 1 for d in dims))


@rule("slice", "slice_backward", "slice_scatter", sizes=("end", "input_sizes"))
def slice_(call: Call) -> Value:
    """Of another dimension than the samples', or all of them."""
    name = "grad_output" if "grad_output" in call.arguments else "self"
    where = call.rows_dim(name)
    if "src" in call.arguments:
        where = call.aligned([call["self"], call["src"]], call.rank("self"))
        if where is not None and not (call.value("self") == call.value("src") == Rows(where)):
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
    return Rows(where)


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
        return Rows(where + (dim <= where))
    if dim == where:
        raise call.refuse("one sample is picked out of the batch")
    if scatter:
        call.require_rows(where - (dim < where), "src")
        return Rows(where)
    return Rows(where - (dim < where))


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
        found = Rows(where - (call.name.startswith("aten::unbind") and dim < where))
    return [found] * len(call.out)


@rule("cat", "concat", "stack")
def join(call: Call) -> Value:
    """All of them hold samples in the same dimension, and are not put behind each other in that one."""
    nodes, rank = call["tensors"], len(call.out.shape)
    values = [call.value_of(n) for n in nodes]
    if all(v is PUBLIC for v in values):
        return PUBLIC
    first, dim, new = values[0], call["dim"] % rank, "stack" in call.name
    if not isinstance(first, Rows) or any(v != first for v in values) or (dim == first.dim and not new):
        raise call.refuse()
    return Rows(first.dim + (new and dim <= first.dim))


@rule("unfold", "unfold_backward", sizes=("input_sizes",))
def unfold(call: Call) -> Value:
    backward = "grad_in" in call.arguments
    where = call.rows_dim("grad_in" if backward else "self")
    if where is None:
        return PUBLIC
    rank = len(call.out.shape) if backward else call.rank("self")
    if call["dim" if backward else "dimension"] % rank == where:
        raise call.refuse()
    return Rows(where)


@rule("diagonal")
def diagonal(call: Call) -> Value:
    where, rank = call.rows_dim("self"), call.rank("self")
    if where is None:
        return PUBLIC
    dims = _positive([call["dim1"], call["dim2"]], rank)
    if where in dims:
        raise call.refuse()
    return Rows(where - sum(d < where for d in dims))


@rule("constant_pad_nd")
def constant_pad(call: Call) -> Value:
    where = call.rows_dim("self")
    if where is None:
        return PUBLIC
    padded = call["pad"][2 * (call.rank("self") - 1 - where) :][:2]
    if any(isinstance(p, fx.Node) or p != 0 for p in padded):
        raise call.refuse()
    return Rows(where)


@rule("_assert_tensor_metadata")
def nothing(call: Call) -> None:
    """It returns nothing."""


# Gathering and scattering.


@rule("embedding")
def embedding(call: Call) -> Value:
    """Rows of a public table."""
    call.require_public("weight")
    where = call.rows_dim("indices")
    return PUBLIC if where is None else Rows(where)


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
        return PUBLIC if inside is None else Rows(first + inside)
    if not isinstance(own, Rows) or inside is not None or own.dim in used:
        raise call.refuse("samples are picked by their place in the batch")
    ahead = sum(i < own.dim for i in used)
    return Rows(own.dim - ahead + (block if not beside or first < own.dim else 0))


@rule("index", "_unsafe_index")
def index(call: Call) -> Value:
    return _place(call, _list(call["indices"]), call["self"])


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(call: Call) -> Value:
    """Values go where reading at the same indices would find them; each sample's into its own."""
    there = _place(call, _list(call["indices"]), call["self"])
    own = call.value("self")
    if own is PUBLIC:
        if there is not PUBLIC:
            raise call.refuse("samples are written into one tensor")
        call.require_public("values")
        return PUBLIC
    read = len(call.shape("self")) - sum(i is not None for i in _list(call["indices"]))
    read += max((len(n.meta["val"].shape) for n in _list(call["indices"]) if n is not None), default=0)
    if call.value("values") is not PUBLIC and call.aligned([call["values"]], read) != there.dim:  # type: ignore[union-attr]
        raise call.refuse("samples are written into each other's places")
    return own  # type: ignore[no-any-return]


@rule("gather", "scatter", "scatter_add", "scatter_reduce")
def gather(call: Call) -> Value:
    """Along another dimension than the samples', which lie in the same one of all arguments; or from a public table."""
    names = [n for n in ("self", "index", "src") if _is_tensor(call.get(n))]
    values = [call.value(n) for n in names]
    if all(v is PUBLIC for v in values):
        call.require_public("value")
        return PUBLIC
    dim = call["dim"] % max(1, call.rank("self"))
    where = call.rows_dim("index")
    if call.name == "aten::gather" and values[0] is PUBLIC and where == dim:
        return Rows(dim)
    call.require_public("value")
    if where is None or dim == where or any(v != Rows(where) for v in values):
        raise call.refuse()
    if not all(same_size(call.shape(n)[where], call.shape("self")[where]) for n in names):
        raise call.refuse()
    return Rows(where)


@rule("index_select", "index_add", "index_copy", "index_fill")
def index_select(call: Call) -> Value:
    where, chosen, rank = call.rows_dim("self"), call.rows_dim("index"), call.rank("self")
    dim = call["dim"] % max(1, rank)
    if call.name == "aten::index_select" and where is None:
        return PUBLIC if chosen is None else Rows(dim)
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
    return Rows(where)


@rule("tril", "triu")
def triangle(call: Call) -> Value:
    return within_last(call, "self", 2)


def within_last(call: Call, name: str, count: int) -> Value:
    """An operation within the last dimensions, of which none is the samples'."""
    where = call.rows_dim(name)
    if where is None:
        return PUBLIC
    if where >= call.rank(name) - count:
        raise call.refuse()
    return Rows(where)
