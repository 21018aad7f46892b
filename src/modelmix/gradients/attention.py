"""``nn.MultiheadAttention`` in steps, so that its projections can be followed one by one."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor, nn

from modelmix.gradients.layers import cannot_follow


class Project(Protocol):
    """``rows`` of a matrix and its bias, named as attributes of ``layer``, applied to x."""

    def __call__(self, layer: nn.Module, x: Tensor, weight: str, bias: str, rows: slice) -> Tensor: ...


def forward(
    module: nn.MultiheadAttention,
    project: Project,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute what the module computes, with every projection done by ``project``."""
    if query.dim() != 3 or module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise cannot_follow(module, "it needs batches, and no bias_k, bias_v or add_zero_attn")
    if is_causal and attn_mask is None:
        raise cannot_follow(module, "is_causal needs attn_mask")
    same_key, same_value = key is query, value is key
    if not module.batch_first:
        query = query.transpose(0, 1)
        key = query if same_key else key.transpose(0, 1)
        value = key if same_value else value.transpose(0, 1)
    q, k, v = _projected(module, project, query, key, value, same_key, same_value)
    n, length, width = q.shape
    heads, size = module.num_heads, width // module.num_heads
    q, k, v = (t.reshape(n, t.shape[1], heads, size).transpose(1, 2) for t in (q, k, v))
    mask = _mask(attn_mask, key_padding_mask, n, heads, q.dtype)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(size)
        weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
        out = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    out = out.transpose(1, 2).reshape(n, length, width)
    out = project(module.out_proj, out, "weight", "bias", slice(None))
    return (out if module.batch_first else out.transpose(0, 1)), weights


def _projected(
    module: nn.MultiheadAttention,
    project: Project,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    same_key: bool,
    same_value: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = module.embed_dim
    if not module._qkv_same_embed_dim:
        raise cannot_follow(module, "it needs keys and values as wide as queries")
    if same_key and same_value:
        q, k, v = project(module, query, "in_proj_weight", "in_proj_bias", slice(None)).chunk(3, -1)
        return q, k, v
    rows = [slice(i * width, (i + 1) * width) for i in range(3)]
    q, k, v = (
        project(module, t, "in_proj_weight", "in_proj_bias", r) for t, r in zip((query, key, value), rows, strict=True)
    )
    return q, k, v


def _mask(attention: Tensor | None, padding: Tensor | None, n: int, heads: int, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to the scores, n x heads x length x keys or a shape that expands to it."""

    def added(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(dtype)
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)

    found = None
    if attention is not None:
        shape = attention.shape
        found = added(attention.reshape(n, heads, *shape[1:]) if attention.dim() == 3 else attention)
    if padding is not None:
        here = added(padding)[:, None, None, :]
        found = here if found is None else found + here
    return found
