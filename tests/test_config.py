"""Config.from_hf: both spellings of every family agree, and no key that changes the arithmetic is
passed over."""

import copy
import dataclasses
import json

import pytest
import torch
from conftest import BASE, FAMILIES, config_json

from decoding.errors import UserError
from loading.checkpoint import read_config
from loading.config import config_from_hf
from loading.families import FAMILIES as MODEL_TYPES
from loading.families import FIELDS, NEUTRAL, llama_like
from loading.models import empty_model
from model import rope_frequencies

LLAMA = {
    **BASE,
    "model_type": "llama",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MISTRAL = {**LLAMA, "model_type": "mistral"}
QWEN = {**LLAMA, "model_type": "qwen2"}


def v4_spelling(hf: dict) -> dict:
    """rope_theta and rope_scaling at the top (with the old `type`), torch_dtype for dtype."""
    hf = dict(hf)
    if "text_config" in hf:
        return {**hf, "text_config": v4_spelling(hf["text_config"])}
    rope = hf.pop("rope_parameters")
    rope = dict(rope.get("full_attention", rope))
    hf["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    hf["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    hf["torch_dtype"] = f"torch.{hf.pop('dtype')}"
    return hf


@pytest.mark.parametrize("family", FAMILIES)
def test_v4_and_v5_spelling_agree(family, folder_of):
    written_by_v5 = config_json(folder_of(family))
    text = written_by_v5.get("text_config", written_by_v5)
    assert "rope_parameters" in text and "dtype" in text
    v5, v4 = config_from_hf(written_by_v5), config_from_hf(v4_spelling(written_by_v5))
    if family in ("olmo3", "mellum-2"):  # v4 had one theta for both kinds of layers
        v5 = dataclasses.replace(v5, rope_local_theta=v5.rope_theta)
    assert v5 == v4
    rope = FAMILIES[family]["rope_parameters"]
    # whose alpha stretches theta: arXiv:2309.00071, NTK-aware interpolation
    if family.startswith("hunyuan"):
        assert v5.rope_theta == pytest.approx(rope["rope_theta"] * rope["alpha"] ** (32 / 30))
    else:
        assert v5.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert v5.dtype == "float32"


LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, **LONG}
MROPE = {"mrope_section": [2, 3, 3]}
FIRST_SPELLINGS = [  # (model_type, RoPE's object as first published)
    ("llama", {"type": "linear", "factor": 2.0}),
    ("qwen2", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}),
    ("phi3", {"type": "longrope", **LONG}),
    ("phi3", {"type": "yarn", **LONG}),
    ("hunyuan_v1_dense", {"type": "dynamic", "alpha": 50.0, "factor": 1.0}),
    ("qwen2_5_vl_text", {"type": "mrope", **MROPE}),
    ("qwen2_5_vl_text", {"rope_type": "mrope", **MROPE}),
    ("qwen3_vl_text", {"rope_type": "default", "mrope_interleaved": True, **MROPE}),
]


@pytest.mark.parametrize("model_type, rope", FIRST_SPELLINGS, ids=str)
def test_what_transformers_saves_again_means_the_same(model_type, rope):
    """It writes the newer name of a rope type beside the older, which it keeps."""
    from transformers import AutoConfig

    hf = {**BASE, "model_type": model_type, "head_dim": 16, "rope_scaling": rope}
    if model_type == "phi3":
        hf["original_max_position_embeddings"] = 40
    saved = AutoConfig.for_model(**copy.deepcopy({**hf, "pad_token_id": 0})).to_dict()
    assert config_from_hf(saved) == config_from_hf(hf)
    if "type" in rope:
        assert {*rope} < {*saved["rope_parameters"]}


def test_two_rope_types_that_disagree_are_refused():
    rope = {"rope_type": "longrope", "type": "linear", "rope_theta": 1e4, **LONG}
    with pytest.raises(ValueError, match=r"rope_type = 'longrope' .*type = 'linear' disagree"):
        config_from_hf({**LLAMA, "model_type": "phi3", "rope_parameters": rope})


REFUSED = [  # (config, what the message must name)
    ({**LLAMA, "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({**LLAMA, "logits_scaling": 8}, "logits_scaling = 8"),
    ({**LLAMA, "is_causal": False}, "is_causal = False"),
    ({**LLAMA, "num_experts": 8}, "num_experts = 8"),
    ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({**LLAMA, "no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
    ({**LLAMA, "sliding_window": 64}, "sliding_window = 64"),
    ({**LLAMA, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ({**LLAMA, "layer_types": ["full_attention"] * 2}, "layer_types"),
    ({**LLAMA, "layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ({**MISTRAL, "sliding_window": 9, "layer_types": ["full_attention"] * 3}, "layer_types"),
    ({**MISTRAL, "attention_bias": True}, "attention_bias"),
    ({**MISTRAL, "sliding_window": 9, "use_sliding_window": False}, "use_sliding_window = False"),
    ({**LLAMA, "layer_types": [["full_attention"]] * 3}, "layer_types"),
    (
        {
            **LLAMA,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 40,
            },
            "original_max_position_embeddings": 41,
        },
        "original_max_position_embeddings = 41",
    ),
    ({**QWEN, "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    ({**QWEN, "use_sliding_window": "yes"}, "use_sliding_window = 'yes'"),
    ({**LLAMA, "model_type": "gemma2"}, "model_type = 'gemma2'"),
    ({key: value for key, value in LLAMA.items() if key != "model_type"}, "model_type = None"),
    *[
        ({**LLAMA, "rope_parameters": {"rope_theta": 1e4, **rope}}, name)
        for rope, name in [
            ({"rope_type": "dynamic", "factor": 2.0}, "rope_type = 'dynamic'"),
            (
                {"rope_type": "longrope", "factor": 2.0},
                "original_max_position_embeddings is missing",
            ),
            (
                {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 40,
                    "short_factor": [1.0] * 8,
                },
                "long_factor = None must be a number for each of 8 pairs",
            ),
            (
                {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 40,
                    "short_factor": [1.0] * 7,
                },
                "short_factor = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0] must be a number for each of 8"
                " pairs",
            ),
            (
                {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 40,
                    "short_factor": [1.0, 0] * 4,
                },
                "short_factor = 0 must be a positive number",
            ),
            (
                {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1},
                "llama_4_scaling_beta = 0.1",
            ),
            ({"rope_type": "linear"}, "factor is missing"),
            ({"factor": 2.0}, "rope_type = None"),
            ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
            ({"rope_type": "yarn", "factor": "4"}, "factor = '4'"),
            ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
            (
                {"rope_type": "default", "partial_rotary_factor": 0.25},
                "partial_rotary_factor = 0.25",
            ),
            ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "disagree"),
            ({"full_attention": {"rope_theta": 1e4}}, "rope_type = None"),
        ]
    ],
    *[
        ({**LLAMA, "model_type": family, **keys}, name)
        for family, keys, name in [
            (
                "smollm3",
                {"no_rope_layers": [1, 0]},
                "no_rope_layers = [1, 0] must be 1 or 0 for each of 3 layers",
            ),
            ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers = [1, 0, 2]"),
            ("smollm3", {"use_sliding_window": True, "sliding_window": 9}, "sliding_window = 9"),
            (
                "phi3",
                {"partial_rotary_factor": 1.5},
                "partial_rotary_factor = 1.5 rotates 24 of 16",
            ),
            ("phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor = 0.2 rotates 3 of 16"),
            ("phi3", {"attention_bias": True}, "attention_bias = True"),
            ("granite", {"residual_multiplier": 0}, "residual_multiplier = 0"),
            ("granite", {"num_experts": 8}, "num_experts = 8"),
            ("granite", {"position_embedding_type": "nope"}, "position_embedding_type = 'nope'"),
            ("olmo2", {"clip_qkv": 8}, "clip_qkv = 8"),
            (
                "olmo3",
                {
                    "rope_parameters": {
                        "full_attention": {"rope_theta": 1e4},
                        "sliding_attention": {
                            "rope_theta": 1e4,
                            "rope_type": "linear",
                            "factor": 2.0,
                        },
                    }
                },
                "must have a theta and no scaling",
            ),
            ("olmo3", {"rope_parameters": {"full_attention": [1]}}, "must hold objects"),
            *[
                (
                    "olmo3",
                    {"rope_parameters": {"full_attention": {}, "sliding_attention": value}},
                    "must hold objects",
                )
                for value in (5, "abc")
            ],
            ("qwen2_moe", {"mlp_only_layers": [[1]]}, "mlp_only_layers = [[1]]"),
            (
                "phi3",
                {"rope_parameters": {"original_max_position_embeddings": 1, **LONGROPE}},
                "original_max_position_embeddings = 1 must be at least 2",
            ),
            (
                "hunyuan_v1_dense",
                {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0}},
                "a head_dim of 4 or more, not 2",
            ),
            ("seed_oss", {"attention_out_bias": "no"}, "attention_out_bias = 'no'"),
            ("ernie4_5", {"use_bias": "no"}, "use_bias = 'no'"),
            ("ernie4_5", {"mlp_bias": True}, "mlp_bias = True"),
            (
                "hunyuan_v1_dense",
                {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
                "only for Hunyuan",
            ),
            ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm = False"),
            ("hunyuan_v1_dense", {"num_experts": 8}, "num_experts = 8"),
            (
                "exaone4",
                {"sliding_window": 9, "sliding_window_pattern": "LGL"},
                "sliding_window_pattern = 'LGL'",
            ),
            (
                "ministral3",
                {"sliding_window": 9, "layer_types": ["full_attention"] * 3},
                "layer_types = ",
            ),
            ("mistral3", {}, "text_config = None must be an object"),
            (
                "mistral3",
                {"text_config": {"model_type": "qwen2"}},
                "text_config = {'model_type': 'qwen2'}",
            ),
            ("llama", {"use_qk_norm": True}, "use_qk_norm = True"),
        ]
    ],
    ({**LLAMA, "rope_theta": 5e5}, "rope_theta = 500000.0"),
    ({**LLAMA, "rope_parameters": None, "rope_theta": 0}, "rope_theta = 0"),
    ({**LLAMA, "rope_parameters": None, "rope_theta": 1}, "rope_theta = 1.0"),
    (
        {
            **LLAMA,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 24,
            },
        },
        "high_freq_factor",
    ),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, "disagree"),
    ({**LLAMA, "rope_parameters": [1]}, "rope_parameters = [1]"),
    ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads = 3"),
    ({**LLAMA, "hidden_size": 66, "num_attention_heads": 4}, "hidden_size = 66"),
    ({**LLAMA, "head_dim": 15}, "head_dim = 15"),
    ({**LLAMA, "vocab_size": 2**40}, "vocab_size = 1099511627776"),
    ({**LLAMA, "num_hidden_layers": 2**20}, "num_hidden_layers"),
    ({**LLAMA, "hidden_size": -64}, "hidden_size = -64"),
    ({**LLAMA, "hidden_size": "64"}, "hidden_size = '64'"),
    ({**LLAMA, "hidden_size": 64.5}, "hidden_size = 64.5"),
    ({**LLAMA, "rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({**LLAMA, "tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
    *[
        ({k: v for k, v in LLAMA.items() if k != key}, f"{key} is missing")
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
        )
    ],
    ([], "expected a JSON object"),
]


@pytest.mark.parametrize("hf, names", REFUSED, ids=[names for _, names in REFUSED])
def test_refused_by_name(hf, names):
    with pytest.raises(ValueError, match=r"config\.json") as error:
        config_from_hf(hf)
    assert names in str(error.value)


def test_every_key_of_related_architectures_is_refused_by_name():
    """Biases are Llama's too, and must be true or false."""
    for key in NEUTRAL:
        reason = "must be" if key in ("attention_bias", "mlp_bias") else "is not supported"
        with pytest.raises(ValueError, match=rf"config\.json: {key} = 'odd' {reason}"):
            config_from_hf({**LLAMA, key: "odd"})


def test_the_families_are_listed_to_the_last_whatever_the_value(tmp_path):
    """A message is one line, of which a value or a key takes no more than a part."""
    file = tmp_path / "config.json"
    for model_type in ("nope", "nope\n" * 1000):
        file.write_text(json.dumps({**LLAMA, "model_type": model_type}))
        with pytest.raises(UserError, match=rf"{file}: model_type = 'nope.*") as error:
            read_config(file)
        assert str(error.value).endswith(f", {[*MODEL_TYPES][-1]}")
        assert "\n" not in str(error.value)
    rope = {"rope_type": "default", "odd\n" * 1000: [1] * 1000}
    file.write_text(json.dumps({**LLAMA, "rope_parameters": rope}))
    with pytest.raises(UserError, match=r"rope_parameters\.odd odd .*with rope_type 'default'$"):
        read_config(file)


def test_a_misspelt_key_of_a_record_is_an_error():
    with pytest.raises(TypeError, match="max_windows_layers is in no table"):
        llama_like(max_windows_layers=28)


def test_harmless_values_pass():
    """The same keys with the value that changes nothing, and keys nobody computes with."""
    neutral = {key: values[0] for key, values in NEUTRAL.items() if values}
    harmless = {
        "attention_dropout": 0.1,
        "use_cache": False,
        "pretraining_tp": 2,
        "unsloth_fixed": True,
        "no_rope_layers": [1, 1, 1],
        "layer_types": ["full_attention"] * 3,
        "sliding_window": None,
    }
    assert config_from_hf(
        {**LLAMA, **neutral, **harmless, **dict.fromkeys(NEUTRAL)}
    ) == config_from_hf({**LLAMA, "layer_types": None})
    assert config_from_hf({**LLAMA, **neutral}) == config_from_hf(LLAMA)


def test_an_empty_object_hides_nothing():
    hf = {
        **LLAMA,
        "rope_parameters": {},
        "rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    assert config_from_hf(hf).rope_type == "linear"


def test_the_original_context_may_stand_beside_the_object():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    beside = config_from_hf(
        {**LLAMA, "rope_parameters": rope, "original_max_position_embeddings": 40}
    )
    inside = config_from_hf(
        {**LLAMA, "rope_parameters": {**rope, "original_max_position_embeddings": 40}}
    )
    assert beside == inside and inside.rope_original_length == 40


def test_a_yarn_dictionary_means_what_transformers_reads_in_it():
    """DeepSeek-R1-0528-Qwen3-8B's own, whose attn_factor nothing in transformers reads."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 40,
        "attn_factor": 0.8782488562869419,
    }
    hf = {
        **LLAMA,
        "model_type": "qwen3",
        "rope_parameters": None,
        "rope_scaling": rope,
        "rope_theta": 1e6,
    }
    own = AutoConfig.for_model(**{key: value for key, value in hf.items() if value is not None})
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](own, "cpu")
    config = config_from_hf(hf)
    assert config.rope_type == "yarn" and config.rope_attention_factor == pytest.approx(
        factor, rel=1e-12
    )
    with pytest.raises(ValueError, match="attn_factor"):
        config_from_hf(
            {**hf, "rope_scaling": {"rope_type": "linear", "factor": 4.0, "attn_factor": 0.9}}
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"truncate": None},
        {"truncate": False},
        {"truncate": True},
        {"beta_fast": 1.0, "beta_slow": 32.0},
        {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
        {"beta_fast": 0.5, "beta_slow": 0.25},
    ],
    ids=str,
)
def test_yarns_frequencies_are_transformers(changes):
    """Whatever its borders are, in any order: a null is not the default there, and a ramp may go
    down."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 400,
    }
    hf = {**LLAMA, "head_dim": 32, "rope_parameters": {**rope, **changes}}
    want, _ = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**copy.deepcopy(hf)), "cpu")
    assert torch.allclose(rope_frequencies(config_from_hf(hf)), want, rtol=1e-5)


def test_yarn_that_a_user_adds_lengthens_the_context():
    """The recipe of Qwen's model cards leaves max_position_embeddings. Published YaRN has it
    already."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    for length, expected in ((64, 256), (80, 256), (256, 256), (512, 512), (32, 32)):
        hf = {**LLAMA, "max_position_embeddings": length, "rope_parameters": rope}
        assert config_from_hf(hf).max_seq_length == expected
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert (
        config_from_hf(
            {**LLAMA, "max_position_embeddings": 64, "rope_parameters": linear}
        ).max_seq_length
        == 64
    )
    # from transformers' default of 2,048 positions
    for incomplete in (rope, {"rope_type": "yarn", "factor": 4.0}):
        config = config_from_hf(
            {**LLAMA, "max_position_embeddings": None, "rope_parameters": incomplete}
        )
        assert config.max_seq_length == max(2048, 4 * config.rope_original_length)


def test_olmo_3_slides_but_in_every_fourth_layer_whatever_the_file_says():
    from transformers import AutoConfig

    hf = {
        **LLAMA,
        "model_type": "olmo3",
        "sliding_window": 9,
        "num_hidden_layers": 4,
        "rope_parameters": None,
    }
    assert (
        AutoConfig.for_model(**hf, sliding_window_pattern=2).layer_types[1] == "sliding_attention"
    )
    assert config_from_hf({**hf, "sliding_window_pattern": 4}).windows == (9, 9, 9, None)
    with pytest.raises(ValueError, match="sliding_window_pattern = 2"):
        config_from_hf({**hf, "sliding_window_pattern": 2})


@pytest.mark.parametrize(
    "rope", [{}, {"rope_parameters": None}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}]
)
def test_ministral_3_without_rope_parameters_is_transformers(rope):
    """Nothing means YaRN times 16 there; a dictionary without a theta means 10,000."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = {
        **BASE,
        "model_type": "ministral3",
        "head_dim": 32,
        "max_position_embeddings": 262144,
        **rope,
    }
    theirs = AutoConfig.for_model(**copy.deepcopy(hf))  # which writes into dictionaries
    want, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    config = config_from_hf(hf)
    assert (
        config.rope_theta == theirs.rope_parameters["rope_theta"]
        and config.rope_attention_factor == factor
    )
    assert config.query_scale == theirs.rope_parameters.get("llama_4_scaling_beta", 0)
    assert config.rope_original_length == theirs.rope_parameters["original_max_position_embeddings"]
    assert torch.allclose(rope_frequencies(config), want, rtol=1e-5)


def test_an_empty_rope_object_of_v5_scales_nothing():
    """Where the family's default is YaRN, as in transformers; v4's empty one is no object."""
    from transformers import AutoConfig

    hf = {**BASE, "model_type": "ministral3", "head_dim": 32, "max_position_embeddings": 262144}
    for rope in ({"rope_parameters": {}}, {"rope_scaling": {}}):
        theirs = AutoConfig.for_model(**copy.deepcopy(hf | rope)).rope_parameters
        config = config_from_hf(hf | rope)
        assert config.rope_type == theirs["rope_type"]
        assert config.rope_theta == theirs["rope_theta"]


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
@pytest.mark.parametrize("text", [MISTRAL, {**LLAMA, "model_type": "ministral3"}])
def test_the_outer_model_says_whether_mistral_3s_head_is_tied(text, inner, outer):
    """transformers' Mistral3Config ties unless it says otherwise; the text model's key is not
    read."""
    hf = {
        "model_type": "mistral3",
        "text_config": {**text, "tie_word_embeddings": inner},
        "tie_word_embeddings": outer,
    }
    hf = {key: value for key, value in hf.items() if value is not None}
    assert config_from_hf(hf).tie_embeddings == (outer is not False)


def test_qwen_window_is_off_unless_used():
    assert (
        config_from_hf({**QWEN, "sliding_window": 9, "use_sliding_window": False}).windows
        == (None,) * 3
    )
    sliding = {**QWEN, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}
    assert config_from_hf(sliding).windows == (None, None, 9)


def test_families_differ_where_their_key_is_absent():
    """transformers' defaults: Mistral slides over 4096 and has 8 KV heads, Qwen3 heads are 128
    wide."""
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rope_parameters")}
    assert config_from_hf(bare).n_kv_heads == 4 and config_from_hf(bare).rope_theta == 10000.0
    assert config_from_hf({**MISTRAL, "num_attention_heads": 8}).windows == (4096,) * 3
    assert (
        config_from_hf({**MISTRAL, "sliding_window": 9, "max_window_layers": 1}).windows == (9,) * 3
    )
    assert config_from_hf({**LLAMA, "model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(
    "model_type", ["llama", "mixtral", "qwen3", "smollm3", "phi3", "granite", "olmo3", "ernie4_5"]
)
def test_theta_is_transformers_where_a_file_has_none(model_type):
    from transformers import AutoConfig

    rope = AutoConfig.for_model(model_type).rope_parameters
    theta = config_from_hf({**LLAMA, "model_type": model_type, "rope_parameters": None}).rope_theta
    assert theta == rope.get("full_attention", rope)["rope_theta"]


# Sizes under which the defaults of all families divide; no family may leave them out.
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "vocab_size": 131,
}
OTHER_SIZES = {  # that one family may not leave out
    "dots1": {"n_routed_experts": 12, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_layer_end_index": 4},
    "phi3": {"pad_token_id": 0},
}
TEXT_TYPES = [name for name, family in MODEL_TYPES.items() if not family.text_models]


def as_transformers_has_it(hf: dict) -> dict:
    """config.json with every key that transformers computes with. It knows MiMo and Tencent's own
    Hunyuan by other names."""
    from transformers import CONFIG_MAPPING, AutoConfig

    hf = copy.deepcopy(hf)
    model_type = hf.pop("model_type")
    theirs = {"mimo": "qwen2", "hunyuan": "hunyuan_v1_moe"}.get(model_type, model_type)
    if theirs not in CONFIG_MAPPING:
        pytest.skip("a family that transformers does not have")
    return {**AutoConfig.for_model(theirs, **hf).to_dict(), "model_type": model_type}


def check_same_config(hf: dict) -> None:
    """`hf` means what transformers makes of it."""
    ours = config_from_hf(copy.deepcopy(hf))
    theirs = config_from_hf(as_transformers_has_it(hf))
    assert ours.dtype is None or ours.dtype == theirs.dtype
    rotates_all = (0,) * ours.n_layers
    same = {"dtype": None, "rope_types": ours.rope_types or rotates_all}
    assert dataclasses.replace(ours, **same) == dataclasses.replace(
        theirs, dtype=None, rope_types=theirs.rope_types or rotates_all
    )


@pytest.mark.parametrize("absent", ["missing", "null"])
@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_what_a_file_leaves_out_is_transformers(model_type, absent):
    """A config.json with sizes alone, or with null for all other keys of theirs that may be null
    there, has transformers' defaults."""
    hf = {**SIZES, "model_type": model_type, **OTHER_SIZES.get(model_type, {})}
    if absent == "null":
        full = as_transformers_has_it(hf)
        hf |= {key: None for key, value in full.items() if value is None and key not in hf}
    check_same_config(hf)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_each_key_that_a_file_leaves_out_is_transformers(model_type):
    hf = {**SIZES, "model_type": model_type, **OTHER_SIZES.get(model_type, {})}
    full = as_transformers_has_it(hf)
    for key in full.keys() - {*hf, "transformers_version", "architectures"}:
        check_same_config({name: value for name, value in full.items() if name != key})


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_a_family_has_defaults_for_keys_that_exist(model_type):
    """transformers has them, or a table of ours."""
    hf = {**SIZES, "model_type": model_type, **OTHER_SIZES.get(model_type, {})}
    known = {*as_transformers_has_it(hf), *FIELDS, *NEUTRAL, "attention_bias", "no_rope_layers"}
    known |= {"sliding_window_pattern", "max_window_layers", "sliding_window"}
    assert MODEL_TYPES[model_type].defaults.keys() <= known


# Keys of experts, with values that would change the tensors.
FOREIGN_KEYS = {
    "first_k_dense_replace": 2,
    "n_shared_experts": 3,
    "num_shared_experts": 3,
    "mlp_layer_types": ["dense"] * 4 + ["sparse"],
}
# Read here as the models' own code does, unlike in transformers.
OWN_CODE = {("hy_v3", "first_k_dense_replace")}
SPARSE_TYPES = [
    name
    for name in TEXT_TYPES
    if MODEL_TYPES[name].experts and name != "hunyuan" and not name.endswith("_text")
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "model_type",
    [
        name if name in ("minimax_m2", "mellum") else pytest.param(name, marks=pytest.mark.slow)
        for name in SPARSE_TYPES
    ],
)
def test_a_family_reads_its_own_keys_of_experts_only(model_type):
    """The parameters of transformers' model are counted, with each key beside its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def num_parameters(hf: dict) -> tuple[int, int]:
        config = AutoConfig.for_model(**hf)
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(config)
        ours = empty_model(config_from_hf(hf), torch.float32)
        return tuple(
            sum(tensor.numel() for name, tensor in model.state_dict().items() if "bias" not in name)
            for model in (theirs, ours)
        )

    hf = {**SIZES, "hidden_size": 256, "head_dim": 4, "model_type": model_type}
    hf |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "intermediate_size": 16}
    hf |= OTHER_SIZES.get(model_type, {})
    if model_type == "hunyuan_v1_moe":
        hf["num_experts"] = 4
    for key, value in FOREIGN_KEYS.items():
        if (model_type, key) not in OWN_CODE:
            theirs, ours = num_parameters({**hf, key: value})
            assert ours == theirs, key


def expert_sizes(family) -> dict:
    """Keys that most sparse families must have."""
    if not family.experts:
        return {}
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def test_families_that_always_norm_queries_and_keys_may_say_so():
    """Qwen3-Coder's config.json has use_qk_norm. transformers reads neither key for these
    families."""
    from loading.families import FAMILIES

    always = [model_type for model_type, family in FAMILIES.items() if family.fields.get("qk_norm")]
    assert {"qwen3", "qwen3_moe", "olmo2", "olmo3", "exaone4", "hunyuan_v1_dense"} < set(always)
    for model_type, family in FAMILIES.items():
        if family.text_models:
            continue
        hf = {**LLAMA, "model_type": model_type, **expert_sizes(family)}
        for key in ("use_qk_norm", "qk_layernorm"):
            if model_type in always:
                assert config_from_hf({**hf, key: True}) == config_from_hf(hf), (model_type, key)
            elif key not in family.defaults:
                with pytest.raises(ValueError, match=f"{key} = True is not supported"):
                    config_from_hf({**hf, key: True})
    with pytest.raises(ValueError, match="use_qk_norm = 'yes'"):
        config_from_hf({**LLAMA, "model_type": "qwen3", "use_qk_norm": "yes"})


def test_hunyuan_a13b_as_published_is_transformers():
    """Tencent's own keys, a list for each layer, of which only some change the arithmetic."""
    from transformers import AutoConfig

    n_layers = 4
    rope = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
    hf = {
        **SIZES,
        "num_hidden_layers": n_layers,
        "model_type": "hunyuan",
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "attention_bias": False,
        "attention_head_dim": 32,
        "cla_share_factor": 2,
        "group_limited_greedy": False,
        "hidden_act": "silu",
        "kv_lora_rank": None,
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "moe_drop_tokens": False,
        "moe_intermediate_size": [96] * n_layers,
        "moe_layer_num_skipped": 0,
        "moe_topk": [8] * n_layers,
        "n_group": None,
        "norm_topk_prob": True,
        "norm_type": "rms",
        "num_experts": 64,
        "num_key_value_heads": 8,
        "num_shared_expert": [1] * n_layers,
        "position_embedding_xdrope": False,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {**rope, "mscale_all_dim": 1.0, "type": "dynamic"},
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cla": False,
        "use_mixed_mlp_moe": True,
        "use_mla": False,
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
    }
    config = config_from_hf(copy.deepcopy(hf))
    theirs = AutoConfig.for_model(**{**copy.deepcopy(hf), "model_type": "hunyuan_v1_moe"})
    assert config == config_from_hf(theirs.to_dict())
    assert (config.n_experts, config.experts_per_token, config.shared_dim) == (64, 8, 96)
    for key, value in {"use_cla": True, "use_mla": True, "moe_layer_num_skipped": 1}.items():
        with pytest.raises(ValueError, match=f"{key} = {value} is not supported"):
            config_from_hf({**hf, key: value})


def test_config_survives_json():
    assert config_from_hf(json.loads(json.dumps(LLAMA))) == config_from_hf(LLAMA)


def test_a_growth_of_0_is_none():
    """Ministral 3's queries grow by llama_4_scaling_beta; 0 is a value, under which they do not."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    hf = {
        "model_type": "ministral3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    fields = [
        config_from_hf({**hf, "rope_parameters": rope | own})
        for own in ({"llama_4_scaling_beta": 0}, {})
    ]
    assert fields[0] == fields[1]
