"""The systems that are compared: ModelMix, Opacus, vmap through torch.compile, and training without privacy.

A private system's step computes the sum over the batch of every gradient clipped to the norm c, without noise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cases import TRUNCATION, Problem, Setting, loss_of_one
from peers_jax import jax_vmap
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Data = tuple[Tensor, Tensor]
LADDER = ("bfloat16", "autocast", "float32")
BOTH = ("channels_last", "contiguous")


@dataclass(frozen=True)
class Prepared:
    """A system that is ready.

    Args:
        step: does the work for one batch and returns what ``vector`` and ``wait`` are given.
        vector: the clipped sum in the order of the model's parameters; None for a system that is not private.
        wait: returns when the work is done.
        gib: peak of memory where the system knows it better than torch does.
        note: what a reader of the numbers should know.
        again: the step on other samples, without setting up anew.
    """

    step: Callable[[], Any]
    vector: Callable[[Any], Tensor] | None
    wait: Callable[[Any], None]
    gib: float | None = None
    note: str = ""
    again: Callable[[Data], Callable[[], Any]] | None = None


@dataclass(frozen=True)
class System:
    """Something to measure.

    Args:
        kind: "ours", "peer" or "ordinary".
        prepare: sets it up.
        p: the truncation of its clip; 0 for training without privacy.
        precisions: tried in this order until one works.
        layouts: of images; the fastest one that works is kept.
        holds: "chunk", "vmap_chunk" or "batch": the samples it holds at once.
        modes: of torch.compile, on an accelerator; the fastest one that works is kept. reduce-overhead is CUDA graphs.
    """

    kind: str
    prepare: Callable[[Problem, Setting, Data], Prepared]
    p: int
    precisions: tuple[str, ...] = LADDER
    layouts: tuple[str, ...] = BOTH
    holds: str = "batch"
    modes: tuple[str, ...] = ("default",)


def wait_for(device: torch.device) -> Callable[[Any], None]:
    return (lambda _: torch.cuda.synchronize()) if device.type == "cuda" else (lambda _: None)


def place(model: nn.Module, problem: Problem, setting: Setting) -> nn.Module:
    model = model.to(problem.device, torch.bfloat16 if setting.precision == "bfloat16" else torch.float32)
    if problem.image and setting.layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    return model.train()


def around(problem: Problem, setting: Setting) -> Callable[[], AbstractContextManager[Any]]:
    """The context that a forward pass runs in."""
    if setting.precision == "autocast":
        return partial(torch.autocast, problem.device.type, dtype=torch.bfloat16)
    return nullcontext


def parts_of(data: Data, size: int) -> list[Data]:
    return list(zip(*(t.split(size) for t in data), strict=True))


def ours(problem: Problem, setting: Setting, data: Data, *, p: int) -> Prepared:
    from modelmix.gradients import Batch, Engine
    from modelmix.gradients.clip import Clip
    from modelmix.gradients.parameters import FlatParameters

    model = problem.model()
    flat = FlatParameters(model)
    parameters = flat.views(flat.read())
    engine = Engine(
        model,
        nn.CrossEntropyLoss(),
        name="auto",
        precision=setting.precision,
        compiled=True if problem.device.type == "cuda" else None,
        probe=(problem.x[:3], problem.y[:3]),
    )
    clip = Clip(problem.clip, p)
    ones = torch.ones(setting.chunk, dtype=torch.float64, device=problem.device)

    def step_for(data: Data) -> Callable[[], Tensor]:
        parts = [(x, y, ones) for x, y in parts_of(data, setting.chunk)]
        x, y, _ = parts[-1]
        if (short := setting.chunk - len(y)) > 0:
            # As in training, every chunk has one shape: what is missing is filled with samples that weigh nothing.
            weights = torch.cat([ones[short:], torch.zeros_like(ones[:short])])
            index = torch.arange(setting.chunk, device=problem.device) % len(y)
            parts[-1] = x[index], y[index], weights

        def step() -> Tensor:
            total = torch.zeros(flat.size, dtype=torch.float64, device=problem.device)
            for x, y, weights in parts:
                total += engine(parameters, Batch(x, y, weights), clip).total
            return total

        return step

    return Prepared(
        step_for(data), lambda total: total, wait_for(problem.device), None, f"engine {engine.name}", step_for
    )


def opacus(problem: Problem, setting: Setting, data: Data, *, mode: str) -> Prepared:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = problem.model()
    names = [name for name, _ in model.named_parameters()]
    notes = []
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.MultiheadAttention):
                setattr(module, name, SplitAttention(child))
                notes = ["attention of four Linear layers"]
    model = place(model, problem, setting)
    without = {type(m).__name__ for m in model.modules() if list(m.parameters(recurse=False))} - {
        kind.__name__ for kind in GradSampleModule.GRAD_SAMPLERS
    }
    if without and mode != "functorch":
        notes.append(f"functorch for {', '.join(sorted(without))}")
    options: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": problem.clip, "expected_batch_size": None}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion: Any = nn.CrossEntropyLoss(reduction="sum")
    if mode == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=problem.clip)
        optimizer = DPOptimizerFastGradientClipping(sgd, loss_reduction="sum", **options)
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion, loss_reduction="sum")
    else:
        wrapped = GradSampleModule(model, loss_reduction="sum", force_functorch=mode == "functorch")
        optimizer = DPOptimizer(sgd, loss_reduction="sum", **options)
    context, parts, held = around(problem, setting), parts_of(data, setting.chunk), list(model.parameters())

    def step() -> dict[str, Tensor]:
        sums: list[Tensor] = []
        for p in held:
            p.grad = p.summed_grad = None
        for x, y in parts:
            with context():
                loss = criterion(wrapped(x), y)
            loss.backward()
            if mode == "ghost":  # its second pass leaves the clipped sum where ordinary gradients are
                found = [p.grad for p in held]
                sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
            else:
                optimizer.clip_and_accumulate()
                sums = [p.summed_grad for p in held]
            for p in held:
                p.grad = p.grad_sample = None
        return {name: g for (name, _), g in zip(model.named_parameters(), sums, strict=True)}

    def vector(sums: dict[str, Tensor]) -> Tensor:
        pieces = [sums[name] if name in sums else joined(sums, name) for name in names]
        return torch.cat([g.reshape(-1).double() for g in pieces])

    return Prepared(step, vector, wait_for(problem.device), note="; ".join(notes))


class SplitAttention(nn.Module):
    """nn.MultiheadAttention out of layers that Opacus has rules for.

    Opacus 1.6 has a DPMultiheadAttention for this, but with samples first it views the outputs of the heads as those of
    the positions and so is another function.
    """

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads, width = attention.num_heads, attention.embed_dim
        self.qlinear, self.klinear, self.vlinear = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)
        with torch.no_grad():
            weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
            for layer, w, b in zip((self.qlinear, self.klinear, self.vlinear), weights, biases, strict=True):
                layer.weight.copy_(w)
                layer.bias.copy_(b)
        self.out_proj.load_state_dict(attention.out_proj.state_dict())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        maps = (self.qlinear, query), (self.klinear, key), (self.vlinear, value)
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, x in maps)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


def joined(sums: dict[str, Tensor], name: str) -> Tensor:
    """torch keeps the maps to queries, keys and values in one parameter and Opacus in three."""
    place, kind = name.rsplit(".in_proj_", 1)
    return torch.cat([sums[f"{place}.{part}linear.{kind}"] for part in "qkv"])


def vmap_compiled(problem: Problem, setting: Setting, data: Data) -> Prepared:
    model = place(problem.model(), problem, setting)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss_of_one(model)), in_dims=(None, 0, 0))
    clip = problem.clip

    @partial(torch.compile, dynamic=False, mode=setting.mode)
    def clipped(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        found = gradients(parameters, x, y).values()
        squares = sum(g.flatten(1).float().square().sum(1) for g in found)
        scale = (clip * torch.rsqrt(squares + 1e-12)).clamp(max=1.0)
        return [torch.einsum("i,i...->...", scale.to(g.dtype), g).float() for g in found]

    context, parts = around(problem, setting), parts_of(data, setting.chunk)

    def step() -> list[Tensor]:
        total = [torch.zeros_like(p, dtype=torch.float32) for p in parameters.values()]
        # The fused attention kernels have no rule for vmap backwards and would run sample by sample.
        with context(), sdpa_kernel(SDPBackend.MATH):
            for x, y in parts:
                torch.compiler.cudagraph_mark_step_begin()
                torch._foreach_add_(total, clipped(parameters, x, y))
        return total

    def vector(total: list[Tensor]) -> Tensor:
        return torch.cat([g.reshape(-1) for g in total])

    return Prepared(step, vector, wait_for(problem.device))


def ordinary(problem: Problem, setting: Setting, data: Data, *, compiled: bool) -> Prepared:
    model = place(problem.model(), problem, setting)
    criterion = nn.CrossEntropyLoss()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return criterion(model(x), y)

    run = torch.compile(loss_of, dynamic=False, mode=setting.mode) if compiled else loss_of
    context, parts = around(problem, setting), parts_of(data, setting.chunk)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for x, y in parts:
            torch.compiler.cudagraph_mark_step_begin()
            with context():
                loss = run(x, y)
            loss.backward()

    return Prepared(step, None, wait_for(problem.device))


def jax(problem: Problem, setting: Setting, data: Data) -> Prepared:
    return Prepared(*jax_vmap(problem, setting))


OURS, COMPILED = ("bfloat16", "float32"), "ordinary compiled"
GRAPHS = ("default", "reduce-overhead")
SYSTEMS = {
    "modelmix p=100": System("ours", partial(ours, p=TRUNCATION), TRUNCATION, OURS, ("contiguous",), "chunk"),
    "modelmix p=1": System("ours", partial(ours, p=1), 1, OURS, ("contiguous",), "chunk"),
    "opacus hooks": System("peer", partial(opacus, mode="hooks"), 1),
    "opacus ghost": System("peer", partial(opacus, mode="ghost"), 1),
    "opacus functorch": System("peer", partial(opacus, mode="functorch"), 1),
    "torch vmap compiled": System("peer", vmap_compiled, 1, LADDER, ("contiguous",), "vmap_chunk", GRAPHS),
    "jax vmap jit": System("peer", jax, 1, OURS, ("contiguous",), "vmap_chunk"),
    "ordinary eager": System("ordinary", partial(ordinary, compiled=False), 0),
    COMPILED: System("ordinary", partial(ordinary, compiled=True), 0, LADDER, ("channels_last",), "batch", GRAPHS),
}
