"""``modelmix epsilon``: what a mechanism or a ledger costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from modelmix.accounting.accountant import rdp
from modelmix.accounting.guarantee import Guarantee, delta, guarantee
from modelmix.accounting.pld import equal_variance, unmixed
from modelmix.cli import show
from modelmix.cli.options import ADJACENCY_HELP, Json, MechanismOptions, takes_mechanism
from modelmix.errors import ModelMixError


@takes_mechanism
def epsilon(
    options: MechanismOptions,
    orders: Annotated[str, typer.Option(help="Also print the Renyi divergence of one step, e.g. 2,3,4.")] = "",
    for_epsilon: Annotated[float | None, typer.Option(help="Also print the delta at this epsilon.")] = None,
    save_ledger: Annotated[Path | None, typer.Option(help="Write the phases to this ledger file.")] = None,
    adjacency: Annotated[str | None, typer.Option(help=ADJACENCY_HELP)] = None,
    json: Json = False,
) -> None:
    """Epsilon of a mechanism or a ledger, with plain DP-SGD and an equal-variance Gaussian under it.

    \b
    modelmix epsilon --z 0.335 --omega 11.25 --p 100 --q 0.03 --steps 3400
    modelmix epsilon --z 0.335 --clip 20 --n 50000 --batch 1500 --tau 0.15 --p 100 --steps 3400
    """
    ledger, counted = options.counted()
    best = guarantee(ledger, options.delta, adjacency=adjacency)  # type: ignore[arg-type]
    moments = {by: guarantee(ledger, options.delta, by=by, adjacency=adjacency) for by in ("renyi", "classic")}  # type: ignore[arg-type]
    wanted = _orders(orders)
    divergence = [rdp(phase.mechanism, wanted).tolist() for phase in ledger.phases] if wanted else []
    other_delta = None if for_epsilon is None else delta(ledger, for_epsilon, adjacency=adjacency)  # type: ignore[arg-type]
    twin_ledger = equal_variance(ledger)
    plain, twin = (guarantee(book, options.delta, adjacency=adjacency) for book in (unmixed(ledger), twin_ledger))  # type: ignore[arg-type]
    twin_z = [phase.mechanism.noise_multiplier for phase in twin_ledger.phases]
    if save_ledger is not None:
        ledger.save(save_ledger)
    if json:
        out: dict[str, Any] = {
            **best.as_dict(),
            "epsilon_renyi": moments["renyi"].epsilon,
            "order_renyi": moments["renyi"].order,
            "epsilon_classic": moments["classic"].epsilon,
            "order_classic": moments["classic"].order,
            "proved": True,
            "counted": counted,
            "plain_dpsgd_epsilon": plain.epsilon,
            "plain_dpsgd_accountant": plain.accountant,
            "equal_variance_epsilon": twin.epsilon,
            "equal_variance_accountant": twin.accountant,
            "equal_variance_noise_multiplier": twin_z[0] if len(twin_z) == 1 else twin_z,
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
    rows: list[list[Any]] = [
        [show.bold("this mechanism"), show.bold(show.up(best.epsilon)), _how(best)],
        ["  Renyi, improved", show.up(moments["renyi"].epsilon), _how(moments["renyi"])],
        ["  Renyi, classic conversion", show.up(moments["classic"].epsilon), _how(moments["classic"])],
        [f"{law}, no mixing", show.up(plain.epsilon), plain.accountant],
        [f"Gaussian of equal variance, {z}", show.up(twin.epsilon), twin.accountant],
    ]
    rows += [
        [f"  D_{a:g} of one step, phase {i + 1}", show.up_digits(value, 6), "upper bound"]
        for i, row in enumerate(divergence)
        for a, value in zip(wanted, row, strict=True)
    ]
    if other_delta is not None:
        rows.append([f"  delta at epsilon = {for_epsilon:g}", show.up_digits(other_delta), "best proved"])
    notes = [show.phase_line(phase) for phase in ledger.phases] + ([best.reason] if best.reason else [])
    notes += [*best.lines, *counted]
    show.table(f"epsilon at delta = {show.up_digits(options.delta)}", ["", "epsilon", " by"], rows, notes)


def _how(result: Guarantee) -> str:
    if result.epsilon == 0:
        return "total variation"
    return f"{result.accountant}, order {result.order:g}" if result.order else result.accountant


def _orders(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ModelMixError(f"--orders {text!r} is not a list of numbers: write for instance --orders 2,3,4.") from None
