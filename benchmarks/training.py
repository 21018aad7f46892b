"""How fast a private step is and what memory it takes, next to Opacus and to ordinary SGD, in one run on one machine.

pip install opacus                    # to compare with; without it the rest is measured
python benchmarks/training.py [--quick] [--device cuda] [--out FILE]

The task is the default recipe's: the embedded images, its small network, expected batch 1,024, its clip and its noise.
Opacus draws at one over the number of batches in an epoch, so all train on the first 27,648 images, which are 27
batches: every system then draws at q = 1/27 and divides by 1,024. Images lie in memory (on the accelerator if there is
one) and a loader takes a batch of them at once; pixels become floats inside the model.

First every system runs with several numbers of samples held at once, each in a fresh process, which gives its peak of
memory above what code and data take, and the number with which it is fastest. Then all the fastest run in turns, and
again, so that what else the machine does meets them alike; a ratio is the median of the ratios within a turn. What is
timed is steps: drawing, gradients, noise and account, without evaluation. ModelMix takes its noise and its draws from a
cryptographic generator and Opacus from torch's, its default (its secure mode needs a package that is no longer made).

It takes about six minutes on two quiet cores. On busy ones set OMP_WAIT_POLICY=passive: threads that spin while they
wait for each other make a step many times slower there, and take processor time for nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when torch is imported: threads that spin while they wait measure the other programs of a machine. For all alike.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# torch is imported by the processes that measure and not by the one that starts them: on Linux a process begins with
# the peak of memory of the one it was started from.

BATCH, BATCHES, THREADS = 1024, 27, 2
AGREE = {"cpu": 1e-5, "cuda": 1e-3}  # an accelerator may round the factors of its products to 10 bits
HALF = 4.6  # a clip that cuts about half of the first gradients; the recipe's cuts all of them
SIZES = {"cpu": (128, 256, 512), "cuda": (256, 512, 1152)}  # samples held at once that are tried, beside the default
Steps = Callable[[int], None]


@dataclass(frozen=True)
class System:
    """Something that trains.

    Args:
        name: what the table calls it.
        kind: the function below that makes it.
        option: rule and engine, or Opacus's mode.
        default: what happens when no number of samples held at once is given.
    """

    name: str
    kind: str
    option: str = ""
    default: str = "whole draw"

    def sizes(self, device: str, quick: bool) -> tuple[int | None, ...]:
        """Numbers of samples held at once that it is tried with; None is the default."""
        if self.kind == "sgd":
            return (None,)
        sizes = SIZES[device]
        return sizes[-1:] if quick else (None, *sizes)


SGD = "ordinary SGD, not private"
SYSTEMS = (
    System("ModelMix mix, hooks", "trainer", "mix hooks", "auto"),
    System("ModelMix mix, vmap", "trainer", "mix vmap", "auto"),
    System("ModelMix plain, hooks", "trainer", "plain hooks", "auto"),
    System("ModelMix plain, vmap", "trainer", "plain vmap", "auto"),
    System("ModelMix make_private, plain", "make_private"),
    System("Opacus hooks", "opacus", "hooks"),
    System("Opacus functorch", "opacus", "functorch"),
    System("Opacus ghost", "opacus", "ghost"),
    System(SGD, "sgd"),
)


class Task:
    """Data, model and numbers that all systems share."""

    def __init__(self, device: str) -> None:
        import torch

        from modelmix.config.recipe import DEFAULT, Recipe
        from modelmix.data import DataSet, Split, load

        torch.set_num_threads(THREADS)
        self.device = torch.device(device)
        data, n = load(), BATCH * BATCHES
        self.x, self.y = data.train.x[:n].clone().to(self.device), data.train.y[:n].clone().to(self.device)
        self.data = DataSet(data.name, Split(self.x, self.y), data.test, data.classes)
        self.recipe = Recipe.load(DEFAULT)
        self.rate = 1 / BATCHES
        if self.recipe.privacy.batch != BATCH:
            raise SystemExit(
                f"the default recipe's batch is {self.recipe.privacy.batch}: change BATCH and BATCHES to suit it."
            )

    def model(self) -> Any:
        """The same network with the same weights for everyone."""
        import torch

        from modelmix.models import Pixels, build

        torch.manual_seed(0)
        return Pixels(build(self.recipe.model.kind, self.data.shape, len(self.data.classes))).to(self.device)

    def loader(self, **options: Any) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(Together(self.x, self.y), batch_size=BATCH, collate_fn=collate, **options)

    def noise(self) -> float:
        """The default recipe's noise multiplier."""
        return self.recipe.plan(len(self.y)).phases[0].mechanism.noise_multiplier

    def finish(self) -> None:
        """Waits for the accelerator."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()


class Together:
    """A data set that gives a batch in one piece, where ``TensorDataset`` gives it sample by sample."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        import torch

        index = torch.tensor(indices, dtype=torch.int64, device=self.y.device)
        return self.x[index], self.y[index]


def collate(batch: Any) -> Any:
    from torch.utils.data import default_collate

    return default_collate(batch) if isinstance(batch, list) else batch


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


# The systems: each function builds one and returns what takes a number of steps.


def trainer(task: Task, noise: float, option: str, size: int | None) -> Steps:
    from torch import nn

    import modelmix as mm

    rule, engine = option.split()
    recipe = task.recipe
    width = float(recipe.privacy.mixing_width) if rule == "mix" else 0.0
    made = mm.Trainer(
        task.model(),
        nn.CrossEntropyLoss(),
        (task.x, task.y),
        mm.Plan.of(mm.Mechanism(noise, task.rate, width), 10**6),
        clip=recipe.privacy.clip,
        lr=recipe.schedule("optimizer.lr"),
        rule=mm.Rule(rule, ema=recipe.optimizer.ema),
        options=mm.RunOptions(performance=mm.Performance(device=task.device, engine=engine, chunk=size)),
    )

    def run(steps: int) -> None:
        made.run(steps, evaluate_every=steps, progress=False)

    return run


def make_private(task: Task, noise: float, option: str, size: int | None) -> Steps:
    import torch
    from torch import nn

    import modelmix as mm

    model = task.model()
    model, optimizer, loader, criterion = mm.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=task.recipe.schedule("optimizer.lr").at(1)),
        task.loader(shuffle=True),
        nn.CrossEntropyLoss(),
        plan=mm.Plan.of(mm.Mechanism(noise, task.rate), 10**6),
        clip=task.recipe.privacy.clip,
        options=mm.LoopOptions(chunk=size),
    )
    batches = endless(loader)

    def run(steps: int) -> None:
        end = optimizer.ledger.steps + steps
        while optimizer.ledger.steps < end:
            x, y = next(batches)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return run


def opacus(task: Task, noise: float, option: str, size: int | None) -> Steps:
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    model, optimizer, criterion, loader = opacus_parts(task, noise, option, task.recipe.privacy.clip)
    taken = 0

    def count(*_: Any) -> None:
        nonlocal taken
        taken += 1

    optimizer.original_optimizer.register_step_post_hook(count)  # a part of a draw is no step

    def in_parts() -> Iterator[Any]:
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as parts:
            yield from endless(parts)

    batches = endless(loader) if size is None else in_parts()

    def run(steps: int) -> None:
        end = taken + steps
        while taken < end:
            x, y = next(batches)  # an empty draw is a step like any other, and comes once in e^1024 draws
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return run


def opacus_parts(task: Task, noise: float, mode: str, clip: float) -> tuple[Any, Any, Any, Any]:
    """(model, optimizer, criterion, loader) of a loop with Opacus."""
    import torch
    from opacus import PrivacyEngine
    from torch import nn

    model, criterion = task.model(), nn.CrossEntropyLoss()
    parts = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=task.recipe.schedule("optimizer.lr").at(1)),
        criterion=criterion,
        data_loader=task.loader(shuffle=True),
        noise_multiplier=noise,
        max_grad_norm=clip,
        poisson_sampling=True,
        grad_sample_mode=mode,
    )
    if mode == "ghost":
        return parts
    model, optimizer, loader = parts
    return model, optimizer, criterion, loader


def sgd(task: Task, noise: float, option: str, size: int | None) -> Steps:
    import torch
    from torch import nn

    model, criterion = task.model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = endless(task.loader(shuffle=True))

    def run(steps: int) -> None:
        for _ in range(steps):
            x, y = next(batches)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return run


KINDS: dict[str, Callable[[Task, float, str, int | None], Steps]] = {
    "trainer": trainer,
    "make_private": make_private,
    "opacus": opacus,
    "sgd": sgd,
}


# The processes that measure.


def measure(pipe: Any, system: System, size: int | None, noise: float, device: str) -> None:
    """Builds a system and takes one step; then for every number of steps asked for it tells the seconds, by the clock
    and of processor time.

    At 0 it tells the memory that code and data take and the peak above that, in bytes, and ends.
    """
    warnings.filterwarnings("ignore")
    import torch

    if system.kind == "opacus":
        import opacus.utils.batch_memory_manager  # noqa: F401
    else:
        import modelmix.training  # noqa: F401
    task = Task(device)
    touch(torch, task.device)
    before = start_peak(torch, task.device.type)
    run = KINDS[system.kind](task, noise, system.option, size)
    run(1)
    task.finish()
    pipe.send("ready")
    while steps := pipe.recv():
        start, spent = time.perf_counter(), time.process_time()
        run(steps)
        task.finish()
        pipe.send((time.perf_counter() - start, time.process_time() - spent))
    pipe.send((before, peak(torch, task.device.type) - before))


def touch(torch: Any, device: Any) -> None:
    """Everyone has torch load now what it loads at first use, ``torch.func`` above all: code is not a step's memory."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3), torch.nn.Flatten(), torch.nn.Linear(4, 2)).to(device)
    x = torch.zeros(2, 1, 4, 4, device=device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one(parameters: Any, x: Any) -> Any:
        return torch.func.functional_call(model, parameters, (x[None],)).sum()

    torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(parameters, x)
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    gc.collect()


def start_peak(torch: Any, kind: str) -> int:
    """Memory in use now, in bytes; the peak is counted from here where the system lets it."""
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak(torch, kind)


def peak(torch: Any, kind: str) -> int:
    if kind == "cuda":
        return int(torch.cuda.max_memory_allocated())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) if sys.platform == "darwin" else int(most) * 1024


def look(pipe: Any, device: str) -> None:
    """The noise of the task, what is installed, and whether all compute the same."""
    warnings.filterwarnings("ignore")
    import torch

    import modelmix as mm

    task = Task(device)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "modelmix": mm.__version__}
    if present():
        versions["opacus"] = importlib.import_module("opacus").__version__
    pipe.send(
        {
            "task": {
                "data": task.data.name,
                "samples": len(task.y),
                "model": task.recipe.model.kind,
                "parameters": sum(p.numel() for p in task.model().parameters()),
                "expected_batch": BATCH,
                "sample_rate": task.rate,
                "clip": task.recipe.privacy.clip,
                "noise_multiplier": task.noise(),
            },
            "versions": versions,
            "accelerator": torch.cuda.get_device_name() if task.device.type == "cuda" else None,
            "agreement": agreement(task),
        }
    )


def agreement(task: Task) -> dict[str, float]:
    """Do all compute the same? The mean clipped gradient of the same samples at the same weights, without noise.

    For every engine and every mode of Opacus the distance from one sample after the other through autograd, relative to
    its length; the larger one of two clips.
    """
    found = [distances(task, clip) for clip in (task.recipe.privacy.clip, HALF)]
    return {name: max(one[name] for one in found) for name in found[0]}


def distances(task: Task, clip: float) -> dict[str, float]:
    import torch
    from torch import nn

    import modelmix as mm

    index = torch.arange(0, len(task.y), 251, device=task.device)
    batch = task.x[index], task.y[index]

    def ours(engine: str) -> Any:
        return mm.clipped_sum(task.model(), nn.CrossEntropyLoss(), batch, mm.Clip(clip), engine=engine, chunk=64)

    found = {f"ModelMix {engine}": ours(engine) / BATCH for engine in ("hooks", "vmap")}
    for mode in ("hooks", "functorch", "ghost") if present() else ():
        model, optimizer, criterion, _ = opacus_parts(task, 0.0, mode, clip)
        optimizer.zero_grad()
        criterion(model(batch[0]), batch[1]).backward()
        optimizer.step()
        found[f"Opacus {mode}"] = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
    right = ours("loop") / BATCH
    return {name: float((value - right).norm() / right.norm()) for name, value in found.items()}


def present() -> bool:
    return importlib.util.find_spec("opacus") is not None


class Process:
    """A fresh process that measures one system, and waits while others are measured."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=target, args=(there, *arguments), daemon=True)
        self._process.start()
        there.close()

    def hear(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit("a process that measures has failed; its error is above.") from None

    def ask(self, steps: int) -> Any:
        self._pipe.send(steps)
        return self.hear()

    def end(self) -> None:
        self._pipe.close()
        self._process.join(timeout=10)


def tell(text: str) -> None:
    print(f"\r{text:<100}" if sys.stderr.isatty() else text, end="" if sys.stderr.isatty() else "\n", file=sys.stderr)


def first_pass(systems: list[System], noise: float, device: str, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """For every system, for every number of samples held at once: peak of memory and seconds for a step."""
    out: dict[str, list[dict[str, Any]]] = {}
    for system in systems:
        out[system.name] = []
        for size in system.sizes(device, quick):
            tell(f"trying {system.name}, {size or system.default}")
            process = Process(measure, system, size, noise, device)
            process.hear()
            # The least disturbed of a few decides; the number that is reported is measured later.
            taken = min(process.ask(2)[0] / 2 for _ in range(1 if quick else 3))
            before, most = (value / 2**20 for value in process.ask(0))
            process.end()
            row = {"held": size or system.default, "seconds_per_step": taken, "peak_mib": most, "before_mib": before}
            out[system.name].append(row)
    return out


def second_pass(
    systems: list[System], held: dict[str, int | str], noise: float, device: str, quick: bool
) -> list[dict[str, dict[str, float]]]:
    """Steps per second and seconds of processor time per step of every system, turn by turn."""
    sizes = {name: size if isinstance(size, int) else None for name, size in held.items()}
    sets, turns, steps = (1, 2, 1) if quick else (3, 3, 6 if device == "cpu" else 50)
    out = []
    for number in range(sets):
        # Now and then all begin anew: where a process happens to lie in memory makes it faster or slower for good.
        processes = {s.name: Process(measure, s, sizes[s.name], noise, device) for s in systems}
        for process in processes.values():
            process.hear()
        for turn in range(turns):
            tell(f"turn {number * turns + turn + 1} of {sets * turns}")
            row = {}
            for name, process in processes.items():
                seconds, spent = process.ask(steps)
                row[name] = {"steps_per_second": steps / seconds, "cpu_seconds_per_step": spent / steps}
            out.append(row)
        for process in processes.values():
            process.ask(0)
            process.end()
    return out


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(tried: dict[str, list[dict[str, Any]]], turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """What is reported about each system; ratios within a turn to ordinary SGD and to the fastest mode of Opacus."""

    def speed(turn: dict[str, dict[str, float]], name: str) -> float:
        return turn[name]["steps_per_second"]

    rates = {name: [speed(turn, name) for turn in turns] for name in tried}
    rivals = [name for name in tried if name.startswith("Opacus")]
    rival = max(rivals, key=lambda name: statistics.median(rates[name])) if rivals else None
    best = {name: min(rows, key=lambda row: row["seconds_per_step"]) for name, rows in tried.items()}
    systems = {}
    for name in tried:
        row: dict[str, Any] = {
            "held": best[name]["held"],
            "steps_per_second": spread(rates[name]),
            "cpu_seconds_per_step": spread([turn[name]["cpu_seconds_per_step"] for turn in turns]),
            "peak_mib": best[name]["peak_mib"],
            "speed_to_sgd": spread([speed(turn, name) / speed(turn, SGD) for turn in turns]),
            "memory_to_sgd": best[name]["peak_mib"] / best[SGD]["peak_mib"],
        }
        if rival is not None:
            row["speed_to_opacus"] = spread([speed(turn, name) / speed(turn, rival) for turn in turns])
            row["memory_to_opacus"] = best[name]["peak_mib"] / best[rival]["peak_mib"]
        systems[name] = row
    return {"fastest_opacus": rival, "systems": systems}


def show(found: dict[str, Any]) -> None:
    rival = found["fastest_opacus"]
    head = f"{'':30}{'held':>12}{'steps/s':>9}{'least - most':>16}{'CPU s':>7}{'MiB':>6}"
    head += f"{'to SGD: speed':>15}{'memory':>8}"
    print(f"\n{head}" + (f"{'to ' + rival + ': speed':>26}{'memory':>8}" if rival else ""))
    for name, row in found["systems"].items():
        rate = row["steps_per_second"]
        between = f"{rate['least']:.2f} - {rate['most']:.2f}"
        print(
            f"{name:30}{row['held']:>12}{rate['median']:9.2f}{between:>16}"
            f"{row['cpu_seconds_per_step']['median']:7.3f}{row['peak_mib']:6.0f}{row['speed_to_sgd']['median']:15.2f}{row['memory_to_sgd']:8.2f}",
            end="",
        )
        print(f"{row['speed_to_opacus']['median']:26.2f}{row['memory_to_opacus']:8.2f}" if rival else "")


def machine() -> dict[str, Any]:
    names = []
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "threads": THREADS,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps only: does it run?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    arguments = parser.parse_args()
    began, load = time.monotonic(), [os.getloadavg()]
    if not present():
        print("Opacus is not installed (pip install opacus): measuring the rest.")
    systems = [system for system in SYSTEMS if system.kind != "opacus" or present()]

    process = Process(look, arguments.device)
    facts = process.hear()
    process.end()
    print("mean clipped gradient without noise, relative distance from one sample at a time:")
    allowed = AGREE[arguments.device]
    for name, distance in facts["agreement"].items():
        print(f"  {name:20}{distance:10.1e}{'' if distance < allowed else '   DISAGREES'}")
    if max(facts["agreement"].values()) >= allowed:
        sys.exit("the systems do not compute the same thing: nothing was measured.")

    noise = facts["task"]["noise_multiplier"]
    tried = first_pass(systems, noise, arguments.device, arguments.quick)
    held = {name: min(rows, key=lambda row: row["seconds_per_step"])["held"] for name, rows in tried.items()}
    load.append(os.getloadavg())
    turns = second_pass(systems, held, noise, arguments.device, arguments.quick)
    load.append(os.getloadavg())
    found = summary(tried, turns)
    show(found)
    if arguments.out:
        names = ("before", "between the passes", "after")
        data = {
            **facts,
            "machine": machine(),
            "run": {
                "device": arguments.device,
                "quick": arguments.quick,
                "seconds": round(time.monotonic() - began),
                "load_average": dict(zip(names, ([round(v, 2) for v in row] for row in load), strict=True)),
            },
            **found,
            "tried": tried,
            "turns": turns,
        }
        arguments.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
