"""How long an epsilon takes. Cold caches, imports excluded except where stated; the median of several runs.

python benchmarks/accountant.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dp_accounting
import numpy as np

import modelmix as mm
from modelmix.accounting import composition, coordinate_losses, facts, renyi

RESNET = {"sample_rate": 0.03, "mixing_width": 11.25, "p": 100}
COMMAND = ["epsilon", "--z", "0.335", "--omega", "11.25", "--p", "100", "--q", "0.03", "--steps", "3400"]


def forget() -> None:
    for cached in (
        renyi.step_curve,
        facts.require_facts,
        coordinate_losses.coordinate,
        composition.gradient_losses,
        composition.sampled_losses,
        composition.loss_epsilon,
    ):
        cached.cache_clear()


def seconds(work: Callable[[], object], repeats: int = 7) -> float:
    taken = []
    for _ in range(repeats):
        forget()
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def epsilon(steps: int = 3500, p: int = 100, by: str = "best") -> float:
    return mm.epsilon(mm.Mechanism(0.335, 0.03, 11.25, p), 1e-5, steps=steps, by=by)


def of_phases(count: int = 100) -> float:
    """A schedule: every phase has a mixing width of its own."""
    ledger = mm.Ledger()
    for i in range(count):
        ledger = ledger.add(mm.Mechanism(0.335, 0.03, 11.25 * (1 + i / count), 100), 34)
    return mm.epsilon(ledger, 1e-5)


def theirs() -> float:
    """The same question for plain DP-SGD, asked of dp-accounting's Renyi accountant with its own orders."""
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.03, dp_accounting.GaussianDpEvent(1.3)), 3500)
    return accountant.get_epsilon(1e-5)


def ours() -> float:
    return mm.epsilon(mm.Mechanism(1.3, 0.03), 1e-5, steps=3500)


def end_to_end() -> None:
    subprocess.run([sys.executable, "-m", "modelmix", *COMMAND], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    mechanism = mm.Mechanism(0.335, **RESNET)
    rows = [
        ("one epsilon, p = 100, T = 3,500", 0.5, seconds(epsilon)),
        ("the same by Renyi moments", 0.2, seconds(lambda: epsilon(by="renyi"))),
        ("100 phases", 5.0, seconds(of_phases, repeats=3)),
        (
            "calibrating z for epsilon 8",
            5.0,
            seconds(lambda: mm.calibrate(epsilon=8, delta=1e-5, steps=3500, **RESNET)),
        ),
        (
            "a curve over 5,000 step counts",
            2.0,
            seconds(lambda: mm.epsilon_curve(mechanism, np.arange(1, 5001), 1e-5)),
        ),
        ("`modelmix epsilon`, end to end", 1.5, seconds(end_to_end, repeats=5)),
    ]
    base = rows[0][2]
    ratios = {
        "T = 10^8 against T = 3,500": seconds(lambda: epsilon(steps=10**8)) / base,
        "p = 10^7 against p = 100": seconds(lambda: epsilon(p=10**7)) / base,
        "p = 1 against p = 100": seconds(lambda: epsilon(p=1)) / base,
        "plain DP-SGD: dp-accounting against ours": seconds(theirs) / seconds(ours),
    }
    print(f"{'':40}{'seconds':>10}{'target':>10}")
    for name, target, value in rows:
        print(f"{name:40}{value:10.4f}{target:10.1f}{'' if value <= target else '   MISSED'}")
    print("cost of one epsilon, as a ratio")
    for name, ratio in ratios.items():
        print(f"{name:42}{ratio:8.2f}")
    if arguments.json:
        data = {"seconds": {name: value for name, _, value in rows}, "ratios": ratios}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(value > target for _, target, value in rows))


if __name__ == "__main__":
    main()
