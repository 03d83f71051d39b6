"""A results file as one picture: rate against the limit, cost against context, speed-up against
draft length, quality against bits.

    draw        rows of a results file -> a picture, in the format of the file's suffix

Figures that were not measured are left out. Only `python -m benchmarks.bench --plot`, which calls
it, needs matplotlib.
"""

from pathlib import Path

from benchmarks.tables import bits_per_weight
from decoding.errors import UserError
from weights.schemes import SCHEMES

COLOURS = {
    "quickdraft": "#1b6ca8",
    "llama.cpp": "#d1793b",
    "gpt-fast": "#8f8f8f",
    "transformers": "#5a9a5a",
}
RATE_FORMATS = ("bf16", "int8", "int4-g32")


def draw(rows: list[dict], file: Path, title: str) -> None:
    """Write the picture of `rows` (of a results file) to `file`. UserError where matplotlib is
    missing, or where there is nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install -r requirements-dev.txt") from None
    row_by_id = {row["id"]: row for row in rows}
    panels = []
    for panel in (draw_rates, draw_context, draw_drafts, draw_quality):
        trial = Figure().subplots()
        panel(trial, row_by_id)
        panels += [panel] * trial.has_data()
    if not panels:
        raise UserError(f"{file}: --plot can draw none of its {len(row_by_id)} rows")
    figure = Figure(figsize=(0.7 + 4.5 * len(panels), 4.2), layout="constrained", dpi=110)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes, row_by_id)
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, metadata={"Software": None} if file.suffix == ".png" else None)


def draw_rates(axes, row_by_id: dict[str, dict]) -> None:
    """Tokens/s by format and program, under what the read bandwidth of the same run allows."""
    for column, format in enumerate(RATE_FORMATS):
        ours = [
            row_by_id[id]
            for id in (f"1b.{format}.tok_s", f"1b.{format}.compiled.tok_s")
            if id in row_by_id
        ]
        if not ours:
            continue
        best = max(ours, key=lambda row: row["value"])
        programs = {"quickdraft": best}
        for name in ("llama.cpp", "gpt-fast", "transformers"):
            id = f"1b.{format}.{name.replace('.', '').replace('-', '')}.tok_s"
            programs |= {name: row_by_id[id]} if id in row_by_id else {}
        for number, (name, row) in enumerate(programs.items()):
            error = [[row["value"] - row["min"]], [row["max"] - row["value"]]]
            label = name if column == 0 else None
            x = column + 0.2 * number
            axes.bar(
                x,
                row["value"],
                0.18,
                yerr=error,
                color=COLOURS[name],
                label=label,
                error_kw={"lw": 0.8},
            )
        share = row_by_id.get(best["id"].replace("tok_s", "of_read_bandwidth"))
        if share:
            limit = best["value"] / share["value"]
            label = None if column else "read bandwidth"
            axes.plot([column - 0.1, column + 0.7], [limit, limit], "k--", lw=1, label=label)
    if not axes.has_data():
        return
    axes.set_xticks([column + 0.2 for column in range(len(RATE_FORMATS))], RATE_FORMATS)
    axes.set(title="1.1B, one row, 100 tokens filled", ylabel="tokens/s")
    axes.legend(fontsize=8)


def draw_context(axes, row_by_id: dict[str, dict]) -> None:
    """Milliseconds a step by positions filled, and the same in proportion to the bytes read."""
    for kind, colour in (("full", "#1b6ca8"), ("window1024", "#d1793b")):
        points = []
        for filled in (100, 1000, 4000, 16_000):
            ms, gb = (
                row_by_id.get(f"1b.bf16.compiled.{kind}.filled{filled}.{unit}")
                for unit in ("ms", "gb")
            )
            if ms and gb:
                points.append((filled, ms["value"], gb["value"]))
        if points:
            x, y, gb = zip(*points, strict=True)
            axes.plot(x, y, "o-", color=colour, label=kind)
            axes.plot(
                x,
                [y[0] * size / gb[0] for size in gb],
                "--",
                color=colour,
                lw=1,
                label=f"{kind}, by bytes read",
            )
    axes.set(
        title="cost of a token, 1.1B bf16",
        xlabel="positions filled",
        ylabel="ms",
        ylim=(0, None),
        xscale="log",
    )
    if axes.lines:
        axes.legend(fontsize=8)


def draw_drafts(axes, row_by_id: dict[str, dict]) -> None:
    """Speed-up of the memory-bound pair by draft length, measured and predicted."""
    points = []
    for k in range(1, 17):
        gain, ratio = (
            row_by_id.get(f"spec.1b.alpha80.k{k}.{name}")
            for name in ("speedup", "measured_over_predicted")
        )
        if gain and ratio:
            points.append((k, gain["value"], gain["value"] / ratio["value"]))
    if not points:
        return
    x, measured, predicted = zip(*points, strict=True)
    axes.plot(x, measured, "o-", color="#1b6ca8", label="measured")
    axes.plot(
        x, predicted, "--", color="#1b6ca8", lw=1, label="predicted from c, v and tokens a round"
    )
    axes.legend(fontsize=8)
    axes.axhline(1, color="k", lw=0.6)
    axes.set(
        title="speculation, 1.1B with 0.1B, alpha 0.8",
        xlabel="tokens drafted a round",
        ylabel="speed-up",
    )


def draw_quality(axes, row_by_id: dict[str, dict]) -> None:
    """KL divergence of the demo model to itself in bf16 by bits a weight: all schemes, and better
    codes of int4."""
    names = {name: name for name in SCHEMES}
    names |= {f"int4-g128.{method}": "int4-g128" for method in ("search", "gptq")}
    points = {
        name: bits_per_weight(scheme)
        for name, scheme in names.items()
        if f"demo.{name}.kl" in row_by_id
    }
    for name, bits in points.items():
        row = row_by_id[f"demo.{name}.kl"]
        axes.errorbar(
            bits, row["value"], row["max"] - row["value"], fmt="o", color=COLOURS["quickdraft"]
        )
        has_neighbour = any(0.01 < other - bits < 0.4 for other in points.values())  # on its right
        options = {
            "xytext": (-6 if has_neighbour else 6, -3),
            "ha": "right" if has_neighbour else "left",
        }
        axes.annotate(name, (bits, row["value"]), **options, textcoords="offset points", fontsize=8)
    if points:
        axes.set(
            title="demo model",
            xlabel="bits a weight",
            ylabel="KL to bf16, nats a token",
            yscale="log",
        )
        axes.set_xlim(2.3, 9.7)  # labels need room
