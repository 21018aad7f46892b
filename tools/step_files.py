"""Count the source files that one training step walks through, and how often it moves from one to another.

A step that visits few files is one that a reader can follow. Both entries are measured on a small network, after two
steps in which whatever is made once is made:

    python tools/step_files.py            # the numbers, and the files
    python tools/step_files.py --walk     # every function of the step in its order as well
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import modelmix as mm

ROOT = Path(mm.__file__).parent
SAMPLES, BATCH, STEPS, WARM, SEED = 256, 32, 4, 2, 1


class Walk:
    """Calls of functions of ModelMix, in their order, while ``recording``."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
                path = str(Path(frame.f_code.co_filename).relative_to(ROOT))
                self.calls.append((path, frame.f_code.co_name))

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def files(self) -> Counter[str]:
        return Counter(path for path, _ in self.calls)

    @property
    def changes(self) -> int:
        """How often a call is in another file than the call before it."""
        return sum(a != b for (a, _), (b, _) in zip(self.calls, self.calls[1:], strict=False))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 8, generator=generator), torch.arange(SAMPLES) % 2


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))


def plan() -> mm.Plan:
    return mm.plan(noise_multiplier=1.0, samples=SAMPLES, batch=BATCH, steps=STEPS, mixing_width=2.0)


def trainer_step() -> Walk:
    """One step of ``Trainer`` on tensors."""
    trainer = mm.Trainer(
        network(), nn.CrossEntropyLoss(), data(), plan(), clip=1.0, lr=0.1, options=mm.RunOptions(seed=SEED)
    )
    walk = Walk()
    step: Callable[..., None] = trainer._take_step

    def recorded(*arguments: Any) -> None:
        if trainer.step != WARM:
            return step(*arguments)
        with walk.recording():
            return step(*arguments)

    setattr(trainer, "_take_step", recorded)  # noqa: B010, mypy would have the same signature
    trainer.run(progress=False)
    return walk


def loop_step() -> Walk:
    """One step of a loop by ``make_private``: zero_grad, model, criterion, backward and step of a batch at hand."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH, shuffle=True)
    options = mm.LoopOptions(seed=SEED)
    private = mm.make_private(model, optimizer, loader, nn.CrossEntropyLoss(), plan=plan(), clip=1.0, options=options)
    walk = Walk()
    net, opt, batches, criterion = private

    def step(x: Any, y: Any) -> None:
        opt.zero_grad()
        torch.autograd.backward(criterion(net(x), y))
        opt.step()

    for number, (x, y) in enumerate(batches):
        if number == WARM:
            with walk.recording():
                step(x, y)
            break
        step(x, y)
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walk", action="store_true", help="print every call")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, walk in (("Trainer", trainer_step()), ("make_private", loop_step())):
        print(f"{name}: {len(walk.files)} files, {walk.changes} changes of file")
        for path, calls in sorted(walk.files.items()):
            print(f"    {path} ({calls} calls)")
        for path, function in walk.calls if arguments.walk else ():
            print(f"        {path}: {function}")


if __name__ == "__main__":
    main()
