"""The audits of ``docs/audit.md``: ``python -m modelmix_lab.experiments.audits FILE.json``.

Minutes on a machine with a GPU and many cores, a day on two cores: two million canaries of a hundred coordinates take
3,500 steps. Every number depends on the seeds alone, and the last of them on the kind of device too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

from modelmix._files import write_atomically
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.guarantee import guarantee
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism

DELTA = 1e-5

MECHANISMS = (
    ("plain Gaussian", Mechanism(1.0, 1.0), 1, 20_000_000),
    ("Laplace", Mechanism(0.8, 1.0, law="laplace"), 1, 20_000_000),
    ("ModelMix", Mechanism(0.7, 1.0, 2.0), 1, 20_000_000),
    ("ModelMix, p = 4", Mechanism(0.5, 1.0, 3.0, p=4), 1, 3_000_000),
    ("ModelMix, p = 100", Mechanism(0.335, 1.0, 11.25, p=100), 1, 400_000),
    ("ModelMix-Laplace", Mechanism(0.9, 1.0, 1.5, law="laplace"), 1, 20_000_000),
    ("plain Gaussian", Mechanism(4.0, 1.0), 20, 2_000_000),
    ("ModelMix", Mechanism(2.0, 1.0, 3.0), 10, 2_000_000),
    ("ModelMix-Laplace", Mechanism(1.0, 1.0, 1.5, law="laplace"), 3, 2_000_000),
    ("default recipe", Mechanism(1.271093, 1024 / 27800, 2.0), 400, 400_000),
    ("embedded", EmbeddingMechanism(1.3, 1.0), 1, 20_000_000),
    ("embedded, mixed", EmbeddingMechanism(1.2, 1.0, 3.0), 1, 3_000_000),
    ("embedded, mixed, p = 25", EmbeddingMechanism(1.0, 1.0, 3.0, p=25), 1, 400_000),
    ("embedded", EmbeddingMechanism(4.0, 0.2), 20, 1_000_000),
)
RELEASED = Mechanism(0.307, 0.03, 11.25, p=100)
RELEASED_STEPS = 3500
ATTACKS = (("norm", 150, 10_000, 0, 16), ("momentum", RELEASED_STEPS, 100_000, 200, 20))
"""(which habit, steps attacked, canaries of a run, first seed, runs)"""


def mechanism_row(case: tuple[str, Mechanism, int, int]) -> dict[str, Any]:
    from modelmix.auditing.mechanism import audit_mechanism

    name, mechanism, steps, trials = case
    found = audit_mechanism(mechanism, DELTA, steps=steps, trials=trials, seed=1)
    claimed = guarantee(Ledger().add(mechanism, steps), DELTA).epsilon
    return {
        "name": name,
        "mechanism": mechanism.as_dict(),
        "steps": steps,
        "claimed": claimed,
        "seed": 1,
        **asdict(found),
    }


def released_scores(case: tuple[str, int, int, int]) -> tuple[Any, Any]:
    import torch

    from modelmix_lab.auditing.released import momentum_scores, norm_layer_scores

    torch.set_num_threads(1)
    which, steps, canaries, seed = case
    if which == "norm":
        return norm_layer_scores(RELEASED, canaries=canaries, steps=steps, seed=seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return momentum_scores(RELEASED, canaries=canaries, steps=steps, seed=seed, device=device)


def main(path: str) -> None:
    from modelmix.auditing.bounds import epsilon_lower_bound

    claimed = guarantee(Ledger().add(RELEASED, RELEASED_STEPS), DELTA).epsilon
    attacks = []
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        rows = pool.map(mechanism_row, MECHANISMS, chunksize=1)
        for which, steps, canaries, first, runs in ATTACKS:
            cases = [(which, steps, canaries, first + i) for i in range(runs)]
            found = pool.map(released_scores, cases, chunksize=1)
            score, present = (np.concatenate(part) for part in zip(*found, strict=True))
            bound = epsilon_lower_bound(score[~present], score[present], DELTA)
            seeds = f"{first} to {first + runs - 1}"
            attacks.append({"which": which, "steps": steps, "canaries": len(score), "seeds": seeds, **asdict(bound)})
    released = {"mechanism": RELEASED.as_dict(), "steps": RELEASED_STEPS, "claimed": claimed, "attacks": attacks}
    write_atomically(path, json.dumps({"delta": DELTA, "mechanisms": rows, "released": released}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
