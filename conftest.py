"""Shared helpers. Hypothesis runs derandomised: the suite gives the same verdict every time."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings
from torch.utils._pytree import tree_flatten

settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("suite")
torch.set_num_threads(1)  # the suite runs one process a core already

# MODELMIX_TEST_DEVICE=cuda runs the tests of engines on an accelerator. Elsewhere the interpreter runs our kernels.
if os.environ.get("MODELMIX_TEST_DEVICE", "cpu") != "cpu":
    torch.set_default_device(os.environ["MODELMIX_TEST_DEVICE"])
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from modelmix.gradients import proved_pass  # noqa: E402, once the environment is set

# Tracing and proving a network takes half a second, and the suite trains the same few ones a thousand times. Tests of
# other things share the proof of a network that is described in full by its printed form.
TRACING = (
    "tests/attacks/",
    "tests/gradients/test_engine",
    "tests/gradients/test_forms",
    "tests/training/test_guard",
)
PLAIN = frozenset(
    ["Sequential", "Linear", "Conv1d", "Conv2d", "Flatten", "ReLU", "Tanh", "Dropout", "GroupNorm", "LayerNorm"]
)
_proofs: dict = {}


def _described(model, loss, parameters, batch):
    """A key for what decides a trace, or None where something else might."""
    modules = list(model.modules())
    hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in modules)
    known = all(type(m) is getattr(torch.nn, type(m).__name__, None) and type(m).__name__ in PLAIN for m in modules)
    patched = any("forward" in vars(m) or any(True for _ in m.buffers(recurse=False)) for m in modules)
    plain = isinstance(loss, torch.nn.CrossEntropyLoss) and loss.weight is None
    if hooked or patched or not known or not (plain or loss is torch.nn.functional.cross_entropy):
        return None
    if not all(p.requires_grad for p in model.parameters()) or set(parameters) != dict(model.named_parameters()).keys():
        return None
    leaves, form = tree_flatten((parameters, batch.inputs, batch.targets))
    shapes = [
        (tuple(t.shape[1:] if i >= len(parameters) else t.shape), t.dtype, t.device) for i, t in enumerate(leaves)
    ]
    return repr(model), repr(loss), str(form), str(shapes), batch.rows_per_sample, tuple(m.training for m in modules)


@pytest.fixture(autouse=True)
def proofs_are_shared(request, monkeypatch):
    if any(part in request.node.nodeid for part in TRACING):
        return
    from modelmix.gradients import engine

    def shared(*case):
        key = _described(*case)
        if key is None:
            return proved_pass.ProvedPass(*case)
        if key not in _proofs:
            _proofs[key] = proved_pass.ProvedPass(*case)
        return _proofs[key]

    monkeypatch.setattr(engine, "ProvedPass", shared)


@pytest.fixture
def run(capsys):
    """Runs the command line in this process: (exit code, stdout, stderr)."""
    from modelmix.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call
