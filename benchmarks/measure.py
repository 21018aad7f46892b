"""One system on one case: set it up, see that it computes the right thing, time it, and see what memory it takes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import re
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from cases import Problem, Setting, full_precision
from peers import COMPILED, SYSTEMS, Prepared, System

# Farthest from the right sum that a system may be, relative to its length. What is wrong, not rounded, is off by more:
# the directions of random samples' gradients cancel, so that rounding is large beside their sum. An accelerator rounds
# the factors of products of floats to 10 bits, unless it is told not to. In exact float32 one ReLU at
# zero that falls to the other side has been seen to move a sum of few samples by 0.003.
FAR = {"bfloat16": 0.5, "autocast": 0.5, "float32": 0.2}
FAR_EXACT = 0.01
GIB = 2**30


class WrongError(Exception):
    """A system's sum is not the sum of clipped gradients."""


@dataclass
class Running:
    """A system that is set up, and what is known about it."""

    prepared: Prepared
    setting: Setting
    steps: int  # in a turn
    facts: dict[str, Any] = field(default_factory=dict)
    turns: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        rates = self.turns or [self.facts["first_samples_per_second"]]
        return {
            **self.facts,
            "samples_per_second": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
            "turns": self.turns,
        }


def line(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = re.sub(r" ?\(/[^)]*\)", "", text)  # where a file lies on this machine helps nobody
    return text if len(text) <= 200 else text[:197] + "..."


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def collect(device: torch.device) -> int:
    """Gives memory back and starts to count its peak; returns the bytes still in use."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def seconds_for(prepared: Prepared, steps: int) -> float:
    start, result = time.perf_counter(), None
    for _ in range(steps):
        result = prepared.step()
    prepared.wait(result)
    return time.perf_counter() - start


def attempt(problem: Problem, system: System, setting: Setting, seconds: float) -> Running:
    """Sets a system up in one way and takes a first measurement."""
    cuda = problem.device.type == "cuda"
    if system.holds == "vmap_chunk":  # a last chunk of another size would be another program
        sizes = range(1, min(setting.chunk, problem.batch) + 1)
        setting = replace(setting, chunk=max(n for n in sizes if problem.batch % n == 0))
    # ModelMix converts within the step, as in training.
    data = problem.data(replace(setting, precision="float32") if system.kind == "ours" else setting)
    before = collect(problem.device)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        prepared = system.prepare(problem, setting, data)
        seconds_for(prepared, 1)
    ready = time.perf_counter() - start
    seconds_for(prepared, 1)
    steps = max(1, min(10_000, math.ceil(seconds / seconds_for(prepared, 1))))
    rate = steps * problem.batch / seconds_for(prepared, steps)
    facts: dict[str, Any] = {
        "precision": setting.precision,
        "layout": setting.layout if problem.image else None,
        "mode": None if setting.mode == "default" else setting.mode,
        "chunk": setting.chunk,
        "ready_s": ready,
        "first_samples_per_second": rate,
    }
    if cuda:
        most = (torch.cuda.max_memory_allocated() - before) / GIB
        facts["peak_gib"] = most if prepared.gib is None else prepared.gib
    if prepared.vector is not None:
        facts["distance"] = problem.distance(prepared.vector(prepared.step()), system.p)
        far = FAR[setting.precision] if cuda or setting.precision != "float32" else FAR_EXACT
        if not facts["distance"] <= far:
            raise WrongError(f"{facts['distance']:.2g} of its length away from the right sum")
    if cuda:
        facts["held_gib"] = (collect(problem.device) - before) / GIB
    # What ModelMix tells its caller: that it runs uncompiled, for one.
    told = [str(w.message) for w in said if system.kind == "ours" and w.filename.endswith("peers.py")]
    notes = [prepared.note, *told]
    facts["note"] = "; ".join(filter(None, dict.fromkeys(notes)))
    return Running(prepared, setting, steps, facts)


def attempt_smaller(problem: Problem, system: System, setting: Setting, seconds: float) -> Running:
    """The same, holding half as many samples at once whenever memory is short."""
    while True:
        try:
            return attempt(problem, system, setting, seconds)
        except Exception as error:
            if not out_of_memory(error) or setting.chunk <= 8:
                raise
            setting = replace(setting, chunk=setting.chunk // 2)
        collect(problem.device)


def check_layout(problem: Problem, system: System, layout: str) -> None:
    """Raises where a memory layout of images is not understood, seen in float32, where rounding hides nothing.

    Opacus reads the windows of a convolution as if images were contiguous; in its ghost mode only norms are wrong then.
    """
    setting = Setting("float32", layout, problem.small.batch)
    with full_precision():
        prepared = system.prepare(problem.small, setting, problem.small.data(setting))
        distance = problem.small.distance(prepared.vector(prepared.step()), system.p)
    if not distance <= FAR_EXACT:
        raise WrongError(f"with {layout}, {distance:.2g} of its length away from the right sum in float32")


def ways(problem: Problem, system: System, precision: str, chunks: list[int], allowed: list[str]) -> Iterator[Setting]:
    layouts = system.layouts if problem.image else ("contiguous",)
    wanted = tuple(mode for mode in system.modes if mode in allowed) or system.modes[:1]
    modes = wanted if problem.device.type == "cuda" else ("default",)
    for layout, chunk, mode in itertools.product(layouts, chunks, modes):
        yield Setting(precision, layout, min(chunk, problem.batch), mode)


def set_up(
    problem: Problem,
    system: System,
    precisions: tuple[str, ...],
    chunks: list[int],
    modes: list[str],
    seconds: float,
) -> Running:
    """The fastest way to run a system, in the first precision in which it works."""
    tried: list[dict[str, Any]] = []
    best: Running | None = None
    for precision in precisions:
        for setting in ways(problem, system, precision, chunks, modes):
            way = asdict(setting)
            try:
                if setting.layout == "channels_last" and system.p:
                    check_layout(problem, system, setting.layout)
                running = attempt_smaller(problem, system, setting, seconds)
                rate = running.facts["first_samples_per_second"]
                way |= {"chunk": running.setting.chunk, "samples_per_second": rate}
                if best is None or rate > best.facts["first_samples_per_second"]:
                    best = running
                del running
            except ImportError:
                raise
            except Exception as error:  # another way may work
                way["error"] = line(error)
            tried.append(way)
            collect(problem.device)
        if best is not None:
            if len(tried) > 1:
                best.facts["tried"] = tried
            return best
    raise RuntimeError(" | ".join(dict.fromkeys(way["error"] for way in tried)))


def take_turn(problem: Problem, running: Running) -> None:
    running.turns.append(running.steps * problem.batch / seconds_for(running.prepared, running.steps))


def usable(device: torch.device) -> bool:
    """An accelerator may be lost after an error; then nothing more can be measured in this process."""
    if device.type == "cuda":
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()
            return bool(torch.ones(1, device=device).sum() == 1)
        return False
    return True


def touch(device: torch.device) -> None:
    """Has torch allocate now what its libraries keep for good, so that it is no system's memory."""
    for dtype in (torch.float32, torch.bfloat16):
        conv = torch.nn.Conv2d(8, 8, 3, device=device, dtype=dtype)
        head = torch.nn.Linear(8, 8, device=device, dtype=dtype)
        x = torch.zeros(4, 8, 8, 8, device=device, dtype=dtype)
        head(conv(x).mean((2, 3))).sum().backward()
    collect(device)


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """ModelMix against the fastest other private system and against ordinary training."""
    rates = {name: row["samples_per_second"] for name, row in found.items() if "samples_per_second" in row}
    peers = [name for name in rates if SYSTEMS[name].kind == "peer"]
    best = max(peers, key=rates.__getitem__, default=None)
    out: dict[str, Any] = {"best_peer": best}
    for name in rates:
        if SYSTEMS[name].kind != "ours":
            continue
        row = out[name] = {}
        for label, other in (("best_peer", best), ("ordinary_compiled", COMPILED)):
            if other in rates:
                row[f"speed_to_{label}"] = rates[name] / rates[other]
                mine, theirs = found[name].get("peak_gib"), found[other].get("peak_gib")
                if mine and theirs:
                    row[f"memory_to_{label}"] = mine / theirs
    return out


def flatness(problem: Problem, running: Running, batches: list[int]) -> list[dict[str, Any]]:
    """Peak of memory of a system that is set up, for several batches with the same chunk."""
    out = []
    for batch in batches:
        row: dict[str, Any] = {"batch": batch, "chunk": running.setting.chunk}
        try:
            index = torch.arange(batch, device=problem.device) % problem.batch
            data = problem.x[index], problem.y[index]
            before = collect(problem.device)
            step = running.prepared.again(data)
            running.prepared.wait(step())
            most = (torch.cuda.max_memory_allocated() - before) / GIB
            # A recorded graph keeps the memory of its set-up and asks for none when it is replayed.
            row["peak_gib"] = max(running.facts["peak_gib"], most + running.facts["held_gib"])
            del step
        except Exception as error:
            row["error"] = line(error)
        out.append(row)
    collect(problem.device)
    return out
