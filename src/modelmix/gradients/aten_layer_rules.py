"""Rules of ``dataflow`` for what layers are made of: products, convolutions, norms, pooling, attention, losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from modelmix.gradients.aten_view_rules import within_last
from modelmix.gradients.dataflow import OPAQUE, PUBLIC, Call, PerSample, Value, rule, same_size

# Products.


def _product(call: Call, left: str, right: str) -> Value:
    """Of two matrices, or of two lists of them: the dimension that is summed over is not the samples'."""
    a, b, rank = call.rows_dim(left), call.rows_dim(right), call.rank(left)
    if a is None and b is None:
        return PUBLIC
    if a == rank - 1 or b == rank - 2:
        raise call.refuse("a matrix product sums over the batch")
    if rank == 3 and (a == 0 or b == 0):  # a list of products, one or several for every sample
        if a != b:
            raise call.refuse("samples meet in a matrix product")
        return PerSample(0)
    if a is not None and b is not None:
        raise call.refuse("samples meet in a matrix product")
    return PerSample(rank - 2 if a is not None else rank - 1)


@rule("mm", "bmm")
def product(call: Call) -> Value:
    return _product(call, "self", "mat2")


@rule("addmm", "baddbmm")
def product_and_sum(call: Call) -> Value:
    names = ("mat1", "mat2") if call.name.startswith("aten::addmm") else ("batch1", "batch2")
    found = _product(call, *names)
    added = call.aligned([call["self"]], len(call.out.shape))
    if added is None:
        return found
    if isinstance(found, PerSample) and found.dim != added:
        raise call.refuse("samples meet by broadcasting")
    return PerSample(added)


@rule("mv")
def matrix_vector(call: Call) -> Value:
    call.require_public("vec")
    where = call.rows_dim("self")
    if where == 1:
        raise call.refuse("a matrix product sums over the batch")
    return PUBLIC if where is None else PerSample(where)


@rule("linear")
def linear(call: Call) -> Value:
    call.require_public("weight", "bias")
    return within_last(call, "input", 1)


# Convolutions.


@rule("convolution", "_convolution")
def convolution(call: Call) -> Value:
    """One image after the other."""
    call.require_public("weight", "bias")
    where = call.rows_dim("input")
    if where is None:
        return PUBLIC
    if where != 0 or call.rank("input") != call.rank("weight"):
        raise call.refuse("a convolution runs over the batch")
    return PerSample(0)


@rule("convolution_backward", sizes=("bias_sizes",))
def convolution_backward(call: Call) -> list[Any]:
    if all(call.value(n) is PUBLIC for n in ("grad_output", "input", "weight")):
        return [PUBLIC if isinstance(t, Tensor) else None for t in call.out]
    call.require_public("weight")
    call.require_rows(0, "grad_output")
    call.require_rows_or_public(0, "input")
    return _only_first(call)


def _only_first(call: Call) -> list[Any]:
    """The gradient of the input; those of weights are sums over the batch."""
    if any(list(call["output_mask"])[1:]):
        raise call.refuse("the gradient of a weight is summed over the batch")
    return [PerSample(0) if isinstance(t, Tensor) and i == 0 else None for i, t in enumerate(call.out)]


# Norms.


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> list[Any]:
    call.require_public("weight", "bias")
    found = within_last(call, "input", len(call["normalized_shape"]))
    return [found] * len(call.out)


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(call: Call) -> list[Any]:
    call.require_public("weight", "bias")
    found = within_last(call, "grad_out", len(call["normalized_shape"]))
    if not isinstance(found, PerSample):
        raise call.refuse()
    for name in ("input", "mean", "rstd"):
        if name in call.arguments:
            call.require_rows(found.dim, name)
    if any(list(call["output_mask"])[1:]):
        raise call.refuse("the gradient of a weight is summed over the batch")
    return [found if isinstance(t, Tensor) and i == 0 else None for i, t in enumerate(call.out)]


def _group_norm_shape(call: Call) -> None:
    shape = call.shape("input")
    count = call["N"].meta["val"] if isinstance(call["N"], fx.Node) else call["N"]
    if not same_size(count, shape[0]) or call["C"] != shape[1]:
        raise call.refuse("group_norm of another shape than its input")


@rule("native_group_norm", sizes=("N",))
def group_norm(call: Call) -> list[Any]:
    call.require_public("weight", "bias")
    if call.value("input") is PUBLIC:
        return [PUBLIC] * 3
    call.require_rows(0, "input")
    _group_norm_shape(call)
    return [PerSample(0)] * 3


@rule("native_group_norm_backward", sizes=("N",))
def group_norm_backward(call: Call) -> list[Any]:
    call.require_public("weight")
    call.require_rows(0, "grad_out", "input", "mean", "rstd")
    _group_norm_shape(call)
    return _only_first(call)


_STATISTICS = ("running_mean", "running_var", "weight", "bias", "save_mean", "save_invstd", "save_var")


def _channels(call: Call, *images: str) -> bool:
    """Whether every sample has channels of its own, as in instance norm: then statistics are a sample's own too."""
    own = [call.value(n) for n in images]
    if not any(isinstance(v, PerSample) and v.dim == 1 for v in own):
        return False
    call.require_rows(1, *images)
    call.require_rows(0, *(n for n in _STATISTICS if n in call.arguments))
    return True


@rule(
    "native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "cudnn_batch_norm",
    "_batch_norm_no_update",
)  # fmt: skip
def batch_norm(call: Call) -> list[Any]:
    """With statistics that stay as they were, or of channels that belong to one sample."""
    images = "input"
    training = call.get("training", False) and "no_training" not in call.name and "no_update" not in call.name
    if call.value(images) is PUBLIC and not training:
        return [PUBLIC] * len(call.out)
    scratch = [OPAQUE] * (len(call.out) - 3)
    if _channels(call, images):
        if training and call.get("running_mean") is not None:
            raise call.refuse("statistics of samples are kept")
        return [PerSample(1), *(PerSample(0) if call.growing(t.shape) else OPAQUE for t in call.out[1:3]), *scratch]
    if training or call.get("running_mean") is None:
        raise call.refuse("batch norm uses statistics of the batch")
    call.require_public("running_mean", "running_var", "weight", "bias")
    call.require_rows(0, images)
    return [PerSample(0), OPAQUE, OPAQUE, *scratch]


@rule("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
def batch_norm_backward(call: Call) -> list[Any]:
    gradient = "grad_out" if "grad_out" in call.arguments else "grad_output"
    training = call.get("train", call.get("update", True))
    if training:
        if not _channels(call, gradient, "input"):
            raise call.refuse("batch norm uses statistics of the batch")
        return [None if not isinstance(t, Tensor) else PerSample(1 if i == 0 else 0) for i, t in enumerate(call.out)]
    call.require_public("running_mean", "running_var", "weight")
    call.require_rows(0, gradient, "input")
    return _only_first(call)


# Pooling, padding and scaling of images: within the last dimensions.

_WITHIN = {
    1: "reflection_pad1d replication_pad1d upsample_nearest1d upsample_linear1d _adaptive_avg_pool1d avg_pool1d "
    "_upsample_nearest_exact1d",
    2: "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
    "reflection_pad2d replication_pad2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    3: "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d "
    "reflection_pad3d replication_pad3d upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d "
    "pixel_shuffle pixel_unshuffle",
}
_COUNT = {name: count for count, names in _WITHIN.items() for name in names.split()}


def _image(call: Call) -> Value:
    """One more dimension than an operation works in: channels, which samples must not be counted as."""
    name = call.name.removeprefix("aten::").removesuffix("_backward")
    count = _COUNT[name] + (not name.startswith("pixel"))
    given = call.tensors()
    found = {call.value_of(n) for n in given}
    if found == {PUBLIC}:
        return PUBLIC
    ranks = {len(n.meta["val"].shape) for n in given}
    if len(found) != 1 or len(ranks) != 1 or OPAQUE in found:
        raise call.refuse(f"{name} of tensors that hold samples in different dimensions")
    (value,), (rank,) = found, ranks
    if not isinstance(value, PerSample) or value.dim >= rank - count:
        raise call.refuse(f"{name} runs over the batch")
    return value


@rule(*_COUNT)
def image(call: Call) -> Any:
    found = _image(call)
    return [found] * len(call.out) if isinstance(call.out, tuple | list) else found


@rule(*(f"{name}_backward" for name in _COUNT if not name.startswith("pixel")), sizes=("input_size",))
def image_backward(call: Call) -> Value:
    return _image(call)


@rule("im2col", "col2im")
def windows(call: Call) -> Value:
    where = call.rows_dim("self")
    if where is None:
        return PUBLIC
    if where != 0 or call.rank("self") != (4 if call.name == "aten::im2col" else 3):
        raise call.refuse()
    return PerSample(0)


# Losses with one entry for every sample.


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(call: Call) -> list[Any]:
    call.require_public("weight")
    if call.value("self") is PUBLIC and call.value("target") is PUBLIC:
        return [PUBLIC, PUBLIC]
    if call["reduction"] != 0 or call.rank("self") < 2:
        raise call.refuse("a loss reduced over the batch")
    call.require_rows(0, "self", "target")
    return [PerSample(0), OPAQUE]  # the total weight means nothing where losses are not reduced


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Value:
    call.require_public("weight")
    if call["reduction"] != 0 or call.rank("self") < 2:
        raise call.refuse("a loss reduced over the batch")
    call.require_rows(0, "grad_output", "self", "target")
    return PerSample(0)


# Attention: queries, keys and values of one sample meet each other.

_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def _public_masks(call: Call) -> bool:
    """Whether a mask is public; another one must have an own one for every sample."""
    masks = [n for n in ("attn_mask", "attn_bias") if call.get(n) is not None]
    for mask in masks:
        call.require_rows_or_public(0, mask)
        if call.value(mask) is not PUBLIC and call.rank(mask) != 4:
            raise call.refuse("samples meet by broadcasting")
    return any(call.value(mask) is PUBLIC for mask in masks)


@rule(*_ATTENTION)
def attention(call: Call) -> list[Any]:
    if all(call.value_of(n) is PUBLIC for n in call.tensors()):
        return [PUBLIC if isinstance(t, Tensor) else None for t in call.out]
    call.require_rows(0, "query", "key", "value")
    _public_masks(call)
    found = []
    for i, t in enumerate(call.out):
        own = isinstance(t, Tensor) and call.growing(t.shape) and i < 2
        found.append(PerSample(0) if own else OPAQUE if isinstance(t, Tensor) else None)
    return found


@rule(*(f"{name}_backward" for name in _ATTENTION))
def attention_backward(call: Call) -> list[Any]:
    gradient = "grad_out" if "grad_out" in call.arguments else "grad_out_"
    call.require_rows(0, gradient, "query", "key", "value", "out", "logsumexp")
    public_mask = _public_masks(call)
    found: list[Any] = []
    for i, t in enumerate(call.out):
        if i >= 3 and public_mask and isinstance(t, Tensor) and t.numel():
            raise call.refuse("the gradient of a mask is summed over the batch")
        found.append(None if not isinstance(t, Tensor) else PerSample(0) if call.growing(t.shape) else OPAQUE)
    return found


# Operations of ours: one row after the other, by their definition in ``kernels``.


@rule("modelmix::group_norm", "modelmix::group_norm_backward", "modelmix::conv_weight", "modelmix::products")
def ours(call: Call) -> Any:
    call.require_public("weight", "bias")
    names = [n for n in call.arguments if n not in ("weight", "bias") and isinstance(call[n], fx.Node)]
    call.require_rows(0, *names)
    return [PerSample(0)] * len(call.out) if isinstance(call.out, tuple | list) else PerSample(0)
