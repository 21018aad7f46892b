"""``modelmix epsilon``: what a mechanism or a ledger costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from modelmix.accounting import comparison
from modelmix.accounting.accountant import Guarantee, delta, guarantee, rdp
from modelmix.cli import show
from modelmix.cli.options import Json, MechanismOptions, takes_mechanism
from modelmix.errors import ModelMixError


@takes_mechanism
def epsilon(
    options: MechanismOptions,
    orders: Annotated[str, typer.Option(help="Also print the Renyi divergence of one step, e.g. 2,3,4.")] = "",
    for_epsilon: Annotated[float | None, typer.Option(help="Also print the delta at this epsilon.")] = None,
    save_ledger: Annotated[Path | None, typer.Option(help="Write the phases to this ledger file.")] = None,
    json: Json = False,
) -> None:
    """Epsilon of a mechanism or a ledger, with plain DP-SGD and an equal-variance Gaussian under it.

    \b
    modelmix epsilon --z 0.335 --omega 11.25 --p 100 --q 0.03 --steps 3400
    modelmix epsilon --z 0.335 --clip 20 --n 50000 --batch 1500 --tau 0.15 --p 100 --steps 3400
    """
    ledger = options.phases()
    improved = guarantee(ledger, options.delta)
    classic = guarantee(ledger, options.delta, conversion="classic")
    wanted = _orders(orders)
    divergence = [rdp(phase.mechanism, wanted).tolist() for phase in ledger.phases] if wanted else []
    other_delta = None if for_epsilon is None else delta(ledger, for_epsilon)
    plain = comparison.best_epsilon(comparison.unmixed(ledger), options.delta)
    twin_ledger = comparison.equal_variance(ledger)
    twin = comparison.best_epsilon(twin_ledger, options.delta)
    twin_renyi = guarantee(twin_ledger, options.delta).epsilon
    twin_z = [phase.mechanism.noise_multiplier for phase in twin_ledger.phases]
    best = comparison.best_epsilon(ledger, options.delta)
    if save_ledger is not None:
        ledger.save(save_ledger)
    if json:
        out: dict[str, Any] = {
            "epsilon": improved.epsilon,
            "epsilon_classic": classic.epsilon,
            "delta": options.delta,
            "order": improved.order,
            "order_classic": classic.order,
            "proved": True,
            "reason": improved.reason,
            "assumptions": show.assumptions(ledger),
            "best_proved_epsilon": best.epsilon,
            "best_proved_accountant": best.accountant,
            "plain_dpsgd_epsilon": plain.epsilon,
            "plain_dpsgd_accountant": plain.accountant,
            "equal_variance_epsilon": twin.epsilon,
            "equal_variance_accountant": twin.accountant,
            "equal_variance_epsilon_rdp": twin_renyi,
            "equal_variance_noise_multiplier": twin_z[0] if len(twin_z) == 1 else twin_z,
            "adjacency": "add or remove one sample",
            "steps": ledger.steps,
            "phases": [phase.as_dict() for phase in ledger.phases],
        }
        if for_epsilon is not None:
            out |= {"for_epsilon": for_epsilon, "delta_for_epsilon": other_delta}
        if wanted:
            out["rdp_per_step"] = [dict(zip((f"{a:g}" for a in wanted), row, strict=True)) for row in divergence]
            if len(divergence) == 1:
                out["rdp_per_step"] = out["rdp_per_step"][0]
        print(show.as_json(out))
        return
    law = "plain DP-SGD" if all(phase.mechanism.law == "gaussian" for phase in ledger.phases) else "same noise"
    z = f"z = {twin_z[0]:.4g}" if len(twin_z) == 1 else "phase by phase"
    rows = [
        ["[bold]this mechanism[/]", f"[bold]{show.up(improved.epsilon)}[/]", _how(improved)],
        ["  classic conversion", show.up(classic.epsilon), _how(classic)],
        [f"{law}, no mixing", show.up(plain.epsilon), plain.accountant],
        [f"Gaussian of equal variance, {z}", show.up(twin.epsilon), twin.accountant],
    ]
    rows += [
        [f"  D_{a:g} of one step, phase {i + 1}", f"{value:.6g}", "upper bound"]
        for i, row in enumerate(divergence)
        for a, value in zip(wanted, row, strict=True)
    ]
    if other_delta is not None:
        rows.append([f"  delta at epsilon = {for_epsilon:g}", f"{other_delta:.3e}", "Renyi, improved"])
    notes = [show.phase_line(phase) for phase in ledger.phases] + ([improved.reason] if improved.reason else [])
    if best.epsilon < improved.epsilon:
        notes.append(f"{show.up(best.epsilon)} is proved for this mechanism too, {best.accountant} without mixing.")
    notes.append(show.GUARANTEE)
    show.table(f"epsilon at delta = {options.delta:g}", ["", "epsilon", " by"], rows, notes)


def _how(result: Guarantee) -> str:
    return "total variation" if result.epsilon == 0 else f"Renyi order {result.order:g}, {result.conversion}"


def _orders(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ModelMixError(f"--orders {text!r} is not a list of numbers: write for instance --orders 2,3,4.") from None
