"""drafts/mtp.py: heads of every family that has one, in folders that the tests write with the
published names.

A float64 twin, written from what each family's makers and other engines publish, must give the
distributions that tokens were drawn from, in rounds of any length with any number accepted;
transformers' own MtpModel must agree where it reads the family. The opposite order, another norm,
and a state one position off must not.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from conftest import changed_family, config_json
from reference import logits, norm
from safetensors.torch import load_file, save_file
from test_drafts import distance, load_draft_model, recorded
from test_gguf import write
from test_speculative import rows_of

from cli.flags import parse_args
from cli.main import main as run_args
from decoding.engine import Engine
from decoding.sampling import Sampling
from drafts.hybrid import HybridDraft
from drafts.mtp import MtpDraft
from drafts.registry import check_draft, load_drafter
from generate import LLM
from loading.checkpoint import load_config, load_model
from loading.options import DraftOptions, split_folder
from model import Transformer

D = 64  # of conftest's families


class Published(NamedTuple):
    """A head as its maker publishes it, for one of conftest's families, with three layers or, of
    K-EXAONE, five."""

    family: str
    like: int  # the target's layer that has the shapes of the head's
    layer: str  # prefix of its layer's tensors
    names: tuple[str, ...]  # norm of the embedding, norm of the state, projection, last norm
    keys: Mapping = MappingProxyType({})  # of config.json
    state_first: bool = False
    is_normed: bool = True  # are the states after a norm, the target's and the head's?


NEXTN = tuple(f"model.layers.3.{name}" for name in ("enorm", "hnorm", "eh_proj"))
MTP = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
ERNIE = ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", "model.norm")
FULL = {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["dense"]}
SLIDING = {"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [9]}
K_EXAONE = {"mtp_layer_types": ["full_attention"], "mtp_sliding_windows": [0]}
TABLE = {
    "glm4_moe": Published(
        "glm-4.5", 2, "model.layers.3.", (*NEXTN, NEXTN[0][:-5] + "shared_head.norm")
    ),
    "mimo": Published(
        "r1-distill-qwen",
        0,
        "model.mtp_layers.0.",
        tuple(f"model.mtp_layers.0.{name}" for name in MIMO),
        {"model_type": "mimo"},
        state_first=True,
        is_normed=False,
    ),
    "mellum": Published("mellum-2", 2, "mtp.layers.0.", MTP),
    "ernie4_5_moe": Published("ernie-4.5-moe", 0, "model.mtp_block.0.", ERNIE, is_normed=False),
    "exaone_moe": Published("k-exaone", 0, "mtp.layers.0.", MTP, K_EXAONE),
    "hy_v3": Published("hy3", 2, "model.layers.3.", (*NEXTN, "model.layers.3.final_layernorm")),
    "mellum, full": Published("mellum-2", 0, "mtp.layers.0.", MTP, FULL),
    "exaone_moe, sliding": Published("k-exaone", 0, "mtp.layers.0.", MTP, SLIDING),
}
OTHERS = [kind for kind in TABLE if kind not in ("glm4_moe", "mimo")]
KINDS = ["glm4_moe", "mimo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]


def head_tensors(published: Published, tensors: dict, seed: int = 5) -> dict[str, torch.Tensor]:
    """A random head for a target of these tensors."""
    like = f"model.layers.{published.like}."
    shapes = {
        published.layer + name.removeprefix(like): x.shape
        for name, x in tensors.items()
        if name.startswith(like)
    }
    embedding_norm, state_norm, projection, last_norm = published.names
    vectors = (embedding_norm, state_norm, last_norm)
    shapes |= {f"{name}.weight": (D,) for name in vectors}
    shapes[f"{projection}.weight"] = (D, 2 * D)
    generator = torch.Generator().manual_seed(seed)
    head = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and name.endswith(".weight")
        head[name] = 1 + 0.2 * noise if is_norm else 0.15 * noise
    return {name: x for name, x in head.items() if name not in tensors}  # ERNIE's last norm


MISSING = object()  # the value of a key that a config.json does not have


def head_folder(kind: str, source, folder, **keys):
    """The folder of a target and its head, with copies of the embedding and the head that are not
    to be read."""
    published = TABLE[kind]
    tensors = load_file(source / "model.safetensors")
    tensors |= head_tensors(published, tensors)
    if published.layer.startswith("model.layers."):
        rubbish = torch.full_like(tensors["lm_head.weight"], math.nan)
        for name in ("embed_tokens", "shared_head.head"):
            tensors[f"{published.layer}{name}.weight"] = rubbish.clone()
    folder.mkdir(parents=True)
    hf = config_json(source) | {"num_nextn_predict_layers": 1, **published.keys, **keys}
    hf = {key: value for key, value in hf.items() if value is not MISSING}
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class HeadTwin:
    """A head in float64, without a cache: everything anew for each drafted token. `late` is how
    many positions the target's states are off."""

    def __init__(self, published: Published, folder, late: int = 0):
        self.published = published
        self.hf = config_json(folder)
        self.w = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
        self.late = late
        types = self.hf.get("mtp_layer_types") or ["sliding_attention"]  # Mellum's default
        self.layer_hf = {**self.hf, "num_hidden_layers": 1, "layer_types": types}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return norm(x, self.w[f"{name}.weight"], self.hf["rms_norm_eps"])

    def states(self, tokens: list[int]) -> torch.Tensor:
        """(n - 1, D): what the target knew before each token but the first."""
        entering = []
        logits(self.hf, self.w, tokens, entering)
        x = entering[-1]
        if self.published.is_normed:
            x = self.norm(x, "model.norm")
        return x[:-1].roll(self.late, 0)

    def run(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        """The stream (n, D) that leaves the head's layer."""
        embedding_norm, state_norm, projection, _ = self.published.names
        embedded = self.norm(self.w["model.embed_tokens.weight"][tokens], embedding_norm)
        parts = [embedded, self.norm(states, state_norm)]
        if self.published.state_first:
            parts = parts[::-1]
        x = torch.cat(parts, -1) @ self.w[f"{projection}.weight"].T
        layer = {
            "model.layers.0." + name.removeprefix(self.published.layer): weight
            for name, weight in self.w.items()
            if name.startswith(self.published.layer)
        }
        ends = {name: self.w[name] for name in ("model.norm.weight", "lm_head.weight")}
        entering = []
        rows = list(range(len(tokens)))
        logits(self.layer_hf, {**ends, **layer, "model.embed_tokens.weight": x}, rows, entering)
        return entering[-1]

    def __call__(self, folder, tokens, drafted, sampling) -> torch.Tensor:
        """(K, V)"""
        states = self.states(tokens)
        pairs = tokens[1:]
        probs = []
        for id in drafted:
            out = self.run(pairs, states)[-1:]
            normed = self.norm(out, self.published.names[3])
            probs.append(sampling.probs((normed @ self.w["lm_head.weight"].T)[0]))
            pairs = [*pairs, id]
            states = torch.cat((states, normed if self.published.is_normed else out))
        return torch.stack(probs)


def drafter_of(folder, target, draft_class=MtpDraft) -> MtpDraft:
    return recorded(draft_class)(load_draft_model(f"mtp:{folder}", target))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_its_twin(kind, folder_of, tmp_path):
    """Also after more plain steps than a window has positions."""
    folder = head_folder(kind, folder_of(TABLE[kind].family), tmp_path / "m")
    target = load_model(folder, dtype=torch.float32)
    plain = 16 if "mellum" in kind else 0
    worst, accepted = distance(
        target, drafter_of(folder, target), HeadTwin(TABLE[kind], folder), folder, plain
    )
    assert worst < 1e-4 and len(accepted) > 1


BREAKS = {
    "state before its time": lambda model: None,
    "order": lambda model: setattr(model, "mtp", model.mtp._replace(state_first=True)),
    "target's norm": lambda model: setattr(model, "mtp", model.mtp._replace(reads_normed=False)),
    "own norm": lambda model: setattr(model, "recycles_normed", False),
    "position 0": lambda model: setattr(
        model, "visible_by_window", lambda *args: Transformer.visible_by_window(model, *args)
    ),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_head_is_caught(broken, folder_of, tmp_path):
    kind = "mellum" if broken == "position 0" else "glm4_moe"
    folder = head_folder(kind, folder_of(TABLE[kind].family), tmp_path / "m")
    target = load_model(folder, dtype=torch.float32)
    drafter = drafter_of(folder, target)
    BREAKS[broken](drafter.model)
    late = int(broken == "state before its time")
    assert distance(target, drafter, HeadTwin(TABLE[kind], folder, late), folder)[0] > 1e-3


@pytest.mark.parametrize("kind", ["glm4_moe", "mellum"])
def test_transformers_head_gives_the_same_logits(kind, folder_of, tmp_path):
    """Of a first draft after every position of a text that is longer than a window."""
    transformers = pytest.importorskip("transformers")
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel as TheirModel

    folder = head_folder(kind, folder_of(TABLE[kind].family), tmp_path / "m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    theirs._keys_to_ignore_on_load_unexpected = [r"^mtp\.", r"layers\.3\."]
    head = TheirModel.from_pretrained(theirs)
    tokens = torch.arange(7, 47)[None] * 5 % 131
    with torch.no_grad():
        states = theirs(tokens, output_hidden_states=True).hidden_states[-1]
        cache = MtpCache(config=theirs.config.get_mtp_config())
        pos = torch.arange(1, 40)[None]
        h = head.forward_layer(0, states[:, :-1], pos, cache, input_ids=tokens[:, 1:])
        want = theirs.lm_head(h)[0]  # (39, V)

    target = load_model(folder, dtype=torch.float32)
    drafter = drafter_of(folder, target)
    engine = Engine(target, 1, 60, drafter=drafter, speculate_k=2)
    with torch.inference_mode():
        engine.runner.prefill(tokens, 0, 40)
        got = drafter.model.head(drafter.runner.prefill(tokens, 0, 40))[0, 1:]
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_greedy_text_is_plain(kind, k, folder_of, tmp_path):
    """In a batch, with the head in int8."""
    folder = head_folder(kind, folder_of(TABLE[kind].family), tmp_path / "m")
    target = load_model(folder, dtype=torch.float32, pack=False)
    drafter = load_drafter(f"mtp:{folder}", target, None, quantize="int8")
    prompts = [[5, 9, 17, 5, 9], [40, 3, 59, 12], [8]]
    want = rows_of(target, prompts)
    assert rows_of(target, prompts, drafter=drafter, speculate_k=k) == want


def test_a_head_of_another_folder(folder_of, tmp_path):
    """The target has none, or the folder has nothing else."""
    source = folder_of("glm-4.5")
    folder = head_folder("glm4_moe", source, tmp_path / "both")
    target = load_model(source, dtype=torch.float32)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "config.json", alone)
    tensors = load_file(folder / "model.safetensors")
    head = {name: x for name, x in tensors.items() if name.startswith("model.layers.3.")}
    save_file(head, alone / "model.safetensors")
    one, other = (load_draft_model(f"mtp:{path}", target) for path in (folder, alone))
    half = load_draft_model(f"mtp:{alone}", load_model(source, dtype=torch.bfloat16))
    router = half.layers[0].ffn.router.weight
    assert (half.eh_proj.weight.dtype, router.dtype) == (torch.bfloat16, torch.float32)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(
        ValueError, match=r"the MTP head is missing: .*layers\.3\.eh_proj.* mtp:DIR"
    ):
        check_draft(f"mtp:{source}", target.config)


@pytest.mark.parametrize("own_norm", [True, False])
def test_a_gguf_file_has_the_same_head(own_norm, folder_of, tmp_path):
    """llama.cpp's nextn tensors. Without shared_head_norm the target's norm takes its place."""
    folder = head_folder("glm4_moe", folder_of("glm-4.5"), tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    tensors = {
        name.removeprefix("model.layers.3."): x
        for name, x in stored.items()
        if name.startswith("model.layers.3.")
    }
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "mlp.gate": "ffn_gate_inp",
        **{f"mlp.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
        **{name: f"nextn.{name}" for name in ("enorm", "hnorm", "eh_proj", "embed_tokens")},
        "shared_head.norm": "nextn.shared_head_norm",
        "shared_head.head": "nextn.shared_head_head",
    }
    if not own_norm:
        del tensors["shared_head.norm.weight"]

    def keys(writer):
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)
        for name, x in tensors.items():
            module, _, part = name.rpartition(".")
            if module in names:
                writer.add_tensor(f"blk.3.{names[module]}.{part}", x.numpy())
        for part in ("gate", "up", "down"):
            stack = [tensors[f"mlp.experts.{i}.{part}_proj.weight"] for i in range(6)]
            writer.add_tensor(f"blk.3.ffn_{part}_exps.weight", torch.stack(stack).numpy())
        bias = tensors["mlp.gate.e_score_correction_bias"].numpy()
        writer.add_tensor("blk.3.exp_probs_b.bias", bias)

    file = write(tmp_path / "m.gguf", "glm-4.5", keys=keys)
    target = load_model(file, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"mtp:{file}: {file}: config.json: hidden_size = 64 is"):
        check_draft(f"mtp:{file}", dataclasses.replace(target.config, dim=32))
    got = load_draft_model(f"mtp:{file}", target)
    want = dict(load_draft_model(f"mtp:{folder}", target).named_parameters())
    assert ("norm.weight" in dict(got.named_parameters())) == own_norm
    for name, parameter in got.named_parameters():
        assert torch.equal(parameter, want[name]), name
    Engine(target, 1, 60, drafter=MtpDraft(got), speculate_k=2)
    assert (got.norm is target.norm) != own_norm


@pytest.mark.parametrize(
    "kind, keys, named",
    [
        (
            "glm4_moe",
            {"num_nextn_predict_layers": 3},
            "num_nextn_predict_layers = 3 declares several",
        ),
        (
            "mellum",
            {"mtp_layer_types": ["linear"]},
            "mtp_layer_types = .* must be full_attention or",
        ),
        (
            "mellum",
            {"mtp_mlp_layer_types": ["sparse"] * 2},
            "mtp_mlp_layer_types = .* each of 1 MTP",
        ),
        ("glm4_moe", {"hidden_size": 32}, "hidden_size = 32 is of another target: this one has 64"),
        ("glm4_moe", {"model_type": "hy_v3"}, "model_type = 'hy_v3' is of another target"),
        ("glm4_moe", {"model_type": MISSING}, "model_type = None is of another target"),
        ("mellum", {"mtp_sliding_windows": ["4096"]}, "mtp_sliding_windows = '4096' must be a pos"),
        ("mellum", {"mtp_sliding_windows": [2.5]}, "mtp_sliding_windows = 2.5 must be a whole"),
    ],
)
def test_what_a_head_cannot_mean_is_refused(kind, keys, named, folder_of, tmp_path):
    source = folder_of(TABLE[kind].family)
    folder = head_folder(kind, source, tmp_path / "m", **keys)
    with pytest.raises(ValueError, match=named) as error:
        check_draft(f"mtp:{folder}", load_config(source))
    assert str(folder / "config.json") in str(error.value)


def test_families_that_declare_heads_or_have_none_are_refused(folder_of, tmp_path):
    """MiniMax-M2's config.json declares three heads, and its folder has none."""
    source = folder_of("minimax-m2")
    folder = tmp_path / "m"
    shutil.copytree(source, folder)
    hf = config_json(source) | {"use_mtp": True, "num_mtp_modules": 3}
    (folder / "config.json").write_text(json.dumps(hf))
    config = load_config(source)
    with pytest.raises(ValueError, match="num_mtp_modules = 3 declares several MTP heads"):
        check_draft(f"mtp:{folder}", config)
    with pytest.raises(ValueError, match=r"MTP head is missing: .* model\.layers\.3\.eh_proj"):
        check_draft(f"mtp:{source}", config)


def test_tensors_that_do_not_fit_are_named(folder_of, tmp_path):
    folder = head_folder("glm4_moe", folder_of("glm-4.5"), tmp_path / "m")
    target = load_model(folder, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    for name, x, message in (
        ("model.layers.3.hnorm.weight", None, "missing: model.layers.3.hnorm.weight"),
        ("model.layers.3.other.weight", torch.ones(3), "unexpected: model.layers.3.other.weight"),
        ("model.layers.3.eh_proj.weight", torch.ones(2 * D, D), r"eh_proj.weight is \[128, 64\]"),
    ):
        changed = {key: value for key, value in {**tensors, name: x}.items() if value is not None}
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_drafter(f"mtp:{folder}", target, None)


def test_specs_name_a_head_and_its_folder():
    assert split_folder("mtp:some/dir") == ("mtp:some/dir", None)
    assert split_folder("suffix:8,mtp") == ("suffix:8,mtp", None)
    assert split_folder("suffix,mtpdir") == ("suffix", "mtpdir")
    assert DraftOptions(spec="mtp").source_for("target") == "mtp:target"
    assert DraftOptions(spec="suffix:8,mtp").source_for("target") == "suffix:8,mtp:target"
    assert DraftOptions(spec="mtp:other").source_for("target") == "mtp:other"
    assert DraftOptions(spec="mtp", quantize="int8").quantize == "int8"
    with pytest.raises(
        ValueError, match="--draft_quantize needs --draft_checkpoint or --draft mtp"
    ):
        DraftOptions(spec="ngram", quantize="int8")
    with pytest.raises(ValueError, match="the folder with the head is missing: mtp:DIR"):
        check_draft("mtp", None)


@pytest.fixture(scope="module")
def story_folder(folder_of, text_folder, tmp_path_factory):
    """A tiny MiMo with a tokenizer."""
    with changed_family("r1-distill-qwen", vocab_size=384) as family:
        folder = head_folder("mimo", folder_of(family), tmp_path_factory.mktemp("mimo") / "m")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(text_folder / name, folder)
    return folder


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "flags",
    [
        "--draft mtp",
        "--draft mtp --draft_quantize int8 --speculate_k auto",
        "--draft mtp:{} --speculate_k 1 --batch_size 2",
        "--draft suffix:8,mtp",
    ],
)
def test_the_command_line_takes_a_head(flags, story_folder, capsys):
    common = f"--checkpoint {story_folder} --temperature 0 --dtype float32 --max_new_tokens 30"
    common = [*common.split(), "--ignore_eos", "--json", "--device", "cpu", "--prompt", "the cat"]
    rows = []
    for draft in ("", flags.format(story_folder)):
        run_args(parse_args(common + draft.split()))
        rows.append(json.loads(capsys.readouterr().out.splitlines()[0]))
    assert rows[0]["tokens"] == rows[1]["tokens"]
    assert rows[1]["speculative"]["drafted"] > 0


def test_a_prompt_cache_belongs_to_its_head(story_folder, tmp_path, capsys):
    """It has the head's keys and values, which a run without the head has no place for."""
    common = f"--checkpoint {story_folder} --device cpu --prompt_cache {tmp_path / 'cache'}"
    common = [*common.split(), "--max_new_tokens", "5", "--prompt", "the little cat"]
    run_args(parse_args([*common, "--draft", "mtp"]))
    run_args(parse_args([*common, "--draft", "mtp"]))
    assert "tokens read" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--draft mtp: another one there than here"):
        run_args(parse_args(common))


def test_a_head_is_not_divided_over_ranks(story_folder):
    args = ["--checkpoint", str(story_folder), "--draft", "mtp", "--draft_tp", "--device", "cpu"]
    with pytest.raises(ValueError, match=r"--draft_tp sharded: .* holds such a draft in full"):
        run_args(parse_args(args))


def test_a_program_takes_a_head(story_folder):
    llm = LLM(story_folder, draft="suffix,mtp", dtype="float32", device="cpu", max_seq_length=80)
    drafter = llm.engine.drafter
    assert isinstance(drafter, HybridDraft) and isinstance(drafter.second, MtpDraft)


def test_sampled_rows_equal_their_prompts_alone(folder_of, tmp_path):
    folder = head_folder("glm4_moe", folder_of("glm-4.5"), tmp_path / "m")
    target = load_model(folder, dtype=torch.float32)
    prompts = [[5, 9, 17, 5, 9], [40, 3, 59, 12], [8]]
    drafter = drafter_of(folder, target)
    options = {"sampling": Sampling(0.9), "seed": 3, "speculate_k": 3, "drafter": drafter}
    alone = [rows_of(target, [prompt], **options)[0] for prompt in prompts]
    assert rows_of(target, prompts, **options) == alone
