"""Tensor parallelism: what a rank holds, without processes; and two and four gloo ranks against one
process."""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import BASE, FAMILIES, ROOT, rope
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tp_worker import FORKS, run_case

import cli.errors as edge
import decoding.readback as timing
import loading.checkpoint as checkpoint
import loading.models as models
import loading.weight_names as weight_names
import tp
from loading.checkpoint import load_config, load_model
from loading.saving import save_model
from scripts import tp_plan
from scripts.tp_plan import plan
from tp import Ranks, shard_range
from weights import formats
from weights.formats import FORMATS, dequantize_tensor
from weights.walker import quantize_model, quantized_linears

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SCHEMES = list(FORMATS)
DIVISIBLE = [name for name in FAMILIES if FAMILIES[name].get("num_attention_heads", 4) % 4 == 0]

WIDE = {  # every group but those of 256 inputs divides over four ranks, more than the KV heads
    **BASE,
    "model_type": "qwen2",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    **rope(10000.0),
}


def random_folder(folder, hf: dict, seed: int = 3):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**hf)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.08)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """ "tied" and "untied" folders of WIDE, and "draft", a smaller model with the same
    vocabulary."""
    root = tmp_path_factory.mktemp("wide")
    small = {**BASE, "model_type": "llama", "num_hidden_layers": 1, **rope(10000.0)}
    return {
        "tied": random_folder(root / "tied", {**WIDE, "tie_word_embeddings": True}),
        "untied": random_folder(root / "untied", WIDE),
        "draft": random_folder(root / "draft", small, seed=4),
    }


# ------------------------------------------------------------------------------ what a rank holds


def part_of(folder, rank: int, world: int, scheme: str | None = None, head: str | None = None):
    """What load_model would hold on one rank, without the others: a folder that is stored as it
    will be held."""
    source, ranks = checkpoint.Checkpoint(folder).source, Ranks(rank, world)
    schemes = models.same_schemes(source.config, scheme, head)
    model = models.allocate(models.empty_model(source.config, torch.float32, schemes, ranks), "cpu")
    for name, parameter in model.named_parameters():
        parameter.view(torch.uint8).fill_(255)  # so that what is not filled in shows
        models.load_parameters(model, [name], source.tensors, ranks)
    return model


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def joined(
    folder, world: int, scheme: str | None = None, head: str | None = None
) -> dict[str, torch.Tensor]:
    """Every stored tensor put together again from what the ranks hold, by its Hugging Face name
    alone."""
    config = load_config(folder)
    held: dict[str, list[torch.Tensor]] = {}
    for rank in range(world):
        model = part_of(folder, rank, world, scheme, head)
        for name, parameter in model.named_parameters():
            for source, part in weight_names.pieces(config, name, parameter, Ranks(rank, world)):
                held.setdefault(source, []).append(part)
    found = {}
    for source, parts in held.items():
        # fused as published: each rank has some of every part
        if any(name in source for name in ("qkv_proj", "gate_up_proj", "input_linear")):
            H, G, E = config.n_heads // world, max(1, config.n_kv_heads // world), config.head_dim
            sizes = [H * E, G * E, G * E] if "qkv_proj" in source else [len(parts[0]) // 2] * 2
            # of a KV head, where there are fewer than ranks
            copies = max(1, world // config.n_kv_heads)
            each = [[part.split(sizes)[i] for part in parts] for i in range(len(sizes))]
            found[source] = torch.cat(
                [
                    torch.cat(rows[:: copies if i and "qkv" in source else 1])
                    for i, rows in enumerate(each)
                ]
            )
            continue
        columns = ("o_proj", "down_proj", ".w2.", "output_linear")
        by_inputs = any(name in source for name in columns)
        routers = (".gate.", ".router.", "shared_expert_gate.", "correction_bias", "expert_bias")
        routes = any(name in source for name in routers)
        whole_everywhere = "norm" in source or routes or (by_inputs and parts[0].dim() == 1)
        if whole_everywhere:
            assert all(torch.equal(bits(part), bits(parts[0])) for part in parts), source
            found[source] = parts[0]
            continue
        if any(name in source for name in ("k_proj", "v_proj")) and world > config.n_kv_heads:
            copies = world // config.n_kv_heads
            assert all(
                torch.equal(bits(parts[i]), bits(parts[i // copies * copies])) for i in range(world)
            ), source
            parts = parts[::copies]
        found[source] = torch.cat(parts, dim=1 if by_inputs else 0)
        if source.startswith(("model.embed", "lm_head")):
            assert not found[source][config.vocab_size :].float().any(), (
                "a vocabulary's padding is zeros"
            )
            found[source] = found[source][: config.vocab_size]
    return found


def same(found: dict, folder) -> None:
    tensors = checkpoint.Checkpoint(folder).model_tensors
    for name, stored in tensors.items():
        if name in found or not load_config(folder).tie_embeddings:
            want = stored[...]
            assert torch.equal(bits(found[name].to(want.dtype)), bits(want)), name
    assert found.keys() <= tensors.keys()


@pytest.mark.one_in(6, 2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("family", DIVISIBLE)
def test_parts_join_to_every_tensor(family, world, folder_of):
    same(joined(folder_of(family), world), folder_of(family))


@pytest.mark.parametrize(
    "scheme, world",
    [
        (scheme, world)
        for scheme in SCHEMES
        for world in (2, 4)
        if world * FORMATS[scheme].group <= 512
    ],
)
@pytest.mark.attack
def test_parts_join_to_every_tensor_of_every_format(scheme, world, wide, tmp_path):
    """The head quantized too, which cuts packed codes and their scales by an uneven vocabulary."""
    hf = json.loads((wide["untied"] / "config.json").read_text()) | {
        "quantization": {"scheme": scheme, "head": scheme}
    }
    save_model(
        load_model(
            wide["untied"], dtype=torch.float32, quantize=scheme, head_scheme=scheme, pack=False
        ),
        tmp_path / "q",
        hf,
    )
    same(joined(tmp_path / "q", world, scheme, scheme), tmp_path / "q")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stored_part_dequantizes_to_its_slice(scheme, wide, tmp_path):
    """By definition, on the fused matrices: rank 1 of 2 holds the second half of q's rows, then of
    k's, then of v's, and of down's columns."""
    hf = json.loads((wide["untied"] / "config.json").read_text()) | {
        "quantization": {"scheme": scheme, "head": None}
    }
    whole = load_model(wide["untied"], dtype=torch.float32, quantize=scheme, pack=False)
    save_model(whole, tmp_path / "q", hf)
    part = part_of(tmp_path / "q", 1, 2, scheme)
    q, k, v = dequantize_tensor(whole.layers[1].attention.qkv.parts(), scheme).split(
        (512, 256, 256)
    )
    want = torch.cat([matrix[len(matrix) // 2 :] for matrix in (q, k, v)])
    assert torch.equal(dequantize_tensor(part.layers[1].attention.qkv.parts(), scheme), want)
    want = dequantize_tensor(whole.layers[1].ffn.down.parts(), scheme)[:, 256:]
    assert torch.equal(dequantize_tensor(part.layers[1].ffn.down.parts(), scheme), want)


@dataclasses.dataclass
class Shape:
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int = 16


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 400),
    st.integers(1, 16),
)
def test_shares_cover_everything_once(G, R, F, V, world):
    """In order, without gaps; a query head lies where its KV head does; what does not divide is
    refused."""
    shape = Shape(G * R, G, F, V)
    for units in ("n_heads", "ffn_dim", "n_kv_heads", "vocab_size"):
        n = getattr(shape, units)
        replicated = units == "n_kv_heads" and n < world and world % n == 0
        if units != "vocab_size" and n % world and not replicated:
            with pytest.raises(ValueError, match=f"= {n} cannot be divided over {world} ranks"):
                shard_range(shape, units, 0, world)
            continue
        shares = [shard_range(shape, units, rank, world) for rank in range(world)]
        assert len({one.size for one in shares}) == 1, "all ranks have the same shapes"
        if replicated:
            assert [one.begin for one in shares] == [rank // (world // n) for rank in range(world)]
            assert all(one.end == one.begin + 1 for one in shares)
        else:
            assert [id for one in shares for id in range(one.begin, one.end)] == list(range(n))
    if (G * R) % world == 0 and (G % world == 0 or world % G == 0):
        for rank in range(world):
            heads, kv = (
                shard_range(shape, "n_heads", rank, world),
                shard_range(shape, "n_kv_heads", rank, world),
            )
            # R as the rank's shapes say it
            per_head = (heads.end - heads.begin) // (kv.end - kv.begin)
            for i, head in enumerate(range(heads.begin, heads.end)):
                assert head // R == kv.begin + i // per_head


def test_what_cannot_be_divided_is_refused_with_both_numbers(folder_of, wide):
    cases = [
        ("smollm2", 2, None, r"num_attention_heads = 9 cannot be divided over 2 ranks"),
        ("llama-3", 3, None, r"num_attention_heads = 4 cannot be divided over 3 ranks"),
        (
            "llama-3",
            2,
            "mxfp4",
            r"ffn.down: 96 inputs over 2 ranks are 48 each, which splits a group of 32",
        ),
        (
            "llama-3",
            4,
            "int4-g32",
            r"attention.out: 64 inputs over 4 ranks are 16 each, which splits a group of 32",
        ),
    ]
    for family, world, scheme, message in cases:
        with pytest.raises(ValueError, match=message):
            load_model(folder_of(family), tp=Ranks(0, world), quantize=scheme)
        with pytest.raises(ValueError, match=message):
            models.random_model(load_config(folder_of(family)), tp=Ranks(0, world), quantize=scheme)
    config = dataclasses.replace(load_config(folder_of("llama-3")), ffn_dim=97)
    with pytest.raises(ValueError, match=r"intermediate_size = 97 cannot be divided over 2 ranks"):
        tp.check_divisible(config, 2)
    config = dataclasses.replace(load_config(folder_of("llama-3")), n_heads=12, n_kv_heads=4)
    with pytest.raises(ValueError, match=r"num_key_value_heads = 4 cannot be divided over 6 ranks"):
        tp.check_divisible(config, 6)
    # 49 inputs, no groups
    tp.check_divisible(dataclasses.replace(load_config(folder_of("llama-3")), ffn_dim=98), 2)


def test_a_format_that_needs_whole_rows_is_not_cut(monkeypatch):
    """Somebody's own format, with a scale a row that is no maximum."""
    monkeypatch.setitem(FORMATS, "mean", formats.Format(8))
    with pytest.raises(ValueError, match="mean takes no row_max"):
        formats.quantize_tensor(torch.ones(2, 4), "mean", row_max=torch.ones(2))


class Listening(Ranks):
    """Ranks without processes: what this one says is kept, and taken for what all say."""

    def sum(self, x):
        parts.append(x)
        return x


parts: list[torch.Tensor] = []


@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_a_product_add_up(world, folder_of):
    """What the ranks sum behind `out`, `down` and the embedding is what one process has there:
    every bias once, every row of the embedding from the one rank that holds it."""
    folder = folder_of("llama-biased")
    whole = load_model(folder, dtype=torch.float32)
    inputs = {"layers.1.attention.out": torch.randn(3, 64), "layers.1.ffn.down": torch.randn(3, 96)}
    inputs["embed"] = torch.arange(131)[None]  # every id
    for name, x in inputs.items():
        parts.clear()
        for rank in range(world):
            model = tp.connect(part_of(folder, rank, world), Listening(rank, world))
            model.get_submodule(name)(x if name == "embed" else x.chunk(world, -1)[rank])
        assert len(parts) == world and torch.allclose(
            sum(parts), whole.get_submodule(name)(x), atol=1e-5
        ), name


def test_what_ranks_say_to_each_other(monkeypatch):
    """Three ranks' logits next to each other in rank order, the padding cut off; and rank 0's word
    for all. The test stands in for the collectives, each of which it answers by what torch
    documents."""
    V, size = 131, 44
    logits = torch.randn(2, 5, V)
    padded = torch.nn.functional.pad(logits, (0, 3 * size - V), value=9.0).split(size, -1)
    functional = torch.ops._c10d_functional
    flat = torch.cat([part.reshape(1, -1) for part in padded])
    monkeypatch.setattr(functional, "all_gather_into_tensor", lambda x, world, group: flat)
    monkeypatch.setattr(functional, "broadcast", lambda x, source, group: padded[source])
    monkeypatch.setattr(functional, "wait_tensor", lambda x: x)
    for rank in range(3):
        ranks = Ranks(rank, 3, "group")
        assert torch.equal(ranks.gather(padded[rank])[..., :V], logits)
        assert torch.equal(ranks.broadcast(padded[rank]), padded[0])


class Asking(Listening):
    """`max` of what every rank has said in a first round; in the first, of its own."""

    def check_same(self, what):
        pass

    def max(self, x):
        said[self.rank].append(x)
        other = said[1 - self.rank]
        return (
            torch.maximum(x, other[len(said[self.rank]) - 1])
            if len(other) >= len(said[self.rank])
            else x
        )


said: list[list[torch.Tensor]] = [[], []]


@pytest.mark.parametrize("scheme", ["int8", "fp8", "nvfp4"])
def test_codes_of_a_rank_are_a_slice_of_the_whole_rows(scheme, wide):
    """A row's scale is that of the whole row, whatever part of it a rank reads: else its codes
    would be others."""
    whole = (
        load_model(wide["untied"], dtype=torch.float32, quantize=scheme, pack=False)
        .layers[1]
        .ffn.down.parts()
    )
    said[0], said[1] = [], []
    for rank in (0, 1, 0):  # the first time, rank 0 does not know yet what rank 1 will say
        said[rank].clear()
        model = load_model(
            wide["untied"], dtype=torch.float32, quantize=scheme, tp=Asking(rank, 2), pack=False
        )
        found = model.layers[1].ffn.down.parts()
    assert len(said[1]) == 4
    for name, part in whole.items():
        mine = part[:, : part.size(1) // 2] if part.dim() == 2 else part
        assert torch.equal(bits(found[name]), bits(mine)), name


def test_a_format_of_matrices_sees_all_rows(monkeypatch):
    """A codebook for every chunk of rows would be another format."""
    monkeypatch.setitem(FORMATS, "codebook", FORKS["codebook"])
    monkeypatch.setattr(formats, "CHUNK_WEIGHTS", 256)
    weight = (
        torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
        * torch.arange(1, 65)[:, None]
    )
    parts, expected = (
        formats.quantize_tensor(weight, "codebook"),
        FORKS["codebook"].quantize(weight),
    )
    assert all(torch.equal(parts[name], expected[name]) for name in expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", FORKS)
def test_a_forks_format_is_the_same_on_ranks(scheme, wide, tmp_path, monkeypatch):
    """Whatever it must see of a weight, a row or all, a rank holds its share of what one process
    has: from a folder in full precision, and from a quantized one."""
    monkeypatch.setitem(FORMATS, scheme, FORKS[scheme])
    monkeypatch.setattr(formats, "CHUNK_WEIGHTS", 4096)
    options = {"dtype": torch.float32, "quantize": scheme, "head_scheme": scheme, "pack": False}
    one = load_model(wide["untied"], **options)
    in_memory = quantize_model(
        load_model(wide["untied"], dtype=torch.float32, pack=False), scheme, scheme
    )
    assert all(
        torch.equal(bits(a), bits(b))
        for a, b in zip(one.parameters(), in_memory.parameters(), strict=True)
    )
    save_model(one, tmp_path / "q", json.loads((wide["untied"] / "config.json").read_text()))
    for rank in range(2):
        fresh = load_model(wide["untied"], tp=Asking(rank, 2), **options)
        stored = part_of(tmp_path / "q", rank, 2, scheme, scheme)
        for name in (
            "layers.1.attention.out",
            "layers.1.ffn.down",
            "layers.0.ffn.gate_up",
            "lm_head",
        ):
            linear = one.get_submodule(name)
            if name.endswith("gate_up"):
                share = torch.cat(
                    [part.chunk(2)[rank] for part in linear.dequantized(torch.float32).chunk(2)]
                )
            elif name == "lm_head":
                share = linear.dequantized(torch.float32)[66 * rank : 66 * rank + 66]
            else:
                share = linear.dequantized(torch.float32).chunk(2, 1)[rank]
            for model in (fresh, stored):
                assert torch.equal(
                    model.get_submodule(name).dequantized(torch.float32)[: len(share)], share
                ), name


# -------------------------------------------------------------------------------------- processes


def launch(*arguments, nproc: int = 2, timeout: float = 1200, env: dict | None = None, **options):
    command = [*TORCHRUN, f"--nproc_per_node={nproc}", *map(str, arguments)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_ERROR_FILE": "",
        **(env or {}),
    }
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        **options,
    )


SPARSE = ("mixtral", "qwen2-moe", "qwen3-moe-mixed", "gpt-oss")
STRUCTURES = (
    "llama-2",
    "llama-3.2",
    "llama-biased",
    "tinyllama",
    "mistral-v0.1",
    "qwen2",
    "qwen3",
    *SPARSE,
)
# A launch of all cases takes minutes: -m long has it. Four ranks share two cores, and try fewer
# still.
ON_TWO = (
    *(f"family {name}" for name in (*STRUCTURES, "smollm2")),
    *(f"scheme {scheme}" for scheme in ("int8", "int4-g32", "q4_k", "fp8-g128", "mxfp4")),
    "fork codebook",
    "scheme and head mxfp6",
    "draft sharded 0",
    "draft replicated 0",
    "draft ngram 0",
    "draft layers 0",
    "draft int8 0",
    "draft suffix 0",
    "draft unequal 0",
    "draft sharded 0.9",
    "draft auto",
    "noisy plain sampled",
    "noisy draft sharded 0.9",
    "noisy draft auto",
    "plain sampled",
    "stops",
    "experts int4-g32",
    "family glm-4.5",
    "family gemma-3",
    "shared experts int8",
    "cache int8",
    "cache fp8",
)
ON_FOUR = (
    "family llama-3.2",
    "family llama-biased",
    "scheme int4-g32",
    "draft sharded 0",
)


@pytest.fixture(scope="module")
def cases(folder_of, wide):
    """Every family; every scheme; every drafter, greedy and sampled; by name."""
    found = {f"family {name}": {"folder": str(folder_of(name))} for name in FAMILIES}
    draft = str(wide["draft"])
    found["experts int4-g32"] = {
        "folder": str(folder_of("gpt-oss")),
        "quantize": "int4-g32",
        "tokens": 24,
    }
    found["shared experts int8"] = {
        "folder": str(folder_of("glm-4.5")),
        "quantize": "int8",
        "tokens": 24,
    }
    # few tokens: where ranks round otherwise, a number may get the next code
    for kind in ("int8", "fp8"):
        found[f"cache {kind}"] = {
            "folder": str(wide["tied"]),
            "cache": kind,
            "tokens": 12,
            "drafter": "ngram",
        }
    for scheme in SCHEMES:
        found[f"scheme {scheme}"] = {
            "folder": str(wide["untied"]),
            "quantize": scheme,
            "tokens": 24,
        }
        found[f"scheme and head {scheme}"] = {
            "folder": str(wide["tied"]),
            "quantize": scheme,
            "head": scheme,
        }
    found |= {
        f"fork {name}": {"folder": str(wide["untied"]), "quantize": name, "tokens": 24}
        for name in FORKS
    }
    for drafter in (
        "sharded",
        "replicated",
        "ngram",
        "suffix",
        "layers",
        "int8",
        "mxfp4",
        "unequal",
    ):
        for temperature in (0, 0.9):
            found[f"draft {drafter} {temperature}"] = {
                "folder": str(wide["tied"]),
                "drafter": drafter,
                "draft": draft,
                "sampling": {"temperature": temperature},
            }
    found["draft auto"] = {
        "folder": str(wide["tied"]),
        "drafter": "sharded",
        "draft": draft,
        "k": "auto",
    }
    found["plain sampled"] = {
        "folder": str(wide["tied"]),
        "sampling": {"temperature": 0.9, "top_p": 0.9},
    }
    for name in ("plain sampled", "draft sharded 0.9", "draft auto"):
        found[f"noisy {name}"] = {**found[name], "noise": 0.1}
    found["stops"] = {
        "folder": str(wide["tied"]),
        "sampling": {"temperature": 1.5},
        "stops": list(range(0, 131, 9)),
    }
    return found


def run_ranks(cases: dict, nproc: int, folder) -> dict:
    (folder / "cases.json").write_text(json.dumps(cases))
    done = launch(
        ROOT / "tests" / "tp_worker.py", folder / "cases.json", folder / "results.pt", nproc=nproc
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def alone(cases):
    """A case in one process, by name."""
    return functools.cache(lambda name: run_case(cases[name]))


def compare(name: str, got: dict, want: dict, tokens: int = 64) -> None:
    assert "error" not in got, (name, got)
    error = (got["logits"] - want["logits"]).abs().max()
    assert error < 1e-4, f"{name}: logits differ by {error}"
    assert got["tokens"] == [row[:tokens] for row in want["tokens"]], name


def check_ranks(nproc: int, here: dict, alone, tmp_path) -> None:
    """Logits of batch 2 and sequence 3 within 1e-4, 64 tokens a row (24 with schemes) identical, in
    float32: greedy ones, and sampled ones, which would differ only where a number of 24 random bits
    falls within rounding of a border (below 1e-4 for all of them together). The worker itself
    asserts that every rank yields the same."""
    got = run_ranks(here, nproc, tmp_path)
    for name in here:
        want = alone(name)
        if name == "family smollm2":
            assert "num_attention_heads = 9 cannot be divided" in got[name]["error"]
        elif load_config(here[name]["folder"]).qk_norm == "full":
            assert "normed over all heads" in got[name]["error"], name
        elif name.startswith("noisy"):
            # The other rank computes something else; what rank 0 decides is all that counts.
            assert got[name]["tokens"] == got[name.removeprefix("noisy ")]["tokens"], name
        elif "draft" in name and "0.9" in name:
            # Drafts differ in the last bit from those of one process, and with them what is
            # accepted: another sample of the same law. What the ranks share is asserted by the
            # worker.
            assert [len(row) for row in got[name]["tokens"]] == [64, 64], name
        else:
            compare(name, got[name], want)
        # a row's scale is that of the rank's part: another rounding, the same acceptance
        if name == "draft int8 0":
            reached, accepted = (sum(count) for count in zip(*got[name]["counts"], strict=True))
            assert (
                accepted > 0.8 * reached and sum(row[1] for row in want["counts"]) > 0.8 * reached
            )
        elif name.startswith("draft") and name.endswith(" 0") and "unequal" not in name:
            assert got[name]["counts"] == want["counts"], name
    assert len(alone("stops")["tokens"][0]) < 64


@pytest.mark.ranks
def test_two_ranks_equal_one_process(cases, alone, tmp_path):
    check_ranks(2, {name: cases[name] for name in ON_TWO}, alone, tmp_path)


@pytest.mark.long
@pytest.mark.ranks
def test_four_ranks_equal_one_process(cases, alone, tmp_path):
    check_ranks(4, {name: cases[name] for name in ON_FOUR}, alone, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("nproc", [2, 4])
def test_everything_on_ranks(nproc, cases, alone, tmp_path):
    """One and four minutes on two cores."""
    check_ranks(nproc, cases, alone, tmp_path)


def check_compiled(cases: dict, folder) -> None:
    """Collectives inside the graph: one graph a step, nothing compiled after warm-up."""
    got = run_ranks({name: {**case, "compile": True} for name, case in cases.items()}, 2, folder)
    for name, case in cases.items():
        compare(name, got[name], run_case(case))


@pytest.mark.long
def test_compiled_ranks_equal_one_process(wide, tmp_path):
    """The plain step, the draft's steps and the verifying one: two minutes with cold caches."""
    common = {"folder": str(wide["untied"]), "draft": str(wide["draft"])}
    check_compiled({"draft": {**common, "quantize": "int4-g32", "drafter": "sharded"}}, tmp_path)


@pytest.mark.long
def test_everything_compiled_on_two_ranks(wide, folder_of, tmp_path):
    """Every scheme, every drafter, and families that differ in structure: ten minutes on two
    cores."""
    untied = str(wide["untied"])
    cases = {f"scheme {scheme}": {"folder": untied, "quantize": scheme} for scheme in SCHEMES}
    for drafter in ("sharded", "replicated", "ngram", "layers", "int8", "mxfp4"):
        cases[f"draft {drafter}"] = {
            "folder": untied,
            "drafter": drafter,
            "draft": str(wide["draft"]),
        }
    for family in STRUCTURES:
        cases[f"family {family}"] = {"folder": str(folder_of(family))}
    check_compiled(cases, tmp_path)


# ---------------------------------------------------------------------------------------- tp_plan

# Bytes that a rank reads for one token, as GB/s over tokens/s of the table in gpt-fast's README
# (meta-pytorch/gpt-fast, "Tensor Parallelism" and "Tensor Parallelism + Quantization", A100-80GB):
# (shape, ranks, scheme): (tokens/s, GB/s).
GPT_FAST = {
    ("llama-2-7b", 1, None): (104.9, 1397.31),
    ("llama-2-7b", 2, None): (168.84, 1181.99),
    ("llama-2-7b", 4, None): (254.02, 955.83),
    ("llama-2-7b", 8, None): (328.43, 704.10),
    ("llama-2-70b", 2, None): (21.32, 1481.87),
    ("llama-2-70b", 4, None): (38.01, 1340.76),
    ("llama-2-70b", 8, None): (62.50, 1135.29),
    ("llama-2-70b", 8, "int8"): (80.44, 752.04),
    ("llama-2-70b", 8, "int4-g32"): (90.77, 548.10),
    ("llama-3.1-8b", 1, None): (93.83, 1408.37),
    ("llama-3.1-8b", 2, None): (149.10, 1197.32),
    ("llama-3.1-8b", 4, None): (217.21, 986.32),
    ("llama-3.1-8b", 8, None): (276.01, 772.60),
    ("llama-3.1-70b", 2, None): (16.03, 1130.81),
    ("llama-3.1-70b", 4, None): (37.45, 1360.53),
    ("llama-3.1-70b", 8, None): (58.78, 1129.61),
    ("llama-3.1-70b", 8, "int8"): (75.58, 726.57),
    ("llama-3.1-405b", 8, "int8"): (15.60, 815.87),
}


@pytest.mark.parametrize("shape, world, scheme", GPT_FAST)
@pytest.mark.attack
def test_plan_agrees_with_published_bytes(shape, world, scheme):
    """gpt-fast divides the blocks as we do; head and embedding stand whole on every rank, and its
    Llama-2 runs on several GPUs counted the embedding as read. Within 1 %: its one-GPU run of 7B
    also counts the cache."""
    config = checkpoint.read_config(ROOT / "benchmarks" / "shapes" / f"{shape}.json")
    part, whole = (
        plan(config, world, schemes=models.same_schemes(config, scheme)),
        plan(config, 1, schemes=models.same_schemes(config, scheme, scheme)),
    )
    embedding = whole["embedding"] if "llama-2" in shape and world > 1 else 0
    tokens_s, gb_s = GPT_FAST[shape, world, scheme]
    assert part["blocks"] + whole["head"] + embedding == pytest.approx(
        gb_s / tokens_s * 1e9, rel=0.01
    )
    assert part["read_per_token"] < part["blocks"] + whole["head"] or world == 1, (
        "and we divide the head too"
    )


class Counting(Ranks):
    def sum(self, x):
        counted.append(x.numel())
        return x


counted: list[int] = []


@pytest.mark.parametrize("scheme", [None, "int4-g32"])
def test_plan_counts_what_a_rank_holds_and_sends(scheme, wide, tmp_path):
    """Against a real part: its parameters, its cache, and the sums of one forward pass."""
    config = load_config(wide["untied"])
    found = plan(config, 4, torch.float32, models.same_schemes(config, scheme))
    hf = json.loads((wide["untied"] / "config.json").read_text())
    if scheme:
        save_model(
            load_model(wide["untied"], dtype=torch.float32, quantize=scheme, pack=False),
            tmp_path / "q",
            hf | {"quantization": {"scheme": scheme, "head": None}},
        )
    model = part_of(tmp_path / "q" if scheme else wide["untied"], 0, 4, scheme)
    for linear in quantized_linears(model):
        linear.pack()
    assert found["weights"] == sum(parameter.nbytes for parameter in model.parameters())
    cache = sum(layer.k.nbytes + layer.v.nbytes for layer in model.make_caches(1, 10).layers)
    assert cache == 10 * found["kv_per_token"] and found["kv_copies"] == 2
    tp.connect(model, Counting(0, 4))
    counted.clear()
    model.hidden(torch.tensor([[1]]), torch.tensor([0]))
    assert counted == [found["all_reduce_bytes"] // 4] * found["all_reduces"]


def test_plan_on_the_command_line(capsys):
    shape = str(ROOT / "benchmarks" / "shapes" / "llama-3.1-70b.json")
    tp_plan.main(
        [shape, "--ranks", "1,6,16", "--json", "--latency", "0", "--link", "1e9", "--context", "0"]
    )
    one, six, sixteen = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["tok_s"] == pytest.approx(3350e9 / one["read_per_token"])
    assert "num_attention_heads = 64 cannot be divided over 6 ranks" in six["refused"]
    assert (
        sixteen["tok_s"] == pytest.approx(3350e9 / sixteen["read_per_token"], rel=1e-4)
        and sixteen["kv_copies"] == 2
    )
    tp_plan.main([shape, "--ranks", "1,8,16", "--memory", "80"])
    out = capsys.readouterr().out
    assert "does not fit: 141 GB" in out
    assert out.count("a KV head on") == out.count("a KV head on 2 ranks") == 1
    for wrong in (["--ranks", "0,2"], ["--quantize", "int3"], ["--bandwidth", "0"]):
        with pytest.raises(SystemExit) as exit:
            tp_plan.main([shape, *wrong])
        assert exit.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def plans(capsys, path, *flags: str) -> list[dict]:
    tp_plan.main([str(path), "--json", "--latency", "0", "--link", "1e9", *flags])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("scheme, head", [("int8", None), ("int4-g32", "int8")])
def test_plan_of_what_is_quantized_already(scheme, head, wide, tmp_path, capsys):
    """Of a folder and of its config.json alone: the bytes that loading holds."""
    model = load_model(wide["untied"], quantize=scheme, head_scheme=head, pack=False)
    save_model(model, tmp_path / "q", json.loads((wide["untied"] / "config.json").read_text()))
    parts = [part_of(tmp_path / "q", 0, world, scheme, head) for world in (1, 2)]
    sizes = [sum(parameter.nbytes for parameter in part.parameters()) for part in parts]
    for path in (tmp_path / "q", tmp_path / "q" / "config.json"):
        rows = plans(capsys, path, "--ranks", "1,2", "--dtype", "float32")
        assert [row["weights"] for row in rows] == sizes
    with pytest.raises(SystemExit):
        tp_plan.main([str(tmp_path / "q"), "--quantize", "mxfp8"])
    assert f"is stored in {scheme} and cannot be quantized to mxfp8" in capsys.readouterr().err


def test_plan_of_other_programs_config(tmp_path, capsys):
    """gpt-oss as published has its experts in MXFP4. Which scheme holds GPTQ's matrices is not in a
    config.json."""
    shape = json.loads((ROOT / "benchmarks" / "shapes" / "gpt-oss-20b.json").read_text())
    file = tmp_path / "oss.json"
    file.write_text(json.dumps(shape | {"quantization_config": {"quant_method": "mxfp4"}}))
    (row,) = plans(capsys, file, "--ranks", "1")
    experts = 24 * 32 * 3 * 2880 * 2880
    (plain,) = plans(capsys, ROOT / "benchmarks" / "shapes" / "gpt-oss-20b.json", "--ranks", "1")
    assert plain["weights"] - row["weights"] == experts * 2 - experts * 17 // 32
    demo = json.loads((ROOT / "checkpoints" / "demo" / "config.json").read_text())
    file.write_text(
        json.dumps(
            demo | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
        )
    )
    with pytest.raises(SystemExit):
        tp_plan.main([str(file)])
    assert "quant_method = 'gptq'" in capsys.readouterr().err
    assert plans(capsys, file, "--quantize", "int8", "--ranks", "1")


def test_plan_reads_windows_and_not_beyond_the_model(capsys):
    """Half of gpt-oss's layers read 128 positions, however many are filled; none reads more than
    the model has."""
    shape = ROOT / "benchmarks" / "shapes" / "gpt-oss-20b.json"
    (row,) = plans(capsys, shape, "--ranks", "1", "--context", "131072")
    per_layer = 2 * 8 * 64 * 2
    assert (
        row["kv_read"] == 12 * per_layer * (131072 + 128) and row["kv_per_token"] == 24 * per_layer
    )
    assert row["tok_s"] == pytest.approx(3350e9 / (row["read_per_token"] + row["kv_read"]))
    with pytest.raises(SystemExit) as exit:
        tp_plan.main([str(shape), "--context", "131073"])
    assert (
        exit.value.code == 2
        and "--context 131073 is over the model's 131072 positions" in capsys.readouterr().err
    )


@pytest.mark.ranks
def test_a_rank_reads_and_holds_its_share(wide):
    """What `benchmarks.bench tp` counts: the files' tensors are copied once, over all ranks, but
    for what all hold."""
    code = f"from benchmarks.memory import *; tp_rank({str(wide['untied'])!r}, 1)"
    done = launch("--no-python", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    parts = [json.loads(line) for line in done.stdout.splitlines()]
    config = load_config(wide["untied"])
    # float32 in the file, bfloat16 in memory; 131 rows of the vocabulary are 66 and 65 and a pad
    for part in parts:
        pads = 2 * (66 if part["rank"] == 0 else 65) - 2 * 66
        assert part["copied"] == 2 * part["weights"] + pads * config.dim * 4


# ---------------------------------------------------------------------------- the program, faults

GREEDY = [
    "--temperature",
    "0",
    "--dtype",
    "float32",
    "--max_new_tokens",
    "24",
    "--ignore_eos",
    "--device",
    "cpu",
]


def tokens_of(stdout: str) -> list[list[int]]:
    return [json.loads(line)["tokens"] for line in stdout.splitlines()]


@pytest.fixture(scope="module")
def alone_tokens(text_folder):
    command = [
        sys.executable,
        "generate.py",
        "--checkpoint",
        text_folder,
        *GREEDY,
        "--json",
        "--prompt_file",
        "-",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, input=STDIN, check=True
    )
    return tokens_of(done.stdout)


STDIN = "the little cat\nand a big dog went\n"


@pytest.mark.ranks
def test_the_program_on_two_ranks(text_folder, alone_tokens):
    """Rank 0 alone reads stdin, prints JSON and shows progress."""
    arguments = [
        "generate.py",
        "--checkpoint",
        text_folder,
        *GREEDY,
        "--json",
        "--prompt_file",
        "-",
    ]
    done = launch(*arguments, "--batch_size", "2", input=STDIN)
    assert done.returncode == 0, done.stderr
    assert tokens_of(done.stdout) == alone_tokens
    assert done.stderr.count("peak memory") == 1 and "100%" not in done.stderr


@pytest.mark.ranks
def test_a_chat_on_two_ranks_stops_at_strings(text_folder):
    """Turns are read by rank 0 and told to the others; a stop string, found in text, ends the row
    on all of them."""
    common = ["--checkpoint", text_folder, "--interactive", *GREEDY]
    turns = "the little cat\na big dog\n"
    plain = subprocess.run(
        [sys.executable, "generate.py", *common],
        cwd=ROOT,
        capture_output=True,
        text=True,
        input=turns,
        check=True,
    ).stdout
    stop = plain.split("\n")[0].strip()[8:11]
    cut = launch("generate.py", *common, "--stop", stop, input=turns)
    assert cut.returncode == 0, cut.stderr
    assert (
        plain.startswith(cut.stdout.split("\n")[0])
        and stop not in cut.stdout
        and cut.stderr.count("tok/s]") == 2
    )


@pytest.mark.ranks
def test_a_chat_may_wait_longer_than_the_timeout(text_folder):
    """--timeout is for ranks that wait for each other, not for a person who thinks."""
    chat = ["--checkpoint", text_folder, "--interactive", *GREEDY, "--timeout", "2"]
    command = [*TORCHRUN, "--nproc_per_node=2", "generate.py", *map(str, chat)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        process.stdin.write("the little cat\n")
        process.stdin.flush()
        assert process.stdout.readline().strip()  # the first answer; then 4 s of thought
        time.sleep(4)
        out, err = process.communicate("a big dog\n", timeout=60)
    assert process.returncode == 0 and out.strip(), err


def test_devices_by_local_rank(monkeypatch):
    """GPU number LOCAL_RANK; more ranks than GPUs are refused by all of them alike."""
    assert tp.local_device("cuda:1") == "cuda:1" and tp.local_device(None) is None, (
        "without torchrun, as asked"
    )
    for name, value in {
        "WORLD_SIZE": "8",
        "RANK": "6",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (
        tp.local_device(None) == tp.local_device("cuda") == "cuda:2"
        and tp.local_device("cpu") == "cpu"
    )
    with pytest.raises(ValueError, match="--device cuda:1: with several ranks use cpu or cuda"):
        tp.local_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ValueError, match="--nproc_per_node 4: this machine has 3 GPUs"):
        tp.local_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert tp.local_device(None) is None


def test_a_launcher_need_not_say_how_many_ranks_a_machine_has(monkeypatch):
    """The first of two ranks. Slurm does not set LOCAL_WORLD_SIZE."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert tp.local_device(None) == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="this machine has 2 GPUs"):
        tp.local_device("cuda")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert edge.use_threads(None) == torch.get_num_threads()


def test_leaving_an_nccl_group(monkeypatch):
    """After a failure the process ends at once, since ending the group would wait for ranks that do
    not come; otherwise the graphs that hold the group go before it does."""
    seen = []
    monkeypatch.setattr(tp.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(tp.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(tp.dist, "destroy_process_group", lambda: seen.append("destroyed"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("synchronized"))
    monkeypatch.setattr(torch._dynamo, "reset", lambda: seen.append("reset"))
    edge.leave_ranks()
    assert seen == ["synchronized", "reset", "destroyed"]
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(KeyError(status)))
    for error, status in ((SystemExit(2), 2), (RuntimeError("a bug"), 1)):
        with pytest.raises(KeyError, match=str(status)):
            try:
                raise error
            finally:
                edge.leave_ranks()


def test_the_host_does_not_wait_for_ever():
    """What a step leaves on a GPU: an event that passes, or does not."""
    passed, answers = types.SimpleNamespace(query=lambda: answers.pop()), [True, False, False]
    timing.wait_for(passed, 5)
    assert not answers
    with pytest.raises(torch.distributed.DistError, match=r"nothing came in 0.1 s"):
        timing.wait_for(types.SimpleNamespace(query=lambda: False), 0.1)


@pytest.mark.parametrize("timeout_s", [None, 0.1])
def test_results_of_ranks_are_waited_for_with_a_timeout(timeout_s):
    """One process lets the device say when it is ready; several ask again and again, to give up at
    the timeout."""
    calls = []
    event = types.SimpleNamespace(
        synchronize=lambda: calls.append("wait"), query=lambda: bool(calls.append("ask"))
    )
    readback = timing.Readback(torch.device("cpu"), timeout_s)
    readback.send(timing.StepResult((), *torch.zeros(6, 1, 1)), "label")
    ((step, _, label),) = readback.in_flight
    readback.in_flight[0] = (step, event, label)  # as on a GPU
    refused = pytest.raises(torch.distributed.DistError, match=r"nothing came in 0.1 s")
    with contextlib.nullcontext() if timeout_s is None else refused:
        assert readback.receive()[0] == "label"
    assert set(calls) == {"wait" if timeout_s is None else "ask"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        ["--max_new_tokens", "100000"],
        *(
            pytest.param(flags, marks=pytest.mark.long)
            for flags in (["--checkpoint", "nowhere"], ["--top_k", "x"])
        ),
    ],
)
def test_what_all_ranks_refuse_is_said_once(text_folder, options):
    done = launch("generate.py", "--checkpoint", text_folder, *options)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and done.stdout == "" and len(errors) == 1, done.stderr
    assert "rank" not in errors[0] and options[1] in errors[0]


FAULT = """
import os, sys, time, signal
sys.path.insert(0, {root!r})
from decoding.engine import Engine
from cli.start import main
rank = int(os.environ["RANK"])
open({pids!r} + str(rank), "w").write(str(os.getpid()))
step, count = Engine.step, []
def counted(*args):
    count.append(1)
    if rank == 1 and len(count) == 10:
        {fault}
    return step(*args)
Engine.step = counted
sys.argv = ["generate.py", *{arguments!r}]
if rank == 1:
    sys.argv += {more!r}
main()
"""


def faulty(tmp_path, arguments, fault: str = "pass", more=()):
    """(seconds, what was printed) of two ranks, the second of which fails; neither may be left
    behind."""
    script, pids = tmp_path / "fault.py", f"{tmp_path}/pid"
    values = {
        "root": str(ROOT),
        "pids": pids,
        "arguments": [*map(str, arguments)],
        "more": [*map(str, more)],
    }
    script.write_text(FAULT.format(**values, fault=fault))
    start = time.perf_counter()
    done = launch(script)
    seconds = time.perf_counter() - start
    assert done.returncode != 0, "a failed rank must fail the launch"
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int(Path(f"{pids}{rank}").read_text()), 0)
    return seconds, done


@pytest.mark.ranks
def test_a_killed_rank_ends_the_others(text_folder, tmp_path):
    arguments = ["--checkpoint", text_folder, *GREEDY, "--timeout", "60"]
    seconds, done = faulty(tmp_path, arguments, "os.kill(os.getpid(), signal.SIGKILL)")
    assert seconds < 40 and "SIGKILL" in done.stderr, done.stderr


@pytest.mark.ranks
def test_a_rank_that_hangs_ends_the_others_after_the_timeout(text_folder, tmp_path):
    arguments = ["--checkpoint", text_folder, *GREEDY, "--timeout", "4"]
    seconds, done = faulty(tmp_path, arguments, "time.sleep(600)")
    assert 4 < seconds < 40 and "error: lost contact with another rank" in done.stderr, done.stderr


@pytest.mark.ranks
def test_a_rank_that_raises_says_why(text_folder, tmp_path):
    """Its own error stands on stderr, by rank; nobody waits for the time-out."""
    arguments = ["--checkpoint", text_folder, *GREEDY]
    seconds, done = faulty(tmp_path, arguments, more=["--checkpoint", "nowhere"])
    assert seconds < 40 and "error: rank 1: nowhere" in done.stderr, done.stderr
    user_error = "from decoding.errors import UserError; raise UserError('in the middle')"
    for fault, message in (
        (user_error, "error: rank 1: in the middle"),
        ("raise ValueError('a bug')", "ValueError: a bug"),
    ):
        seconds, done = faulty(tmp_path, arguments, fault)
        assert seconds < 40 and message in done.stderr, done.stderr


@pytest.mark.ranks
def test_unequal_folders_and_arguments_are_found(text_folder, tmp_path):
    """The same shapes with other weights would give garbage without a word."""
    other = shutil.copytree(text_folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] += 0.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    arguments = ["--checkpoint", text_folder, *GREEDY]
    for more, message in (
        (["--checkpoint", other], "error: rank 1 differs from rank 0 in its tensors"),
        (["--seed", "4"], "error: rank 1 differs from rank 0 in --seed"),
    ):
        seconds, done = faulty(tmp_path, arguments, more=more)
        assert seconds < 40 and message in done.stderr, done.stderr


@pytest.mark.ranks
def test_two_agents_generate_together(text_folder, alone_tokens, tmp_path):
    """--nnodes=2: two torchrun agents, as on two machines, one rank each; LOCAL_RANK is 0 on
    both."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = [
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=localhost:{port}",
    ]
    (tmp_path / "prompts.txt").write_text(STDIN)
    program = [
        "generate.py",
        "--checkpoint",
        text_folder,
        *GREEDY,
        "--json",
        "--prompt_file",
        tmp_path / "prompts.txt",
    ]
    command = [str(part) for part in [*TORCHRUN, *options, *program]]
    agents = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in "ab"
    ]
    printed = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert sorted(out == "" for out, _ in printed) == [False, True], "one of them holds rank 0"
    assert tokens_of("".join(out for out, _ in printed)) == alone_tokens
