"""examples/: a fork of this project as a diff, applied to a copy and compared with transformers."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

CODE = """
import json, sys
import torch, transformers
from loading.checkpoint import load_model
from drafts.ngram import NgramDraft
from decoding.engine import Engine
from decoding.sampling import Sampling

text = {
    "model_type": "muse_glimmer_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 131,
    "sliding_window": 9,
    "max_position_embeddings": 160,
    "final_logit_softcapping": 3.0,
    "output_multiplier": 0.7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "dtype": "float32",
}
vision = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
config = transformers.AutoConfig.for_model(
    "muse_glimmer",
    text_config=text,
    vision_config={**vision, "num_hidden_layers": 1},
    out_hidden_size=128,
    projector_hidden_size=32,
    tie_word_embeddings=False,
)
config._attn_implementation = "eager"
oracle = transformers.MuseGlimmerForConditionalGeneration(config).float().eval()
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for parameter in oracle.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
oracle.save_pretrained(sys.argv[1])
model = load_model(sys.argv[1], dtype=torch.float32)
tokens = torch.randint(3, 131, (2, 60), generator=generator)
with torch.no_grad():
    want = oracle(input_ids=tokens).logits
    caches, parts = model.make_caches(2, 64), []
    for begin, end in ((0, 7), (7, 8), (8, 60)):
        parts.append(model(tokens[:, begin:end], torch.arange(begin, end), caches))
    text = oracle.generate(
        input_ids=tokens[:1, :7],
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
texts = [
    [
        id
        for _, id in Engine(model, 1, 71, **drafting).generate(
            [tokens[0, :7].tolist()], sampling=Sampling(0), max_new_tokens=64
        )
    ]
    for drafting in ({}, {"drafter": NgramDraft(), "speculate_k": 3})
]
print(
    json.dumps(
        {
            "largest": want.abs().max().item(),
            "error": (torch.cat(parts, 1) - want).abs().max().item(),
            "same text": texts == [text[0, 7:].tolist()] * 2,
            "kinds": len(set(texts[0])),
        }
    )
)
"""


def copied(folder):
    """A copy of the project."""
    folder.mkdir()
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    for name in (
        "decoding",
        "drafts",
        "exact",
        "loading",
        "loading/quantized",
        "weights",
        "cli",
        "scripts",
    ):
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    return folder


def patched(folder, name: str):
    """A copy of the project with a family of examples/ in it."""
    copied(folder)
    diff = (ROOT / "examples" / f"{name}.diff").read_text()
    done = subprocess.run(
        ["patch", "-p1", "--fuzz=0"], cwd=folder, input=diff, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    return patched(tmp_path_factory.mktemp("fork") / "quickdraft", "muse_glimmer")


@pytest.mark.house
@pytest.mark.parametrize("name, num_lines", [("muse_glimmer", 65), ("k2_horizon", 15)])
def test_a_family_is_a_diff_of_so_many_lines(name, num_lines):
    lines = (ROOT / "examples" / f"{name}.diff").read_text().splitlines()
    assert len([line for line in lines if re.match(r"[+-](?![+-]{2} [ab]/)", line)]) <= num_lines


# Groups of the stream are normed by themselves.
HORIZON = """
import torch
import tests.reference as reference
from loading.config import config_from_hf
from tests.conformance import check_family

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 131}
hf = {**sizes, "num_attention_heads": 4, "rms_norm_eps": 1e-5, "layernorm_num_groups": 4}
norm = reference.norm


def norm_of_groups(x, weight, eps):
    return norm(x.unflatten(-1, (4, -1)), 1, eps).flatten(-2) * weight


reference.norm = norm_of_groups
check_family({**hf, "model_type": "k2_horizon", "rope_theta": 1e7})
for model_type, groups in (("k2_horizon", 1), ("llama", 1)):
    config = config_from_hf({**hf, "model_type": model_type, "layernorm_num_groups": groups})
    assert config.norm_groups == 1
try:
    config_from_hf({**hf, "model_type": "llama"})
except ValueError as error:
    print(error)
"""


@pytest.mark.house
def test_k2_horizon_is_two_rows_and_its_norm(tmp_path):
    """Another family refuses its key, at a value that is not neutral."""
    folder = patched(tmp_path / "quickdraft", "k2_horizon")
    done = subprocess.run(
        [sys.executable, "-c", HORIZON],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    assert "layernorm_num_groups = 4 is not supported; supported: 1" in done.stdout


@pytest.mark.attack
def test_muse_glimmer_is_transformers(fork, tmp_path):
    """Logits in chunks and 64 greedy tokens, plain and drafted, over windows, layers without RoPE,
    norms around and without weights, gated attention and capped logits."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "folder")],
        cwd=fork,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (
        result["largest"] > 1
        and result["error"] <= 1e-4
        and result["same text"]
        and result["kinds"] > 4
    ), result


@pytest.mark.house
def test_without_the_diff_it_is_refused():
    from loading.config import config_from_hf

    with pytest.raises(ValueError, match="model_type = 'muse_glimmer_text' is not supported"):
        config_from_hf({"model_type": "muse_glimmer_text"})


# Locally typical sampling (arXiv:2202.00666): a function, a row of FILTERS, a row of SETTINGS and a
# field.
PENALTIES_HEADING = "# " + "-" * 86 + " penalties\n"
FILTER = (
    """def typical_filter(p, mass):
    surprise = -p.log()
    distance = (surprise - torch.special.entr(p).sum(-1, keepdim=True)).abs()
    order = distance.argsort(dim=-1)
    sorted_p = p.gather(-1, order)
    kept = sorted_p.cumsum(-1) - sorted_p < mass
    return torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, kept)


"""
    + PENALTIES_HEADING
)
CHANGES = {  # file -> pairs of old and new text, each old one there once
    "decoding/sampling.py": [
        (
            PENALTIES_HEADING,
            FILTER,
        ),
        ('"min_p": min_p_filter}', '"min_p": min_p_filter, "typical_p": typical_filter}'),
        (
            "    logit_bias: tuple",
            '    typical_p: float | None = SETTINGS["typical_p"].default\n    logit_bias: tuple',
        ),
    ],
    "decoding/settings.py": [
        (
            '    "repetition_penalty": Setting(',
            '    "typical_p": Setting("keep typical tokens", "lie in (0, 1]", lambda x: 0 < x <='
            " 1, None, 1.0),\n"
            '    "repetition_penalty": Setting(',
        )
    ],
}
TYPICAL_CODE = """
import contextlib, io, json, sys
import pytest, torch
from cli.flags import parse_args
from cli.main import main as run
from decoding.sampling import Sampling, distribution
from scripts.serve.openai_form import Refusal, read_request


def texts(*flags):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(
            parse_args(
                [
                    "--checkpoint",
                    sys.argv[1],
                    "--json",
                    "--ordered",
                    "--device",
                    "cpu",
                    "--temperature",
                    "1.2",
                    "--max_new_tokens",
                    "16",
                    *flags,
                ]
            )
        )
    return [json.loads(line)["tokens"] for line in out.getvalue().splitlines()]


(typical,), (usual,) = texts("--typical_p", "0.2"), texts()
lines = [
    {"prompt": "Once upon a time", **own}
    for own in ({"typical_p": 0.2}, {}, {"typical_p": 1}, {"top_k": 3})
]
open("lines.jsonl", "w").write("\\n".join(map(json.dumps, lines)))
rows = texts("--prompt_file", "lines.jsonl", "--batch_size", "4")
assert rows[:3] == [typical, usual, usual] and typical != usual != rows[3], rows
request = read_request({"prompt": "a", "typical_p": 0.25}, False, "m", Sampling(0.5, top_p=0.9))
assert (
    request.sampling == Sampling(0.5, top_p=0.9, typical_p=0.25)
    and request.sampling.path == "filtered"
)
with pytest.raises(Refusal, match="typical_p = 2.0 must lie in"):
    read_request({"prompt": "a", "typical_p": 2}, False, "m", Sampling())
samplings = [
    Sampling(0),
    Sampling(),
    Sampling(top_p=0.5),
    Sampling(typical_p=0.5),
    Sampling(typical_p=0.5, top_k=9),
]
logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).expand(len(samplings), -1)
together = distribution(
    logits, "filtered", torch.stack([sampling.values for sampling in samplings])
)
for p, sampling in zip(together, samplings):
    assert torch.equal(p, sampling.probs(logits[0]))
assert len({tuple(p.tolist()) for p in together}) == len(samplings)
"""


@pytest.mark.readme
def test_a_filter_is_a_function_two_rows_and_a_field(tmp_path):
    """A fork's filter has a flag, a key of JSONL and one of requests; rows without it keep their
    bits."""
    folder = copied(tmp_path / "quickdraft")
    for file, pairs in CHANGES.items():
        text = (folder / file).read_text()
        for old, new in pairs:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / file).write_text(text)
    command = [sys.executable, "-c", TYPICAL_CODE, str(ROOT / "checkpoints" / "demo")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_notebook_needs_five_files(tmp_path):
    """Those that its first lines name, and nothing else of the project."""
    notebook = ROOT / "examples" / "notebook.py"
    files = re.search(r"^ {4}(model\.py .*)$", notebook.read_text(), re.MULTILINE)[1].split()
    assert len(files) <= 5 and len(notebook.read_text().splitlines()) <= 120
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    shutil.copy(notebook, tmp_path)
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    num_tokens, num_passes = re.match(r"(\d+) tokens in (\d+) passes", done.stdout).groups()
    assert int(num_passes) < int(num_tokens) == 60
    assert done.stdout.splitlines()[-1] == "the drafted text is the plain one"
