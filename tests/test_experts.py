"""Experts beyond the families' own logits (test_model.py): what is stored, chosen, read, packed,
cut and counted."""

import copy
import json
import shutil

import pytest
import torch
from conftest import config_json, generate, oracle
from reference import logits as reference_logits
from safetensors.torch import load_file, save_file
from test_quantize import SCHEMES

import cli.quantize as quantize_command
import tp
from cli.report import weight_bytes
from decoding.engine import Engine
from decoding.sampling import Sampling
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from loading import families
from loading.checkpoint import load_config, load_model
from loading.config import config_from_hf
from loading.saving import save_model
from model import Config, Experts, FeedForward, SparseMoE, attend
from weights import experts as packed
from weights.formats import FORMATS, Int8
from weights.linears import QuantizedLinear
from weights.walker import (
    named_linears,
    pack_model,
    quantize_model,
    quantized_copy,
    quantized_linears,
)

SPARSE = [
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "gpt-oss",
    "granite-moe",
    "granite-moe-swa",
    "glm-4.5",
    "minimax-m2",
    "hy3",
    "ernie-4.5-moe",
]
TOKENS = torch.randint(3, 131, (1, 24), generator=torch.Generator().manual_seed(2))
LIMIT = 1e-4


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(TOKENS, torch.arange(TOKENS.size(1)))[0]


def plain_config(**changes) -> Config:
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 64}
    rest = {
        "vocab_size": 50,
        "max_seq_length": 64,
        "norm_eps": 1e-5,
        "sparse": (True,),
        "n_experts": 6,
    }
    return Config(**{**sizes, **rest, "experts_per_token": 2, "expert_dim": 32, **changes})


def random_experts(seed: int = 0, **changes) -> SparseMoE:
    layer = SparseMoE(plain_config(**changes)).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return layer


# ---------------------------------------------------------------------------------------- routing


def test_of_equal_logits_the_first_expert_is_taken():
    """And the weights are those of the chosen ones' softmax, or of all experts'."""
    tied = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0], [0.0] * 6])
    for renormalise in (True, False):
        mixture = Experts(plain_config(router_norm=renormalise))
        chosen, weight = mixture.route(tied)
        assert chosen.tolist() == [[1, 2], [0, 1]]
        assert weight[0, 0] == weight[0, 1]
        shares = tied.double().softmax(1).gather(1, chosen)
        shares = shares / shares.sum(1, keepdim=True) if renormalise else shares
        assert torch.allclose(weight.double(), shares, atol=1e-6)


@pytest.mark.parametrize("sigmoid", [True, False], ids=["sigmoid", "softmax"])
def test_a_selection_bias_counts_for_the_choice_alone(sigmoid):
    """Experts are ranked by score + bias; the weights are the scores, normed and scaled. Without
    the bias others are chosen."""
    fields = {"router_sigmoid": sigmoid, "selection_bias": True, "routed_scale": 2.5}
    mixture = Experts(plain_config(**fields)).requires_grad_(False)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, -2.0]])
    mixture.selection_bias.copy_(torch.tensor([-9.0, 0, 0, 9.0, 0, 0]))
    chosen, weight = mixture.route(logits)
    scores = 1 / (1 + (-logits.double()).exp()) if sigmoid else logits.double().softmax(1)
    shares = scores[:, [3, 1]] / scores[:, [3, 1]].sum() * 2.5
    assert chosen.tolist() == [[3, 1]] and torch.allclose(weight.double(), shares, atol=1e-6)
    mixture.selection_bias.zero_()
    assert mixture.route(logits)[0].tolist() == [[0, 1]]


@pytest.mark.parametrize("pack", [False, True])
def test_routers_with_a_selection_bias_stay_in_float32(pack, folder_of):
    """In a 16-bit model too, as transformers keeps the bias and computes the product."""
    folder = folder_of("glm-4.5")
    model = load_model(folder, dtype=torch.bfloat16, pack=False)
    stored = load_file(folder / "model.safetensors")
    layer, name = model.layers[1].ffn, "model.layers.1.mlp.gate."
    assert torch.equal(layer.experts.selection_bias, stored[f"{name}e_score_correction_bias"])
    assert layer.experts[0].down.weight.dtype == torch.bfloat16
    if pack:
        pack_model(model)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = []
    layer.experts.register_forward_hook(lambda own, args, y: logits.append(args[1]))
    assert layer(x).dtype == torch.bfloat16
    want = x.double() @ stored[f"{name}weight"].double().T
    assert (logits[0].double() - want).abs().max() < 1e-5  # bfloat16 is off by 1e-2


def test_a_family_says_that_its_routers_stay_in_float32(folder_of, monkeypatch):
    """Weights and biases, whether or not there is a selection bias; other families' do not."""
    folder = folder_of("gpt-oss")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.router"
    record = families.FAMILIES["gpt_oss"]
    for is_float32 in (True, False):
        fields = record.fields | {"router_float32": is_float32}
        monkeypatch.setitem(families.FAMILIES, "gpt_oss", record._replace(fields=fields))
        layer = load_model(folder, dtype=torch.bfloat16, pack=False).layers[0].ffn
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        logits = layer.router(x.to(layer.router.weight.dtype))
        want = x.double() @ stored[f"{name}.weight"].double().T + stored[f"{name}.bias"].double()
        assert bool((logits.double() - want).abs().max() < 1e-5) == is_float32
        assert layer(x).dtype == torch.bfloat16


def test_routing_is_decided_in_float32():
    """Logits that bfloat16 cannot tell apart after a softmax: the second is larger by one last
    bit."""
    logits = torch.tensor([[20.0, 20.125, 0.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    chosen, weight = Experts(plain_config()).route(logits)
    assert chosen.tolist() == [[1, 0]] and weight.dtype == torch.float32
    assert weight[0, 0] == pytest.approx(1 / (1 + 2.718281828 ** (-0.125)), abs=1e-6)


def by_hand(expert: FeedForward, x: torch.Tensor, clamped: bool) -> torch.Tensor:
    """One expert on x (D,)."""
    both = expert.gate_up.weight @ x + (expert.gate_up.bias if clamped else 0)
    gate, up = both[: len(both) // 2], both[len(both) // 2 :]
    if clamped:
        gate, up = gate.clamp(max=0.5), up.clamp(min=-0.5, max=0.5) + 1
    y = gate / (1 + (-gate * (1.7 if clamped else 1)).exp()) * up
    return expert.down.weight @ y + (expert.down.bias if clamped else 0)


@pytest.mark.parametrize("clamped", [False, True], ids=["silu", "clamped"])
@pytest.mark.parametrize("rows", [1, 7])
def test_only_chosen_experts_run(rows, clamped, monkeypatch):
    """Each once, on the rows that chose it; the sum is that of the definition."""
    limits = (
        {"gate_limit": 0.5, "gate_alpha": 1.7, "expert_bias": True, "router_bias": True}
        if clamped
        else {}
    )
    layer = random_experts(n_experts=20, **limits)
    x, ran, forward = (
        torch.randn(rows, 32, generator=torch.Generator().manual_seed(1)),
        [],
        FeedForward.forward,
    )
    monkeypatch.setattr(
        FeedForward, "forward", lambda own, x: ran.append((own, len(x))) or forward(own, x)
    )
    y = layer(x[None])[0]
    chosen, weight = layer.experts.route(layer.router(x))
    taken = {layer.experts[i]: int((chosen == i).sum()) for i in chosen.unique().tolist()}
    assert 2 <= len(taken) < 20 and dict(ran) == taken and len(ran) == len(taken)
    for row in range(rows):
        want = sum(
            by_hand(layer.experts[i], x[row], clamped) * w
            for i, w in zip(chosen[row].tolist(), weight[row])
        )
        assert torch.allclose(y[row], want, atol=1e-5)


# --------------------------------------------------------------------------- gpt-oss as published


def publish(folder, target) -> dict[str, torch.Tensor]:
    """A transformers folder of gpt-oss with its experts in MXFP4, as the published ones: random
    blocks, and scales around 1. Returns the experts as transformers dequantizes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shutil.copytree(folder, target)
    tensors, dequantized = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(9)
    for name in [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        E, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(
            0, 256, (E, rows, columns // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(
            119, 126, (E, rows, columns // 32), generator=generator, dtype=torch.uint8
        )
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dequantized[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        target / "model.safetensors",
    )
    hf = config_json(folder) | {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}
    }
    (target / "config.json").write_text(json.dumps(hf))
    return dequantized


@pytest.fixture(scope="module")
def published(folder_of, tmp_path_factory):
    """(folder, its experts as transformers reads them)"""
    target = tmp_path_factory.mktemp("published") / "gpt-oss"
    return target, publish(folder_of("gpt-oss"), target)


def test_published_mxfp4_is_read_bit_for_bit(published, tmp_path):
    """Codes and scales stay as they are stored, and mean what transformers reads in them."""
    folder, want = published
    model = load_model(folder, dtype=torch.float32, pack=False)
    assert {linear.scheme for linear in quantized_linears(model)} == {"mxfp4"}
    stored = load_file(folder / "model.safetensors")
    for number, layer in enumerate(model.layers):
        name = f"model.layers.{number}.mlp.experts."
        for i, expert in enumerate(layer.ffn.experts):
            both = (
                expert.gate_up.dequantized(torch.float32)
                .view(2, -1, 64)
                .transpose(0, 1)
                .flatten(0, 1)
            )
            assert torch.equal(both.T, want[f"{name}gate_up_proj"][i])
            assert torch.equal(
                expert.down.dequantized(torch.float32).T, want[f"{name}down_proj"][i]
            )
            assert torch.equal(expert.down.codes, stored[f"{name}down_proj_blocks"][i].flatten(1))
            assert torch.equal(expert.down.scale, stored[f"{name}down_proj_scales"][i])
        assert not isinstance(layer.attention.qkv, QuantizedLinear)
    hf = {key: value for key, value in config_json(folder).items() if key != "quantization_config"}
    tensors = {
        name: x for name, x in stored.items() if not name.endswith(("_blocks", "_scales"))
    } | want
    assert (
        logits(model).double() - reference_logits(hf, tensors, TOKENS[0].tolist())
    ).abs().max() <= LIMIT
    # ours, which say what is quantized and what is not
    save_model(model, tmp_path / "own", config_json(folder))
    again = load_model(tmp_path / "own", dtype=torch.float32, pack=False)
    assert torch.equal(logits(again), logits(model)) and len(quantized_linears(again)) == len(
        quantized_linears(model)
    )


def test_published_mxfp4_can_be_quantized_again_and_cut(published):
    folder, _ = published
    model = load_model(folder, dtype=torch.float32, quantize="int8", pack=False)
    assert {linear.scheme for linear in quantized_linears(model)} == {"int8"}
    # D = 64 and I = 64 are two groups of 32: a rank has one of down's.
    config = load_config(folder)
    tp.check_divisible(config, 2, 32)
    with pytest.raises(ValueError, match=r"ffn.experts.down: 64 inputs over 4 ranks are 16 each"):
        tp.check_divisible(config, 4, 32)


def test_full_precision_survives_both_ways(folder_of, tmp_path):
    for family in SPARSE:
        folder = folder_of(family)
        save_model(load_model(folder, dtype=torch.float32), tmp_path / family, config_json(folder))
        want, got = (load_file(path / "model.safetensors") for path in (folder, tmp_path / family))
        assert want.keys() == got.keys() and all(
            torch.equal(want[name], got[name]) for name in want
        )


# -------------------------------------------------------------------------------------- quantized


@pytest.mark.one_in(6, 2)
@pytest.mark.parametrize(
    "scheme", ["int8", *(pytest.param(x, marks=pytest.mark.attack) for x in ("int4-g32", "mxfp4"))]
)
@pytest.mark.parametrize("family", SPARSE)
def test_every_matrix_but_routers_is_quantized(family, scheme, folder_of, tmp_path):
    """Expert by expert, as if each had been a matrix alone; saved and loaded again it is the
    same."""
    folder = folder_of(family)
    model, plain = (
        load_model(folder, dtype=torch.float32, quantize=how, pack=False) for how in (scheme, None)
    )
    for (name, linear), (_, whole) in zip(named_linears(model), named_linears(plain), strict=True):
        if name != "lm_head":
            assert linear.scheme == scheme, name
            own = QuantizedLinear.from_float(whole, scheme)
            assert all(
                torch.equal(own.parts()[part], linear.parts()[part]) for part in own.parts()
            ), name
    routers = [module for name, module in model.named_modules() if name.endswith(".router")]
    assert routers and all(isinstance(router, torch.nn.Linear) for router in routers)
    save_model(model, tmp_path / "q", config_json(folder))
    assert torch.equal(
        logits(load_model(tmp_path / "q", dtype=torch.float32, pack=False)), logits(model)
    )
    assert torch.allclose(
        logits(pack_model(model)), logits(quantized_copy(plain, scheme)), atol=1e-3
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_transformers_refuses_quantized_experts_and_quantize_says_so(
    family, folder_of, tmp_path, capsys
):
    """It fuses a layer's experts, of which no compressed-tensors format speaks, and would miss
    their weights."""
    from transformers import AutoModelForCausalLM

    for scheme in ("int8", "fp8"):
        quantize_command.main(
            [
                "--checkpoint",
                str(folder_of(family)),
                "--scheme",
                scheme,
                "--output",
                str(tmp_path / scheme),
            ]
        )
        assert " MB; other programs refuse it" in capsys.readouterr().err
        with pytest.raises(ValueError, match="quant_method"):
            AutoModelForCausalLM.from_pretrained(tmp_path / scheme)


def test_gptq_of_experts(folder_of, story_tokenizer, tmp_path):
    """Experts that the calibration text never chose are rounded, not emptied."""
    folder = shutil.copytree(folder_of("mixtral"), tmp_path / "m")
    hf = config_json(folder)
    tensors = load_file(folder / "model.safetensors")
    vocabulary = torch.randn(384, 64, generator=torch.Generator().manual_seed(0)) * 0.15
    tensors |= {"model.embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary}
    router = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    router[4] = 0
    tensors["model.layers.0.block_sparse_moe.gate.weight"] = torch.cat(
        (router[:4].abs() * 5, router[4:])
    )
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(hf | {"vocab_size": 384}))
    shutil.copy(story_tokenizer, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    text = tmp_path / "text.txt"
    text.write_text("the little cat and a big dog went to play in the park. " * 3)
    flags = ["--checkpoint", str(folder), "--scheme", "int4-g32", "--output", str(tmp_path / "q")]
    quantize_command.main(
        [*flags, "--method", "gptq", "--calibration", str(text), "--samples", "1", "--context", "4"]
    )
    got, want = (
        load_model(path, dtype=torch.float32, pack=False) for path in (tmp_path / "q", folder)
    )
    for (name, linear), (_, whole) in zip(named_linears(got), named_linears(want), strict=True):
        if name != "lm_head":
            error = (linear.dequantized(torch.float32) - whole.weight).norm() / whole.weight.norm()
            assert error < 0.2, (name, error)


# ----------------------------------------------------------------------------------- a GPU's form


def stacked(layer: SparseMoE) -> packed.StackedExperts:
    return packed.StackedExperts(copy.deepcopy(layer.experts))


@pytest.mark.parametrize("has_grouped_product", [False, True], ids=["any expert", "grouped"])
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_stacks_are_their_experts(scheme, has_grouped_product, monkeypatch):
    """Grouped by expert, as prompts are: in float32 within rounding of the sum expert by expert."""
    monkeypatch.setattr(packed, "has_grouped_product", lambda x: has_grouped_product)
    is_ragged = scheme is None or FORMATS[scheme].ragged
    width = 32 if is_ragged else max(32, FORMATS[scheme].group)
    limits = {"gate_limit": 7.0, "gate_alpha": 1.702, "dim": width, "expert_dim": width}
    layer = random_experts(expert_bias=True, router_bias=True, **limits)
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(4))
    if scheme:
        quantize_model(layer, scheme)
    scores = layer.router(x)
    want, mixture = layer.experts(x, scores), stacked(layer)
    assert torch.allclose(mixture(x, scores), want, atol=1e-4)
    held = sum(part.nbytes for part in mixture.parameters())
    assert held == sum(part.nbytes for part in layer.experts.parameters()), (
        "a second copy of the weights"
    )


class Mirrored(Int8):
    """A fork's format, whose parts mean something else."""

    def dequantize(self, parts):
        return -super().dequantize(parts)


@pytest.mark.parametrize("scheme", [*SCHEMES, "mirrored"])
@pytest.mark.parametrize("width", [128, 192])
def test_chosen_experts_multiply_in_every_format(scheme, width, monkeypatch):
    monkeypatch.setitem(FORMATS, "mirrored", Mirrored(8))
    while width % (FORMATS[scheme].group or 1) and not FORMATS[scheme].ragged:
        width *= 2
    linears = [torch.nn.Linear(width, 24, bias=False) for _ in range(5)]
    linears = [
        QuantizedLinear.from_float(linear.requires_grad_(False), scheme) for linear in linears
    ]
    weight = torch.stack([linear.dequantized(torch.float32) for linear in linears])
    x, expert = torch.randn(3, width), torch.tensor([4, 0, 4])
    want = torch.einsum("noi,ni->no", weight[expert].double(), x.double())
    y = packed.Stack(linears).multiply_gathered(x, expert)
    assert torch.allclose(y.double(), want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("number", [0, 2])
def test_experts_of_several_formats_are_not_stacked(number):
    layer, plain = random_experts(), random_experts()
    quantize_model(layer, "int8")
    layer.experts[number].down = plain.experts[number].down
    with pytest.raises(ValueError, match="several formats"):
        stacked(layer)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "scheme",
    [None, "int8", "int4-g32", "mxfp4", "q8_0", pytest.param("nvfp4", marks=pytest.mark.attack)],
)
def test_few_rows_gather_what_they_chose(scheme):
    """Compiled as for a GPU, the routing read on the device: one graph for all of it, and the same
    numbers."""
    layer = random_experts(expert_bias=True)
    if scheme:
        quantize_model(layer, scheme)
    mixture = stacked(layer)
    torch._dynamo.reset()
    run = torch.compile(mixture, fullgraph=True, dynamic=False)
    with torch.compiler.set_stance("default"):
        run(torch.ones(3, 32), layer.router(torch.ones(3, 32)))
    for seed in range(4):
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed))
        with torch.compiler.set_stance("fail_on_recompile"):
            y = run(x, layer.router(x))
        assert torch.allclose(y, layer.experts(x, layer.router(x)), atol=1e-4)


def test_packing_twice_and_hooks(folder_of):
    """What is packed stays packed once, and what hung behind its Experts hangs behind what took its
    place."""
    model, seen = load_model(folder_of("mixtral"), dtype=torch.float32), []
    model.layers[0].ffn.experts.register_forward_hook(lambda *_: seen.append(1))
    want = logits(model)
    pack_model(model)
    forms = [layer.ffn.experts for layer in model.layers]
    pack_model(model)
    assert forms == [layer.ffn.experts for layer in model.layers]
    assert all(isinstance(form, packed.HostExperts) for form in forms)
    assert torch.allclose(logits(model), want, atol=1e-5) and len(seen) == 2
    with pytest.raises(ValueError, match="packed"):
        quantized_copy(model, "int8")


# --------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize(
    "kind", ["ngram", "layers", pytest.param("quantized", marks=pytest.mark.attack)]
)
@pytest.mark.attack
def test_drafts_of_sparse_models_keep_the_text(family, kind, folder_of):
    """Greedily, bit for bit where the engine says so: a round over K + 1 rows routes and adds up as
    K + 1 steps do."""
    model = load_model(folder_of(family), dtype=torch.float32, pack=False)
    drafter = {
        "ngram": lambda: NgramDraft(1),
        "layers": lambda: ModelDraft(layer_subset(model, [0, 2]), on_layers=[0, 2]),
        "quantized": lambda: ModelDraft(quantized_copy(model, "int8"), on_layers=range(3)),
    }[kind]()
    pack_model(model, *([drafter.model] if drafter.model else []))
    options = {"sampling": Sampling(0), "max_new_tokens": 24}
    engine = Engine(model, 2, 64, drafter=drafter, speculate_k=3)
    assert engine.identical
    prompts = [[5, 9, 5, 9, 5], [7, 80, 3]]
    assert [
        *generate(model, prompts, engine=engine, **options)
    ] and engine.batch.accepted is not None
    text = [[], []]
    for row, id in generate(model, prompts, engine=engine, **options):
        text[row].append(id)
    plain = [[], []]
    for row, id in generate(model, prompts, engine=Engine(model, 2, 64), **options):
        plain[row].append(id)
    assert text == plain


def test_calibration_verifies_tokens_that_differ(folder_of):
    """Equal tokens would choose much the same experts, and verifying would look as cheap as a
    step."""
    model = pack_model(load_model(folder_of("qwen3-moe"), dtype=torch.float32))
    distinct, chosen, first = [], [], model.layers[0].ffn.experts
    model.embed.register_forward_hook(
        lambda _, args, y: distinct.append((args[0].numel(), len(args[0].unique())))
    )
    first.register_forward_hook(
        lambda own, args, y: chosen.append(len(own.module.route(args[1])[0].unique()))
    )
    Engine(model, 1, 64, drafter=NgramDraft(), speculate_k=5).calibrate(Sampling(0), 20)
    rounds = [
        (n, experts) for (rows, n), experts in zip(distinct, chosen, strict=True) if rows == 6
    ]
    distinct, experts = (sum(numbers) / len(rounds) for numbers in zip(*rounds))
    # equal tokens would choose three experts in every round
    assert distinct > 5 and experts > 3, rounds


@pytest.mark.parametrize(
    "family, scheme",
    [
        pytest.param("qwen3-moe-mixed", None, marks=pytest.mark.long),
        pytest.param("gpt-oss", "int8", marks=pytest.mark.compiled),
    ],
)
def test_compiled_steps_route_without_compiling_anew(family, scheme, folder_of):
    model = pack_model(
        load_model(folder_of(family), dtype=torch.float32, quantize=scheme, pack=False)
    )
    options = (
        {"drafter": NgramDraft(1), "speculate_k": 3}
        if scheme is None
        else {"compile_prompts": False}
    )
    engine = Engine(model, 2, 96, compile=True, **options)
    engine.warm_up(Sampling(0).path)
    prompts, found = [[5, 9, 5, 9, 5], [7, 80, 3]], []
    options = {"sampling": Sampling(0), "max_new_tokens": 40}
    for own in (engine, Engine(model, 2, 96)):
        with torch.compiler.set_stance("fail_on_recompile" if own is engine else "default"):
            found.append([*generate(model, prompts, engine=own, **options)])
    assert sorted(found[0], key=lambda pair: pair[0]) == sorted(found[1], key=lambda pair: pair[0])


# --------------------------------------------------------------------------------------- counting


def test_bytes_of_the_experts_that_are_read(folder_of):
    """qwen3-moe: 3 of 6 experts (D 64, I 32) in 3 layers; of six rows 1 - 2^-6 of them,
    expected."""
    model = load_model(folder_of("qwen3-moe"), dtype=torch.float32)
    expert, every = (
        4 * 3 * 64 * 32,
        sum(p.nbytes for p in model.parameters()) - model.embed.weight.nbytes,
    )
    for rows, share in ((1, 1 / 2), (2, 3 / 4), (6, 63 / 64)):
        want = every - 3 * 6 * expert * (1 - share)
        assert weight_bytes(model, rows) == pytest.approx(want, abs=1)
    before = [weight_bytes(model, rows) for rows in (1, 6)]
    assert [weight_bytes(pack_model(model), rows) for rows in (1, 6)] == before


def test_stacks_count_as_their_experts():
    class Model(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

    layer = random_experts()
    model, other = Model(layer), Model(copy.deepcopy(layer))
    other.layer.experts = stacked(layer)
    assert weight_bytes(model) == weight_bytes(other) and weight_bytes(model, 4) == weight_bytes(
        other, 4
    )


# -------------------------------------------------------------------------------------- attention


def test_sinks_take_their_part_and_bring_nothing(monkeypatch):
    """One score more in each head's softmax, by hand; the CPU's kernel, and what other devices
    compute."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, s, 8, generator=generator) for n, s in ((6, 3), (2, 5), (2, 5)))
    sinks = torch.randn(6, generator=generator)
    mask = torch.rand(2, 1, 3, 5, generator=generator) < 0.7
    mask[..., 0] = True
    scores = (q @ k.repeat_interleave(3, 1).mT / 8**0.5).masked_fill(~mask, -torch.inf)
    both = torch.cat((scores, sinks[None, :, None, None].expand(2, 6, 3, 1)), dim=-1)
    want = both.softmax(-1)[..., :-1] @ v.repeat_interleave(3, 1)
    # (B, 1, R*T, S)
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf).repeat(1, 1, 3, 1)
    assert torch.allclose(attend(q, k, v, bias, sinks), want, atol=1e-5)
    import model

    monkeypatch.setattr(model, "LOGSUMEXP_DEVICE", "nowhere")
    assert torch.allclose(attend(q, k, v, bias, sinks), want, atol=1e-5)


# ----------------------------------------------------------------------------------------- config

QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MIXTRAL = {key: QWEN[key] for key in [*QWEN][:11]} | {
    "model_type": "mixtral",
    "num_local_experts": 4,
}
GLM = {**QWEN, "model_type": "glm4_moe"}
OSS = {**MIXTRAL, "model_type": "gpt_oss", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}


def test_dense_layers_among_sparse_ones():
    assert config_from_hf({**QWEN, "mlp_only_layers": [2]}).sparse == (True, True, False, True)
    assert config_from_hf({**QWEN, "decoder_sparse_step": 2}).sparse == (False, True, False, True)
    both = {**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}
    assert (
        config_from_hf(both).sparse == (False, True, False, False)
        and config_from_hf(both).router_norm
    )
    assert not config_from_hf(QWEN).router_norm and config_from_hf(MIXTRAL).router_norm


def test_what_a_family_leaves_out_is_transformers_default():
    import transformers

    for family in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"):
        hf = transformers.AutoConfig.for_model(model_type=family)
        written = hf.to_dict()
        sizes = {
            key: written[key]
            for key in [*QWEN][1:9]
            if key not in ("num_key_value_heads", "head_dim")
        }
        rope = {"rope_parameters": written["rope_parameters"]} if family == "gpt_oss" else {}
        bare = config_from_hf({"model_type": family, **sizes, **rope})
        assert bare == config_from_hf({**written, "dtype": None}), family


def test_v4_and_v5_names_of_the_number_of_experts():
    v5 = {key: value for key, value in QWEN.items() if key != "num_experts"} | {
        "num_local_experts": 4
    }
    assert config_from_hf(v5) == config_from_hf(QWEN)


@pytest.mark.parametrize(
    "hf, names",
    [
        ({**QWEN, "num_local_experts": 8}, "num_experts = 4 and num_local_experts = 8 disagree"),
        (
            {**QWEN, "num_experts_per_tok": 5},
            "num_experts_per_tok = 5 is more than the number of experts, 4",
        ),
        ({**QWEN, "mlp_only_layers": "none"}, "mlp_only_layers = 'none'"),
        ({**QWEN, "decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({**QWEN, "shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64"),
        ({**QWEN, "routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        ({**QWEN, "scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ({**GLM, "scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({**GLM, "n_group": 2}, "n_group = 2"),
        ({**GLM, "topk_group": 2}, "topk_group = 2"),
        ({**GLM, "n_routed_experts": 5}, "num_experts = 4 and n_routed_experts = 5 disagree"),
        ({**GLM, "num_experts": None, "n_routed_experts": "4"}, "n_routed_experts = '4'"),
        ({**GLM, "first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ({**GLM, "kv_lora_rank": 512}, "kv_lora_rank = 512"),
        ({**GLM, "model_type": "hy_v3", "mlp_layer_types": ["moe"] * 4}, "mlp_layer_types"),
        ({**GLM, "model_type": "ernie4_5_moe", "use_bias": True}, "use_bias = True"),
        ({**GLM, "model_type": "ernie4_5_moe", "moe_layer_end_index": 2}, "moe_layer_end_index"),
        ({**GLM, "model_type": "hunyuan_v1_moe", "moe_topk": [2, 2, 2, 1]}, "moe_topk = [2, 2, 2"),
        ({**QWEN, "swiglu_limit": 7.0}, "swiglu_limit = 7.0"),
        ({**MIXTRAL, "num_experts": 8}, "num_experts = 8"),
        ({**MIXTRAL, "mlp_only_layers": [1]}, "mlp_only_layers = [1]"),
        ({**MIXTRAL, "norm_topk_prob": False}, "norm_topk_prob = False"),
        ({**MIXTRAL, "attention_bias": True}, "attention_bias = True"),
        ({**OSS, "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({**OSS, "layer_types": ["full_attention"] * 3}, "layer_types"),
        # for checkpoint.py to take out
        ({**OSS, "quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ],
    ids=str,
)
def test_refused_by_name(hf, names):
    with pytest.raises(ValueError, match=r"config\.json") as error:
        config_from_hf(hf)
    assert names in str(error.value)


def test_qwen2_moe_slides_in_every_other_of_its_early_layers():
    """As transformers decides where config.json has no layer_types."""
    import transformers

    sizes = {key: QWEN[key] for key in QWEN if key not in ("model_type", "rope_theta", "head_dim")}
    sizes |= {
        "num_hidden_layers": 6,
        "max_window_layers": 3,
        "sliding_window": 9,
        "use_sliding_window": True,
    }
    kinds = transformers.AutoConfig.for_model("qwen2_moe", **sizes).layer_types
    windows = config_from_hf({"model_type": "qwen2_moe", **sizes}).windows
    assert windows == tuple(9 if kind == "sliding_attention" else None for kind in kinds)
    assert windows == (9, None, 9, None, None, None)


def test_gpt_oss_slides_in_every_other_layer():
    assert config_from_hf({**OSS, "sliding_window": 9}).windows == (9, None, 9, None)
    kinds = ["full_attention", "sliding_attention"] * 2
    assert config_from_hf({**OSS, "sliding_window": 9, "layer_types": kinds}).windows == (
        None,
        9,
        None,
        9,
    )


# ------------------------------------------------------------------------------------------ ranks


class Listening(tp.Ranks):
    """Ranks without processes: what this one says is kept, and taken for what all say."""

    def sum(self, x):
        said.append(x)
        return x


said: list[torch.Tensor] = []


@pytest.mark.parametrize(
    "family, scheme", [("qwen2-moe", None), ("gpt-oss", None), ("gpt-oss", "int4-g32")]
)
def test_parts_of_experts_add_up(family, scheme, folder_of):
    """Two ranks hold half of every expert; what they sum once a layer, and once for a shared
    expert, is the whole: each bias once."""
    folder, world = folder_of(family), 2
    whole = load_model(folder, dtype=torch.float32, quantize=scheme, pack=False)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    layer = whole.layers[1].ffn
    want = [layer.experts(x, layer.router(x)[:, : layer.n_experts])] + (
        [layer.shared(x)] if layer.shared else []
    )
    said.clear()
    for rank in range(world):
        model = load_model(
            folder, dtype=torch.float32, quantize=scheme, tp=Quiet(rank, world), pack=False
        )
        expert = model.layers[1].ffn.experts[2]
        assert expert.down.in_features == layer.experts[2].down.in_features // world
        pack_model(model)
        said.clear() if rank == 0 else None
        model.layers[1].ffn(x[None])
    assert len(said) == world * len(want)
    for i, total in enumerate(want):
        parts = [said[rank * len(want) + i] for rank in range(world)]
        assert torch.allclose(sum(parts).view_as(total), total, atol=1e-4), i


class Quiet(Listening):
    def check_same(self, what):
        pass

    def largest(self, x):
        return x


@pytest.mark.parametrize("family", SPARSE)
def test_transformers_reads_what_is_saved(family, folder_of, tmp_path):
    from transformers import AutoModelForCausalLM

    save_model(
        load_model(folder_of(family), dtype=torch.float32),
        tmp_path / "m",
        config_json(folder_of(family)),
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(again(TOKENS).logits, oracle(family)(TOKENS).logits, atol=1e-5)
