"""What a loop of one's own must not do for an epsilon to be true: its loader and its optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from modelmix.errors import ModelMixError, UnprovedError
from modelmix.gradients.memory import SAME_SET
from modelmix.training.rules import Rule
from modelmix.training.sampling import POISSON

ONE_DRAW = "every step uses one fresh draw, and every draw is a step"


def check_loader(loader: Any) -> None:
    """Refuse a loader whose samples would not all have the same chance in a Poisson draw."""
    if not isinstance(loader, DataLoader):
        raise ModelMixError(
            f"{type(loader).__name__} is not a DataLoader: give the loop's torch.utils.data.DataLoader."
        )
    fix = "Use a plain DataLoader over a map-style dataset; every sample must have the same chance."
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UnprovedError(POISSON, f"{type(loader).__name__} has a way of its own to make batches.", fix)
    if isinstance(loader.dataset, IterableDataset):
        raise UnprovedError(POISSON, "an IterableDataset decides itself which sample comes next.", fix)
    if type(loader.batch_sampler) is not BatchSampler:
        raise UnprovedError(POISSON, "the loader has a batch sampler of its own.", fix)
    sampler = loader.sampler
    usual = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if not usual or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        raise UnprovedError(POISSON, f"the loader draws with a {type(sampler).__name__} of its own.", fix)


def check_optimizer(optimizer: Optimizer, model: nn.Module, rule: Rule) -> None:
    """Refuse an optimizer that trains other parameters, or that would remember what was not mixed."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in held:
            raise UnprovedError(
                SAME_SET, f"{name} is trainable and not in the optimizer.", "Freeze it, or give it to the optimizer."
            )
    if held - {id(p) for p in model.parameters()}:  # what is frozen gets no gradient, so that nothing happens to it
        raise UnprovedError(
            SAME_SET, "the optimizer holds parameters that are not the model's.", "Give it the model's only."
        )
    every = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    if any(every):
        raise UnprovedError(
            "released states come from noisy, mixed steps only",
            "there are hooks around the optimizer's step, of its own or for all optimizers, which may write to the "
            "weights.",
            "Remove them, and do what they do after step().",
        )
    if isinstance(optimizer, LBFGS):
        raise UnprovedError(
            ONE_DRAW, "LBFGS evaluates a batch several times in one step.", "Use an optimizer without a closure."
        )
    if not rule.mixes:
        return
    state = "no state may carry an unmixed noisy gradient across steps"
    if type(optimizer) is not SGD:
        raise UnprovedError(
            state,
            f"{type(optimizer).__name__} remembers gradients, or may.",
            "Use torch.optim.SGD without momentum, or a mechanism without mixing.",
        )
    for group in optimizer.param_groups:
        if group["momentum"] or group["nesterov"]:
            raise UnprovedError(
                state,
                f"SGD's momentum {group['momentum']:g} is a buffer of unmixed noisy gradients.",
                "Use SGD without momentum and make_private(..., rule=mm.Rule(momentum=...)), which is computed from "
                "released states.",
            )
        if group.get("maximize"):
            raise ModelMixError("maximize=True is not supported: negate the loss.")
    if len({(float(group["lr"]), float(group["weight_decay"])) for group in optimizer.param_groups}) != 1:
        raise UnprovedError(
            "one step has one mixing width in units of its learning rate",
            "the optimizer's groups have different learning rates or weight decays.",
            "Use one for all groups.",
        )
