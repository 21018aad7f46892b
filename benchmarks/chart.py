"""The chart of throughput.py: a panel for every case, a bar for every system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelmix.report import style

OURS, PEER, ORDINARY = style.MIXED, "#9a9a9a", "#dcdcdc"
KINDS = {OURS: "ModelMix", PEER: "other private systems", ORDINARY: "ordinary training, not private"}


def colour(system: str) -> str:
    if system.startswith("modelmix"):
        return OURS
    return ORDINARY if system.startswith("ordinary") else PEER


def short(rate: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if rate >= size:
            return f"{rate / size:.3g}{unit}" if rate < 100 * size else f"{rate / size:.0f}{unit}"
    return f"{rate:.3g}"


def failed(case: dict[str, Any]) -> list[str]:
    """Systems that were there and did not run."""
    errors = {s: row["error"] for s, row in case["systems"].items() if "samples_per_second" not in row}
    return [s for s, error in errors.items() if not error.startswith(("ImportError", "ModuleNotFoundError"))]


def draw(found: dict[str, Any], path: Path) -> list[Path]:
    cases = {
        name: rates
        for name, case in found["cases"].items()
        if (
            rates := {s: row["samples_per_second"] for s, row in case["systems"].items() if "samples_per_second" in row}
        )
    }
    if not cases:
        raise SystemExit("nothing was measured: nothing to draw.")
    with style.look():
        from matplotlib import pyplot
        from matplotlib.patches import Patch
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        columns = 1 if len(cases) == 1 else 2
        lines = -(-len(cases) // columns)
        most = max(len(found["cases"][name]["systems"]) for name in cases)
        figure, grid = pyplot.subplots(
            lines, columns, figsize=(5.6 * columns, lines * (0.27 * most + 0.85)), squeeze=False, layout="constrained"
        )
        figure.get_layout_engine().set(h_pad=0.09, w_pad=0.06)
        for axes, (name, rates) in zip(grid.flat, cases.items(), strict=False):
            order = failed(found["cases"][name]) + sorted(rates, key=rates.__getitem__)
            lengths = [rates.get(s, 0.0) for s in order]
            bars = axes.barh(order, lengths, color=[colour(s) for s in order], height=0.72)
            axes.bar_label(bars, [short(v) if v else "failed" for v in lengths], padding=3, fontsize=8.5)
            for label in axes.get_yticklabels():
                label.set_fontweight("bold" if colour(label.get_text()) == OURS else "normal")
            axes.set_title(f"{name}, batch {found['cases'][name]['batch']:,}", loc="left")
            axes.set_xlim(0, 1.14 * max(rates.values()))
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value) if value else "0"))
            axes.tick_params(labelsize=8.5)
            axes.tick_params(axis="y", length=0)
            axes.grid(visible=False, axis="y")
            axes.set_axisbelow(True)
        for axes in list(grid.flat)[len(cases) :]:
            axes.set_visible(False)
        for axes in grid[-1]:
            axes.set_xlabel("samples per second")
        device = found.get("machine", {}).get("accelerator") or found.get("machine", {}).get("processor")
        handles = [Patch(color=key, label=label) for key, label in KINDS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
        figure.suptitle(f"Clipped sums of per-sample gradients, one {device}" if device else None, fontsize=11.5)
        return style.save(figure, path)
