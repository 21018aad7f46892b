"""``modelmix-lab theory randomness``: what a training step draws beside its noise, and what that is worth."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from modelmix._checks import check_delta
from modelmix.accounting.guarantee import Guarantee, guarantee
from modelmix.accounting.guarantee import epsilon as proved_epsilon
from modelmix.accounting.mechanism import Mechanism
from modelmix.cli import show
from modelmix.cli.options import Json
from modelmix.errors import ModelMixError
from modelmix_lab.theory import beyond, localised, rounding, sphere

_ADDED = {
    "langevin": "standard deviation of Langevin noise",
    "sphere": "radius of the sphere",
    "uniform": "width of the uniform",
    "two-point": "half the distance of the two points",
    "dither": "spacing that is dithered over",
    "rounding-before": "spacing, or give --format and --largest",
    "rounding-after": "any",
}
KINDS = (*_ADDED, *localised.MULTIPLICATIVE)


def randomness(
    kind: Annotated[
        str | None,
        typer.Argument(help=f"{', '.join(KINDS)}; left out, all that is additive, as a figure.", metavar="[KIND]"),
    ] = None,
    size: Annotated[
        float, typer.Option(help="In units of the clip: std, radius, width, half distance or spacing.")
    ] = 1.0,
    z: Annotated[float, typer.Option("--z", help="Noise multiplier of the Gaussian noise.")] = 1.0,
    q: Annotated[float, typer.Option("--q", help="Poisson sampling rate.")] = 0.05,
    steps: Annotated[int, typer.Option(help="Number of steps T.")] = 200,
    d: Annotated[int, typer.Option("--d", help="Trained coordinates (sphere, rounding).")] = 1000,
    number_format: Annotated[
        str | None, typer.Option("--format", help=f"Rounding: {', '.join(rounding.FORMATS)}.")
    ] = None,
    largest: Annotated[float, typer.Option(help="Rounding: largest coordinate of a sum, in clips.")] = 1.0,
    keep: Annotated[float, typer.Option(help="Dropout: share of features kept.")] = 0.5,
    delta: Annotated[float, typer.Option(help="Failure probability.")] = 1e-5,
    out: Annotated[Path, typer.Option(help="Figure file; .png and .svg are written.")] = Path("randomness.png"),
    json: Json = False,
) -> None:
    """What randomness beside the noise is worth (Section 4.5): a number, a cost, or the reason why there is none.

    \b
    modelmix-lab theory randomness
    modelmix-lab theory randomness sphere --size 3 --d 10
    modelmix-lab theory randomness rounding-before --format bf16 --d 26010
    modelmix-lab theory randomness dropout
    """
    if kind is None:
        _figure(out, json)
        return
    check_delta(delta)
    plain = Mechanism(z, q)
    gaussian = guarantee(plain, delta, steps=steps)
    alone = gaussian.epsilon
    if kind in localised.MULTIPLICATIVE:
        _negative(kind, keep, steps, gaussian, json)
        return
    note = ""
    if kind == "langevin":
        found = proved_epsilon(beyond.langevin(plain, size), delta, steps=steps)
        note = "Gaussian as well: variances add, every direction is the same."
    elif kind == "sphere":
        found = sphere.Sphere(z, size, q, d).epsilon(delta, steps)
        note = f"rotation invariant: only the length of a gradient counts. Variance of a coordinate: {size**2 / d:.3g}."
    elif kind in ("uniform", "dither"):
        found = proved_epsilon(rounding.dithered(plain, size), delta, steps=steps)
        note = "an independent uniform in every coordinate: mixing with this width."
    elif kind == "two-point":
        law = beyond.Discrete(z, (-size, size), (0.5, 0.5))
        found = proved_epsilon(beyond.coordinatewise(law, q), delta, steps=steps)
        note = (
            "convex in the squared size of a coordinate, on a grid finer than the noise: one coordinate is the worst."
        )
    elif kind == "rounding-after":
        found = proved_epsilon(rounding.rounded_after_noise(plain), delta, steps=steps)
        note = "post-processing: free, and worth nothing."
    elif kind == "rounding-before":
        grid = size if number_format is None else rounding.spacing(number_format, largest)
        found = proved_epsilon(rounding.rounded_before_noise(plain, grid, d), delta, steps=steps)
        note = f"spacing {grid:.4g}: one sample moves the rounded sum by up to 1 + spacing * sqrt(d). A cost."
    else:
        raise ModelMixError(f"{kind!r} is unknown: choose one of {', '.join(KINDS)}.")
    if kind != "rounding-before":
        found = min(alone, found)  # what is added to the noise, or done after it, is post-processing
    holds = {"scope": gaussian.scope}
    if json:
        print(
            show.as_json({"kind": kind, "epsilon": found, "noise_alone": alone, "delta": delta, "why": note, **holds})
        )
        return
    show.table(
        f"{kind}, z = {z:g}, q = {q:g}, {steps:,} steps, delta = {show.up_digits(delta)}",
        ["", "epsilon"],
        [[f"with it (size {size:g})", show.up(found)], ["the Gaussian noise alone", show.up(alone)]],
        [f"Why: {note}", *gaussian.lines],
    )


def _figure(out: Path, json: bool) -> None:
    from modelmix.report import style
    from modelmix_lab.experiments import beyond as experiment
    from modelmix_lab.report import beyond as picture

    style.prepare(out)
    lines, alone = experiment.lines(), experiment.without()
    title = f"z = {experiment.Z:g}, q = {experiment.RATE:g}, T = {experiment.STEPS}, delta = {experiment.DELTA:g}"
    title += ", by Renyi moments"
    written = [str(path) for path in picture.draw(lines, alone, title, out)]
    if json:
        data: dict[str, Any] = {line.name: line.epsilon.tolist() for line in lines}
        print(show.as_json({"std": lines[0].std.tolist(), "noise_alone": alone, **data, "files": written}))
        return
    chosen = range(0, len(lines[0].std), 3)
    rows = [
        [line.name, *("not proved" if math.isnan(line.epsilon[i]) else show.up(line.epsilon[i], 2) for i in chosen)]
        for line in lines
    ]
    show.table(
        f"epsilon of Gaussian noise and what is added to it; {title}",
        ["added std / clip", *(f"{lines[0].std[i]:.2f}" for i in chosen)],
        rows,
        [f"The noise alone: {show.up(alone, 2)}, whatever is added.", f"drawn: {', '.join(written)}"],
    )


def _negative(kind: str, keep: float, steps: int, alone: Guarantee, json: bool) -> None:
    """The demonstrated example instead of a number."""
    examples = [
        localised.bounded_example(),
        localised.erasing_example(32, 32, (16, 16)),
        localised.dropout_example(keep),
    ]
    try:
        localised.multiplicative(kind)
    except ModelMixError as error:
        reason = str(error)
    if json:
        rows: list[dict[str, Any]] = [
            {"what": e.what, "least_delta": e.least_delta(1), "least_delta_all_steps": e.least_delta(steps)}
            for e in examples
        ]
        head = {"kind": kind, "epsilon": None, "noise_alone": alone.epsilon, "delta": alone.delta, "scope": alone.scope}
        print(show.as_json({**head, "reason": reason, "examples": rows}))
        return
    show.table(
        f"{kind}: no number. The smallest delta with which any epsilon holds, without noise",
        ["", "one step", f"{steps:,} steps"],
        [[e.what, f"{e.least_delta(1):.4f}", f"{e.least_delta(steps):.4f}"] for e in examples],
        [
            f"With noise: {reason}",
            "An example: on a sample whose features are all zero the gradient is that of the bias, clipped to c, "
            "whatever is dropped, flipped or cropped.",
            f"What holds is epsilon of the Gaussian noise alone: {show.up(alone.epsilon)} at delta = "
            f"{show.up_digits(alone.delta)}.",
            *alone.lines,
        ],
    )
