"""What every rank of a test runs: cases from a JSON file, results of rank 0 into another file.
Started by torchrun, or called by the test itself as one process for comparison."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from steps import token_records

from cli.report import RowStatistics
from decoding.engine import Engine
from decoding.kv_8bit import CACHE_TYPES
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.suffix import SuffixDraft
from drafts.target_layers import layer_subset
from loading.checkpoint import load_model
from tp import ALONE, Ranks, join, leave
from weights.formats import FORMATS, Format, Int8, pack_bits, unpack_bits
from weights.walker import pack_model, quantized_copy


class Ternary(Format):
    """As in docs/fork.md: without a `scope` it sees full rows."""

    def shapes(self, rows, columns):
        return {"codes": ((rows, columns), torch.int8), "scale": ((rows,), torch.bfloat16)}

    def quantize(self, w):
        scale = w.abs().mean(1).to(torch.bfloat16)
        return {
            "codes": (w / scale.float()[:, None]).round().clamp(-1, 1).to(torch.int8),
            "scale": scale,
        }

    def dequantize(self, parts):
        return parts["codes"].float() * parts["scale"].float()[:, None]


class Codebook(Format):
    """16 numbers of a matrix, spread over what occurs in it; every row repeats them."""

    scope = "matrix"

    def shapes(self, rows, columns):
        return {"codes": ((rows, columns // 2), torch.uint8), "table": ((rows, 16), torch.float32)}

    def quantize(self, w):
        table = torch.quantile(w.flatten()[:: max(1, w.numel() // 2**16)], torch.linspace(0, 1, 16))
        codes = (w.flatten()[:, None] - table).abs().argmin(1).view(w.shape)
        return {"codes": pack_bits(codes, 4), "table": table.expand(len(w), 16)}

    def dequantize(self, parts):
        return parts["table"].gather(1, unpack_bits(parts["codes"], 4).long())


class Halved(Int8):
    """Another rounding of a format that takes rows' largest weights, which this one does not."""

    scope = "rows"

    def quantize(self, w):
        parts = super().quantize(w / 2)
        return parts | {"scale": 2 * parts["scale"]}


FORKS = {"ternary": Ternary(bits=8), "codebook": Codebook(bits=4), "halved": Halved(bits=8)}
PROMPTS = [[5, 9, 40], [7, 80, 3, 21, 5]]  # batch 2, unequal lengths


class Unequal:
    """Proposes what depends on the rank."""

    def __init__(self, rank: int):
        self.generator = torch.Generator().manual_seed(rank)

    def propose(self, batch, plan):
        tokens = torch.randint(131, (len(batch.pos), 3), generator=self.generator)
        return tokens, torch.nn.functional.one_hot(tokens, 131).float()


def make_drafter(spec: str | None, model, case: dict, ranks: Ranks):
    if spec is None:
        return None
    if spec in ("sharded", "replicated"):
        tp = ranks if spec == "sharded" else None
        return ModelDraft(load_model(case["draft"], dtype=torch.float32, tp=tp, pack=False))
    if spec == "unequal":
        return Unequal(ranks.rank)
    if spec == "ngram":
        return NgramDraft(2)
    if spec == "suffix":
        return SuffixDraft()
    if spec == "layers":
        return ModelDraft(layer_subset(model, [0]), on_layers=[0])
    return ModelDraft(quantized_copy(model, spec), on_layers=range(model.config.n_layers))


def run_case(case: dict, ranks: Ranks = ALONE) -> dict:
    """Logits (2, 3, V) of a batch of two sequences of three, what both prompts continue with, and
    how many drafted tokens were reached and accepted, row by row."""
    if case.get("quantize") in FORKS:
        FORMATS[case["quantize"]] = FORKS[case["quantize"]]
    options = {
        "quantize": case.get("quantize"),
        "head_scheme": case.get("head"),
        "tp": ranks,
        "pack": False,
    }
    model = load_model(
        case["folder"], dtype=getattr(torch, case.get("dtype", "float32")), **options
    )
    drafter = make_drafter(case.get("drafter"), model, case, ranks)
    pack_model(model, *([drafter.model] if getattr(drafter, "model", None) else []))
    tokens = torch.tensor([[1, 2, 130], [66, 65, 64]])
    with torch.inference_mode():
        logits = model(tokens, torch.arange(3))
    if ranks.rank:  # kernels that round differently, on a scale that shows
        for one in {model, getattr(drafter, "model", None) or model}:
            one.lm_head.register_forward_hook(
                lambda _, args, y: y + case.get("noise", 0) * torch.randn_like(y)
            )
    n, sampling = case.get("tokens", 64), Sampling(**case.get("sampling", {"temperature": 0}))
    compile, k = case.get("compile", False), case.get("k", 3)
    kind = CACHE_TYPES[case.get("cache", "model")]
    engine = Engine(model, 2, 96, compile=compile, drafter=drafter, speculate_k=k, cache_type=kind)
    if compile:
        engine.warm_up(sampling.path)
    if k == "auto":
        engine.calibrate(sampling, 10)
    found: list[list[int]] = [[], []]
    timing = Timing()
    with torch.compiler.set_stance("fail_on_recompile" if compile else "default"):
        stops = case.get("stops", ())
        for row, id in engine.generate(
            PROMPTS,
            sampling=sampling,
            max_new_tokens=n,
            stop_ids=stops,
            seed=11,
            timing=timing,
        ):
            found[row].append(id)
    if ranks.world > 1:
        every = [None] * ranks.world
        dist.all_gather_object(every, found)
        assert all(other == found for other in every), f"ranks disagree: {every}"
    rows = [RowStatistics(row) for row in token_records(timing)]
    counts = [(sum(row.reached.values()), sum(row.accepted.values())) for row in rows]
    return {"logits": logits, "tokens": found, "counts": counts}


def main() -> None:
    ranks = join(torch.device("cpu"), 60)
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for name, case in cases.items():
        try:
            results[name] = run_case(case, ranks)
        except ValueError as error:
            results[name] = {"error": str(error)}
    if ranks.rank == 0:
        torch.save(results, sys.argv[2])
    leave()
    threads = [(task / "comm").read_text() for task in Path("/proc/self/task").glob("*")]
    assert not any("gloo" in name for name in threads), (
        f"the group's threads outlive it, and may abort: {threads}"
    )


if __name__ == "__main__":
    main()
