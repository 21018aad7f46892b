"""How each ATen operation treats samples that lie in one dimension of its arguments; see ``dataflow``.

A rule returns where samples lie in the results, or refuses. What a rule does not say is refused: it is held against the
shapes of the results afterwards, and every argument that is computed from samples must be one that the rule asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from modelmix.gradients.dataflow import OPAQUE, PUBLIC, Call, PerSample, Value, rule, same_size


def as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


def positive(dims: Any, rank: int) -> list[int]:
    return [d % rank for d in as_list(dims)] if rank else []


def is_tensor(node: Any) -> bool:
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
    found = [PerSample(where) if len(t.shape) == rank and call.growing(t.shape) else OPAQUE for t in results]
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
        dims = positive(call.get("dim"), rank)
        if not dims or where in dims:
            raise call.refuse()
        found = PerSample(where if call.get("keepdim") else where - sum(d < where for d in dims))
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
        dims = positive(call["dims" if "dims" in call.arguments else "dim"], rank)
        if where in dims or not dims or any(len(n.meta["val"].shape) != rank for n in call.tensors()):
            raise call.refuse()
        found = PerSample(where)
    return [found] * len(call.out) if isinstance(call.out, tuple | list) else found
