"""``modelmix curve``: epsilon against steps or mixing width, as a plot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from modelmix.cli import show
from modelmix.cli.options import Json, MechanismOptions, takes_mechanism
from modelmix.errors import ModelMixError

_AXES = ("steps", "omega", "tau")


@takes_mechanism
def curve(
    options: MechanismOptions,
    over: Annotated[
        str, typer.Option(help="steps, omega or tau (tau/eta; needs --clip, --n, --q or --batch).")
    ] = "steps",
    start: Annotated[float | None, typer.Option("--from", help="First value.", show_default=False)] = None,
    stop: Annotated[float | None, typer.Option("--to", help="Last value.", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="Plot file; .png and .svg are written, .pdf if asked for.")] = Path(
        "epsilon-curve.png"
    ),
    json: Json = False,
) -> None:
    """Epsilon against the number of steps or the mixing width, as a plot (PNG and SVG).

    \b
    modelmix curve --z 0.335 --omega 11.25 --p 100 --q 0.03 --steps 3500
    modelmix curve --over tau --from 0.01 --to 1 --z 0.335 --clip 20 --n 50000 --batch 1500 --p 100 --steps 3500
    """
    from modelmix.report import curves, style

    if over not in _AXES:
        raise ModelMixError(f"--over {over} is unknown: choose one of {', '.join(_AXES)}.")
    if over != "steps":
        _check_axis(options, over)
    style.prepare(out)
    if over == "steps":
        if stop is not None:
            if options.steps is not None:
                raise ModelMixError("--steps and --to say the same thing here: give one of them.")
            options = replace(options, steps=stop)
        ledger, notes = options.one_phase()
        if ledger.steps == 1:
            raise ModelMixError("a curve over steps needs at least two of them: give --steps 2 or more.")
        result = curves.over_steps(ledger, 1.0 if start is None else start, float(ledger.steps), options.delta)
    else:
        # The axis replaces whatever width was given; in the paper's units one tau/eta is worth ``unit`` of omega.
        unit = None
        if over == "tau":
            options = replace(options, tau=1.0, eta=None, omega=None).in_ratios()
            unit = options.omega
        ledger, notes = replace(options, omega=0.0).one_phase()
        default = (0.01, 1.0) if over == "tau" else (0.1, 100.0)
        first, last = (
            given if given is not None else usual for given, usual in zip((start, stop), default, strict=True)
        )
        result = curves.over_width(ledger, first, last, options.delta, unit)
    written = curves.draw(result, out)
    if json:
        lines = {name: line.tolist() for name, line in result.lines.items()}
        files = [str(path) for path in written]
        out_of = {"axis": result.axis, "x": result.x.tolist(), "epsilon": lines, "files": files}
        claim = {name: value for name, value in result.end.as_dict().items() if name not in ("epsilon", "steps")}
        print(show.as_json({**claim, "proved": True, "counted": notes, **out_of}))
        return
    last_index = len(result.x) - 1
    rows = [
        [f"{result.x[i]:.6g}", *(show.up(float(line[i])) for line in result.lines.values())]
        for i in sorted({round(last_index * part / 4) for part in range(5)})
    ]
    show.table(
        f"epsilon against {result.axis}: {result.title}",
        [over, *result.lines],
        rows,
        [*result.end.lines, *notes, f"drawn: {', '.join(map(str, written))}"],
    )


def _check_axis(options: MechanismOptions, over: str) -> None:
    """Refuse what a curve over the mixing width would drop or cannot know."""
    dropped = [f"--{name}" for name in ("omega", "tau", "eta") if getattr(options, name) is not None]
    if dropped:
        raise ModelMixError(
            f"{' and '.join(dropped)} cannot be fixed where the curve goes over {over}: leave it out, and give --from "
            "and --to for the ends."
        )
    if options.ledger:
        raise ModelMixError(
            f"a curve over {over} varies the mixing width, which a ledger has fixed: leave --ledger out and describe "
            "the phase by --z, --q and --steps, or go over steps."
        )
