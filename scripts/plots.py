"""A results file as one picture: rate against the limit, cost against context, speed-up against draft length.

    draw        rows of benchmarks/cpu.json -> a figure in the format that the file's name says

What was not measured is left out. `python -m scripts.bench --plot FILE` calls it; matplotlib is needed only here.
"""

from pathlib import Path

COLOURS = {"quickdraft": "#1b6ca8", "llama.cpp": "#d1793b", "gpt-fast": "#8f8f8f", "transformers": "#5a9a5a"}
FORMATS = ("bf16", "int8", "int4-g32")


def draw(rows: list[dict], file: Path, title: str) -> None:
    """Write the picture of `rows` (of a results file) to `file`. ValueError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install -r requirements-dev.txt") from None
    found = {row["id"]: row for row in rows}
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    rates, context, drafts = figure.subplots(1, 3)
    draw_rates(rates, found)
    draw_context(context, found)
    draw_drafts(drafts, found)
    for axes in (rates, context, drafts):
        if not axes.has_data():
            axes.set_axis_off()
    figure.suptitle(title, fontsize=9)
    figure.savefig(file)


def draw_rates(axes, found: dict[str, dict]) -> None:
    """Tokens/s by format and program, under what the read bandwidth of the same run allows."""
    for place, format in enumerate(FORMATS):
        own = [found[id] for id in (f"1b.{format}.tok_s", f"1b.{format}.compiled.tok_s") if id in found]
        if not own:
            continue
        best = max(own, key=lambda row: row["value"])
        programs = {"quickdraft": best}
        for name in ("llama.cpp", "gpt-fast", "transformers"):
            id = f"1b.{format}.{name.replace('.', '').replace('-', '')}.tok_s"
            programs |= {name: found[id]} if id in found else {}
        for number, (name, row) in enumerate(programs.items()):
            error = [[row["value"] - row["min"]], [row["max"] - row["value"]]]
            label = name if place == 0 else None
            x = place + 0.2 * number
            axes.bar(x, row["value"], 0.18, yerr=error, color=COLOURS[name], label=label, error_kw={"lw": 0.8})
        share = found.get(best["id"].replace("tok_s", "of_read_bandwidth"))
        if share:
            limit = best["value"] / share["value"]
            label = None if place else "read bandwidth"
            axes.plot([place - 0.1, place + 0.7], [limit, limit], "k--", lw=1, label=label)
    axes.set_xticks([place + 0.2 for place in range(len(FORMATS))], FORMATS)
    axes.set(title="1.1B, one row, 100 tokens filled", ylabel="tokens/s")
    axes.legend(fontsize=8)


def draw_context(axes, found: dict[str, dict]) -> None:
    """Milliseconds a step by positions filled, and what they would be if they followed the bytes read."""
    for kind, colour in (("full", "#1b6ca8"), ("window1024", "#d1793b")):
        points = []
        for filled in (100, 1000, 4000, 16_000):
            ms, gb = (found.get(f"1b.bf16.compiled.{kind}.filled{filled}.{unit}") for unit in ("ms", "gb"))
            if ms and gb:
                points.append((filled, ms["value"], gb["value"]))
        if points:
            x, y, gb = zip(*points, strict=True)
            axes.plot(x, y, "o-", color=colour, label=kind)
            axes.plot(x, [y[0] * size / gb[0] for size in gb], "--", color=colour, lw=1, label=f"{kind}, by bytes read")
    axes.set(title="cost of a token, 1.1B bf16", xlabel="positions filled", ylabel="ms", ylim=(0, None), xscale="log")
    if axes.lines:
        axes.legend(fontsize=8)


def draw_drafts(axes, found: dict[str, dict]) -> None:
    """Speed-up of the memory-bound pair by draft length, measured and predicted."""
    points = []
    for k in range(1, 17):
        gain, ratio = (found.get(f"spec.1b.alpha80.k{k}.{what}") for what in ("speedup", "measured_over_predicted"))
        if gain and ratio:
            points.append((k, gain["value"], gain["value"] / ratio["value"]))
    if points:
        x, measured, predicted = zip(*points, strict=True)
        axes.plot(x, measured, "o-", color="#1b6ca8", label="measured")
        axes.plot(x, predicted, "--", color="#1b6ca8", lw=1, label="predicted from c, v and tokens a round")
        axes.legend(fontsize=8)
    axes.axhline(1, color="k", lw=0.6)
    axes.set(title="speculation, 1.1B with 0.1B, alpha 0.8", xlabel="tokens drafted a round", ylabel="speed-up")
