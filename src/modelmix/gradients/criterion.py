"""What a criterion means when it is given one sample at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelmix.errors import ModelMixError
from modelmix.gradients.batch import Loss
from modelmix.gradients.vmap import call_model


def with_class_weights(loss: Loss) -> Loss:
    """Return the criterion in which class weights count, where torch would cancel them over one sample.

    torch divides the weighted sum over a batch by the weights of that batch, in which samples would meet; over one
    sample the weight of its class cancels. Here the weighted loss of a sample is divided by the number of its targets,
    so that a sample of a class with weight w counts w times. Every other criterion is returned as it is.
    """
    if type(loss) not in (nn.CrossEntropyLoss, nn.NLLLoss):  # a subclass has a meaning of its own
        return loss
    assert isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    if loss.weight is None or loss.reduction != "mean":
        return loss
    own, weight = loss, loss.weight
    function: Any = F.nll_loss if isinstance(own, nn.NLLLoss) else F.cross_entropy
    smoothing = {} if isinstance(own, nn.NLLLoss) else {"label_smoothing": own.label_smoothing}

    def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():  # probabilities of the classes, whose weights torch does not divide by
            plain: Tensor = own(outputs, targets)
            return plain
        ignored = own.ignore_index
        of_all = function(outputs, targets, weight=weight, ignore_index=ignored, reduction="sum", **smoothing)
        counted: Tensor = of_all / (targets != ignored).sum().clamp(min=1)
        return counted

    return weighted


def require_no_parameters(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> None:
    """Refuse a criterion that computes with parameters: the gradient that reaches them there would be lost.

    Args:
        inputs, targets: synthetic samples.

    Raises:
        ModelMixError: if the loss of outputs that need no gradient needs one.
    """
    try:
        with torch.no_grad():
            outputs = call_model(model, inputs)
        with torch.enable_grad():
            value = loss(tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, outputs), targets)
    except Exception:  # the engines say better what is wrong
        return
    if isinstance(value, Tensor) and value.requires_grad:
        raise ModelMixError(
            "the criterion computes with trained parameters, whose gradient there would be lost: give a penalty on the "
            "weights as weight_decay, and put parameters of the criterion into the model."
        )
