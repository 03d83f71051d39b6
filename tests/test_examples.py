"""examples/: a fork of this project as a diff, applied to a copy and held against transformers."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

CODE = """
import json, sys
import torch, transformers
from loading.checkpoint import load_model, save_model
from generate import generate
from decoding.sampling import Sampling

hf = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 131, "sliding_window": 9,
      "max_position_embeddings": 160, "tie_word_embeddings": False, "query_pre_attn_scalar": 50,
      "rms_norm_eps": 1e-6, "dtype": "float32",
      "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
config = transformers.AutoConfig.for_model(**hf)
config._attn_implementation = "eager"
oracle = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for parameter in oracle.parameters():
        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
oracle.save_pretrained(sys.argv[1])
model = load_model(sys.argv[1], dtype=torch.float32)
tokens = torch.randint(3, 131, (2, 60), generator=generator)
with torch.no_grad():
    want = oracle(tokens).logits
    caches, parts = model.make_caches(2, 64), []
    for begin, end in ((0, 7), (7, 8), (8, 60)):
        parts.append(model(tokens[:, begin:end], torch.arange(begin, end), caches))
    text = oracle.generate(tokens[:1, :7], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
got = [id for _, id in generate(model, [tokens[0, :7].tolist()], sampling=Sampling(0), max_new_tokens=64)]
print(json.dumps({"largest": want.abs().max().item(), "error": (torch.cat(parts, 1) - want).abs().max().item(),
                  "same text": got == text[0, 7:].tolist(), "kinds": len(set(got))}))
"""


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A copy of the project with Gemma 3 in it."""
    folder = tmp_path_factory.mktemp("fork") / "quickdraft"
    folder.mkdir()
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    for room in ("decoding", "drafts", "loading", "loading/quantized", "weights", "cli"):
        shutil.copytree(ROOT / room, folder / room)
    diff = (ROOT / "examples" / "gemma3.diff").read_text()
    done = subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=folder, input=diff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.readme
def test_gemma_3_is_a_diff_of_sixty_lines(fork, tmp_path):
    """Logits in chunks and 64 greedy tokens, over windows, both rotations, norms around and GELU."""
    lines = (ROOT / "examples" / "gemma3.diff").read_text().splitlines()
    assert len([line for line in lines if re.match(r"[+-](?![+-]{2} [ab]/)", line)]) <= 60
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "m")], cwd=fork, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["largest"] > 1 and found["error"] <= 1e-4 and found["same text"] and found["kinds"] > 4, found


def test_without_the_diff_it_is_refused():
    from loading.config import config_fields

    with pytest.raises(ValueError, match="model_type 'gemma3_text' is not supported"):
        config_fields({"model_type": "gemma3_text"})
