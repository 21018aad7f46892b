"""Clipped sums by JAX: the same networks as pure functions of torch's parameters, vmap(grad), clip, sum and jit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from cases import Problem, Setting

# Read when JAX is first used. It would otherwise take most of an accelerator's memory, which torch shares here.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

Tree = dict[str, Any]


def networks(jax: Any) -> dict[str, Callable[[Tree, Any], Any]]:
    """For every case, the scores of one sample; images are H x W x C."""
    jnp, lax = jax.numpy, jax.lax

    def linear(p: Tree, name: str, x: Any) -> Any:
        return x @ p[f"{name}weight"].T + p[f"{name}bias"]

    def conv(p: Tree, name: str, x: Any, stride: int = 1, pad: int = 1) -> Any:
        w = p[f"{name}.weight"]
        if f"{name}.gain" in p:  # weight-standardised
            wide = w.astype(jnp.float32)
            mean, variance = wide.mean((1, 2, 3), keepdims=True), wide.var((1, 2, 3), keepdims=True)
            gain = p[f"{name}.gain"][:, None, None, None]
            w = (gain * (wide - mean) * lax.rsqrt(wide[0].size * (variance + 1e-4))).astype(w.dtype)
        order = ("NHWC", "OIHW", "NHWC")
        x = lax.conv_general_dilated(x[None], w, (stride, stride), [(pad, pad)] * 2, dimension_numbers=order)[0]
        return x + p[f"{name}.bias"] if f"{name}.bias" in p else x

    def normed(wide: Any, axes: Any) -> Any:
        mean, variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
        return (wide - mean) * lax.rsqrt(variance + 1e-5)

    def norm(p: Tree, name: str, x: Any, groups: int = 0) -> Any:
        """Group norm of an image; layer norm of tokens when there are no groups."""
        wide = x.astype(jnp.float32)
        if groups:
            wide = normed(wide.reshape(*x.shape[:2], groups, -1), (0, 1, 3)).reshape(x.shape)
        else:
            wide = normed(wide, -1)
        return (wide * p[f"{name}.weight"] + p[f"{name}.bias"]).astype(x.dtype)

    def flat(x: Any) -> Any:
        return x.transpose(2, 0, 1).reshape(-1)

    relu, tanh = jax.nn.relu, jnp.tanh

    def resnet20(p: Tree, x: Any) -> Any:
        x = relu(norm(p, "norm", conv(p, "conv", x), 16))
        for i in range(9):
            outside, name = 16 << i // 3, f"blocks.{i}"
            stride = 2 if i in (3, 6) else 1
            out = relu(norm(p, f"{name}.norm1", conv(p, f"{name}.conv1", x, stride), min(32, outside)))
            out = norm(p, f"{name}.norm2", conv(p, f"{name}.conv2", out), min(32, outside))
            if stride == 2:
                x = jnp.pad(x[::2, ::2], ((0, 0), (0, 0), (outside // 4, outside // 4)))
            x = relu(out + x)
        return linear(p, "head.", x.mean((0, 1)))

    def wide_resnet(p: Tree, x: Any) -> Any:
        x = conv(p, "conv", x)
        for i in range(6):
            name, stride = f"blocks.{i}", 2 if i in (2, 4) else 1
            inner = norm(p, f"{name}.norm1", relu(x), 16)
            out = norm(p, f"{name}.norm2", relu(conv(p, f"{name}.conv1", inner, stride)), 16)
            kept = conv(p, f"{name}.project", inner, stride, 0) if f"{name}.project.weight" in p else x
            x = kept + conv(p, f"{name}.conv2", out)
        return linear(p, "head.", norm(p, "norm", relu(x), 16).mean((0, 1)))

    def scatter_cifar(p: Tree, x: Any) -> Any:
        x = tanh(conv(p, "0", x))
        x = x.reshape(4, 2, 4, 2, -1).max((1, 3))
        return linear(p, "6.", flat(tanh(conv(p, "3", x))))

    def scatter_grey(p: Tree, x: Any) -> Any:
        x = tanh(conv(p, "2", tanh(conv(p, "0", x, 2))))
        return linear(p, "7.", tanh(linear(p, "5.", flat(x))))

    def transformer(p: Tree, x: Any) -> Any:
        x = p["tokens.weight"][x] + p["positions.weight"]
        for i in range(4):
            name = f"blocks.{i}"
            inner = norm(p, f"{name}.norm1", x)
            qkv = inner @ p[f"{name}.attention.in_proj_weight"].T + p[f"{name}.attention.in_proj_bias"]
            q, k, v = jnp.moveaxis(qkv.reshape(len(x), 3, 4, -1), 1, 0)
            scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
            out = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores).astype(v.dtype), v).reshape(x.shape)
            x = x + linear(p, f"{name}.attention.out_proj.", out)
            inner = jax.nn.gelu(linear(p, f"{name}.expand.", norm(p, f"{name}.norm2", x)), approximate=False)
            x = x + linear(p, f"{name}.contract.", inner)
        return linear(p, "head.", norm(p, "norm", x).mean(0))

    return {
        "ResNet20": resnet20,
        "WideResNet16": wide_resnet,
        "Sequential 243": scatter_cifar,
        "Sequential 81": scatter_grey,
        "Linear": lambda p, x: linear(p, "", x),
        "Transformer": transformer,
    }


def jax_vmap(problem: Problem, setting: Setting) -> tuple[Any, ...]:
    """The fields of ``Prepared``. Memory is XLA's plan of the program, without the samples."""
    import jax
    import numpy as np
    import torch

    jnp = jax.numpy
    device = jax.devices()[0]
    if problem.device.type == "cuda" and device.platform != "gpu":
        raise RuntimeError(f"JAX sees no accelerator, only {device.platform}")
    model, chunk = problem.model(), setting.chunk
    kind = type(model).__name__
    network = networks(jax)[f"{kind} {problem.case.shape[0]}" if kind == "Sequential" else kind]
    dtype = jnp.bfloat16 if setting.precision == "bfloat16" else jnp.float32
    parameters = {name: jnp.asarray(p.detach().cpu().numpy(), dtype) for name, p in model.named_parameters()}
    x, y = problem.x.cpu().numpy(), problem.y.cpu().numpy().astype(np.int32)
    x = x.transpose(0, 2, 3, 1) if problem.image else x
    x = jnp.asarray(x, jnp.int32 if problem.case.vocabulary else dtype).reshape(-1, chunk, *x.shape[1:])
    y = jnp.asarray(y).reshape(-1, chunk)

    def loss(parameters: Tree, x: Any, y: Any) -> Any:
        return -jax.nn.log_softmax(network(parameters, x).astype(jnp.float32))[y]

    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))

    def total(parameters: Tree, x: Any, y: Any) -> Tree:
        def body(so_far: Tree, part: Any) -> tuple[Tree, None]:
            found = gradients(parameters, *part)
            squares = sum(jnp.square(g.astype(jnp.float32)).reshape(chunk, -1).sum(1) for g in found.values())
            scale = jnp.minimum(1.0, problem.clip * jax.lax.rsqrt(squares + 1e-12))

            def add(a: Any, g: Any) -> Any:
                return a + jnp.einsum("i,i...->...", scale.astype(g.dtype), g, preferred_element_type=jnp.float32)

            return jax.tree.map(add, so_far, found), None

        return jax.lax.scan(body, {n: jnp.zeros(p.shape, jnp.float32) for n, p in parameters.items()}, (x, y))[0]

    program = jax.jit(total).lower(parameters, x, y).compile()
    gib = None
    if device.platform == "gpu":
        plan = program.memory_analysis()
        own = sum(p.nbytes for p in parameters.values())
        gib = (plan.temp_size_in_bytes + plan.output_size_in_bytes + own) / 2**30 if plan else None

    def vector(found: Tree) -> Any:
        return torch.cat([torch.from_numpy(np.array(found[name])).reshape(-1) for name in parameters])

    return (lambda: program(parameters, x, y)), vector, jax.block_until_ready, gib, f"JAX {jax.__version__}"
