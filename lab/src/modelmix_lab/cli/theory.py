"""``modelmix-lab theory``: the paper's theorems as answers."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from modelmix._checks import check_delta, probability, whole
from modelmix.accounting.adjacency import ZERO_OUT, relation
from modelmix.accounting.calibration import calibrate
from modelmix.accounting.guarantee import guarantee
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.cli import show
from modelmix.cli.once import Program
from modelmix.cli.options import Json
from modelmix.theory import nonconvex, utility
from modelmix_lab.cli.randomness import randomness

theory = Program(help="The paper's theorems as answers: utility, clipping, amplification, other randomness.")

theory.command()(randomness)

Out = Annotated[Path, typer.Option(help="Figure file; .png and .svg are written.")]
N = Annotated[int, typer.Option("--n", help="Samples.")]
Rate = Annotated[float, typer.Option("--q", help="Poisson sampling rate.")]
Dimension = Annotated[int, typer.Option("--d", help="Trained coordinates.")]
Omega = Annotated[float, typer.Option("--omega", help="Mixing width / clip; 0 is plain DP-SGD.")]
Delta = Annotated[float, typer.Option("--delta", help="Failure probability.")]
Beta = Annotated[float, typer.Option("--beta", help="Smoothness of the loss.")]


@theory.command()
def convex(
    distance: Annotated[float, typer.Option(help="W0: how far the initial states are from the optimum.")],
    lipschitz: Annotated[float, typer.Option("--clip", help="L = c: largest norm of a sample's gradient.")] = 1.0,
    beta: Beta = 1.0,
    n: N = 50_000,
    q: Rate = 0.03,
    d: Dimension = 1000,
    steps: Annotated[int, typer.Option(help="Number of steps T.")] = 1000,
    z: Annotated[float, typer.Option("--z", help="Noise multiplier: noise std / clip.")] = 1.0,
    omega: Omega = 0.0,
    step: Annotated[
        float | None, typer.Option(help="Step size h = eta*n*q for averaged gradients; left out, the best one.")
    ] = None,
    delta: Delta = 1e-5,
    json: Json = False,
) -> None:
    """Theorem 3.1: how far from the optimum Algorithm 1 ends on a convex, Lipschitz, smooth loss, term by term.

    \b
    modelmix-lab theory convex --distance 5 --clip 1 --n 50000 --q 0.03 --d 1000 --steps 1000 --z 1 --omega 5
    """
    mechanism = Mechanism(z, q, omega)
    constants = {"lipschitz": lipschitz, "smoothness": beta, "distance": distance}
    first = 1.0 if step is None else step
    setting = utility.Setting.of(mechanism, clip=lipschitz, n=n, dimension=d, steps=steps, step_size=first)
    if step is None:
        h = utility.best_convex_step(setting, **constants)
        setting = replace(setting, step_size=h, tau=setting.tau * h)
    proved, printed = utility.convex(setting, **constants), utility.convex_printed(setting, **constants)
    cost = guarantee(Ledger(population=n).add(mechanism, steps), delta)
    _tell(
        "Theorem 3.1: bound on E[F(w_bar) - F(w*)]",
        {"as printed": printed, "that holds": proved},
        {"epsilon": cost.epsilon, "delta": delta, "scope": cost.scope, "setting": asdict(setting)},
        [
            f"step size h = {setting.step_size:.4g} (averaged gradients), tau = {setting.tau:.4g}, "
            f"noise std = {setting.noise_std:.4g}",
            f"epsilon = {show.up(cost.epsilon)} at delta = {show.up_digits(delta)}",
            *cost.lines,
            "that holds: the printed proof leaves the padding out of the gaps and bounds a batch by (L/q)^2; "
            "see docs/theory.md.",
        ],
        json,
    )


@theory.command()
def clipped(
    kappa: Annotated[float, typer.Option(help="Tail constant of the sampling noise (modelmix advise clip).")],
    beta: Beta = 1.0,
    loss_range: Annotated[float, typer.Option("--range", help="R_F: largest minus smallest value of F.")] = 1.0,
    clip: Annotated[float | None, typer.Option(help="c; left out, the smallest the proof accepts.")] = None,
    n: N = 50_000,
    q: Rate = 0.03,
    d: Dimension = 1000,
    epsilon: Annotated[float, typer.Option(help="Target epsilon; noise is calibrated, T and h are the proof's.")] = 8.0,
    delta: Delta = 1e-5,
    omega: Omega = 0.0,
    json: Json = False,
) -> None:
    """Theorems B.1 and 3.2: gradient norms that clipped DP-SGD and ModelMix reach on any smooth loss, term by term.

    \b
    modelmix-lab theory clipped --kappa 0.5 --range 2.3 --n 50000 --q 0.03 --d 1000 --epsilon 8
    modelmix-lab theory clipped --kappa 0.5 --range 2.3 --n 50000 --q 0.03 --d 1000 --epsilon 8 --omega 11.25
    """
    mixing = omega > 0
    check_delta(probability("delta", delta, "the failure probability"), [whole("n", n, "the samples", least=1)])
    budget = nonconvex.Budget(n, d, q, epsilon, delta, 1.0, beta, loss_range)
    least = nonconvex.threshold(kappa, budget.scale)
    budget = replace(budget, clip=least if clip is None else clip)
    a = nonconvex.descent(budget.clip, kappa)
    h, t = budget.step_size(mixing, printed=False), budget.steps
    mechanism = calibrate(epsilon=epsilon, delta=delta, sample_rate=q, steps=t, mixing_width=omega)
    cost = guarantee(Ledger(population=n).add(mechanism, t), delta)
    setting = utility.Setting.of(mechanism, clip=budget.clip, n=n, dimension=d, steps=t, step_size=h)
    v = nonconvex.noise_constant(budget, mechanism.noise_multiplier, t)
    proved = nonconvex.clipped(setting, clip=budget.clip, kappa=kappa, smoothness=beta, loss_range=loss_range)
    printed = nonconvex.clipped_printed(budget, v=v, mixing=mixing, tau_squares=t * setting.tau**2)
    reach = a.gradient_norm(proved.total)
    _tell(
        f"Theorem {'3.2' if mixing else 'B.1'}: bound on the mean of min(a1 |grad F|^2, a3 |grad F|)",
        {"as printed": printed, "that holds": proved},
        {
            "clip": budget.clip, "least_clip": least, "steps": t, "step_size": h, "v": v, **asdict(a),
            "noise_multiplier": mechanism.noise_multiplier, "gradient_norm": reach,
            "scope": cost.scope,
        },
        [
            f"c = {budget.clip:.4g} (the proof accepts {least:.4g} and more; 4 kappa log 10 = "
            f"{4 * kappa * math.log(10):.4g}), "
            f"a1 = {a.a1:.4g}, a2 = {a.a2:.4g}, a3 = {a.a3:.4g}",
            f"T = {t:,}, h = {h:.4g} (averaged gradients), z = {mechanism.noise_multiplier:.4g}, v = {v:.4g}",
            f"that holds: with probability 1/2 or more some state has a gradient of norm {reach:.4g} or less.",
            f"epsilon = {show.up(cost.epsilon)} at delta = {show.up_digits(delta)}",
            *cost.lines,
        ],
        json,
    )  # fmt: skip


@theory.command()
def convergence(out: Out = Path("convergence.png"), json: Json = False) -> None:
    """Run Algorithm 1 on least squares and logistic regression over T, beside Theorem 3.1, and draw it."""
    from modelmix.report import style
    from modelmix_lab.experiments import convergence as experiment
    from modelmix_lab.report import convergence as picture

    style.prepare(out)
    lines = [experiment.line(loss) for loss in ("squares", "logistic")]
    written = [str(path) for path in picture.draw(lines, out)]
    if json:
        print(show.as_json({"lines": [asdict(line) for line in lines], "files": written}))
        return
    rows = [
        [f"{line.loss}, T = {t:,}", *(f"{c[i]:.4f}" for c in (line.final, line.along, line.proved, line.printed))]
        for line in lines
        for i, t in enumerate(line.steps)
    ]  # fmt: skip
    slopes = ", ".join(f"{line.loss} {experiment.slope(line.steps, line.along):.3f}" for line in lines)
    show.table(
        "loss above the optimum, mean over 64 seeds",
        ["", "F(w_bar)", "along the way", "bound that holds", "as printed"],
        rows,
        [f"power of T along the way: {slopes} (the theorem: -0.5)", f"drawn: {', '.join(written)}"],
    )


@theory.command()
def example(
    clip: Annotated[float, typer.Option(help="Clip c.")] = 1.0,
    json: Json = False,
) -> None:
    """Example 3.1: three samples on which clipped descent goes the wrong way when c is far below the noise."""
    from modelmix.theory import clipping

    rows = [clipping.example(w, clip) for w in (20.0, 0.0)]
    rest = clipping.clipped_minimum(clip)
    if json:
        print(show.as_json({"rows": [asdict(row) for row in rows], "rests_at": rest, "optimum": 20.0}))
        return
    show.table(
        f"f = (w - x)^2/2 on x = -20, -10, 90, clipped to c = {clip:g}",
        ["w", "gradient", "mean clipped gradient", "noise std"],
        [[f"{r.w:g}", f"{r.gradient:g}", f"{r.clipped_gradient:.4f}", f"{r.noise_std:.1f}"] for r in rows],
        [f"Descent on the clipped gradients comes to rest at w = {rest:.4g}; the optimum is 20."],
    )


@theory.command()
def amplification(
    z: Annotated[float, typer.Option("--z", help="Laplace scale / l1 clip.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of steps T, without sampling.")] = 1000,
    delta: Delta = 1e-5,
    out: Out = Path("amplification.png"),
    json: Json = False,
) -> None:
    """Theorem 4.2 with its constants: the loss by quadrature, Bernstein's bound, the Renyi accountant beside them."""
    import numpy as np

    from modelmix.accounting.laws import Laplace, Mixed
    from modelmix.report import style
    from modelmix.theory.loss import loss_moments
    from modelmix_lab.experiments import amplification as experiment
    from modelmix_lab.report import amplification as picture
    from modelmix_lab.theory import amplification as closed

    check_delta(probability("delta", delta, "the failure probability"))
    style.prepare(out)
    found = experiment.composition(z, steps, delta, np.geomspace(2, 2e5, 31))
    written = [str(path) for path in picture.draw(found, experiment.slopes(np.geomspace(1, 1e4, 41)), out)]
    holds = relation(ZERO_OUT, "sample", None)
    needed = closed.gaussian_width_needed(1.0, steps, delta / 2)
    if json:
        data = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in vars(found).items()}
        print(show.as_json({**data, "gaussian_width_needed": needed, "holds_when": holds, "files": written}))
        return
    rows = []
    for i in range(0, len(found.omega), 6):
        loss = loss_moments(Mixed(Laplace(z), float(found.omega[i])))
        rows.append(
            [f"{found.omega[i]:.4g}", f"{loss.mean:.4g}", f"{loss.variance:.4g}", show.up(found.renyi[i]),
             show.up(found.bernstein[i]), "-" if found.lemma[i] != found.lemma[i] else show.up(found.lemma[i])]
        )  # fmt: skip
    show.table(
        f"Laplace noise, z = {z:g}, {steps:,} steps without sampling; fails with probability {show.up_digits(delta)} "
        "at most",
        ["omega", "mean loss", "variance", "Renyi", "Bernstein", "with the paper's lemma"],
        rows,
        [
            f"Holds when {holds}.",
            f"1/sqrt(omega) is expected between omega = {found.window[0]:.3g} and {found.window[1]:.3g}.",
            f"The Gaussian half of the theorem says nothing below omega = {needed:.2g} (z = 1): its T * delta_0 must "
            "stay below delta/2.",
            f"drawn: {', '.join(written)}",
        ],
    )


def _tell(title: str, bounds: dict[str, utility.Bound], facts: dict[str, Any], notes: list[str], as_json: bool) -> None:
    """Bounds beside each other, a row for every term."""
    if as_json:
        terms = {name: {**bound.terms, "total": bound.total} for name, bound in bounds.items()}
        print(show.as_json({**facts, "bounds": terms}))
        return
    names = list(dict.fromkeys(name for bound in bounds.values() for name in bound.terms))
    rows: list[list[Any]] = [[name, *(_number(bound.terms.get(name)) for bound in bounds.values())] for name in names]
    rows.append([show.bold("total"), *(show.bold(f"{bound.total:.4g}") for bound in bounds.values())])
    show.table(title, ["", *bounds], rows, notes)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
