"""scripts/eval_lm.py: the harness gets the model's own figures, by a computation that shares none
of its code.

`direct` runs one request at a time, the full sequence, all logits; `text_before` ends texts at stop
strings. The harness itself runs on three tasks of a local folder. Nothing here may reach the
network.
"""

import json
import math
import os
import runpy
import shutil
import socket
import sys
from functools import partial

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read when the harness imports `datasets`

import lm_eval
import lm_eval.tasks
import pytest
import torch
from conftest import BASE, FAMILIES, ROOT, generate
from lm_eval.api.instance import Instance
from transformers.utils.chat_template_utils import render_jinja_template

from decoding.sampling import Sampling
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from loading.chat_templates import ChatTemplate
from loading.checkpoint import load_model
from loading.config import config_from_hf
from loading.models import random_model
from loading.tokenizer import load_tokenizer
from scripts import eval_lm
from scripts.eval_lm import QuickdraftLM

pytestmark = pytest.mark.attack
DEMO = ROOT / "checkpoints" / "demo"
# 1,000 tokens, twice the context
STORY = (ROOT / "checkpoints" / "stories.txt").read_text().strip()

# Products in float32 of different row counts differ by some 1e-4 in a logit; a sum over the
# tokens of a text by less than so much for each of them.
PER_TOKEN = 2e-4


@pytest.fixture(scope="module")
def model():
    return load_model(DEMO, dtype=torch.float32)


@pytest.fixture
def tokenizer():
    return load_tokenizer(DEMO)


@pytest.fixture
def lm(model, tokenizer):
    return QuickdraftLM(model, tokenizer, batch_size=4)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something wanted the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


@torch.inference_mode()
def direct(model, ids: list[int], scored: int, limit: int = 512) -> tuple[float, bool]:
    """Log-likelihood of the last tokens of ids, of which the model may see `limit` before each, and
    are they greedy."""
    ids = ids[-limit - 1 :]
    # (n - 1, V)
    log_p = model(torch.tensor([ids[:-1]]), torch.arange(len(ids) - 1))[0].log_softmax(-1)
    total, greedy = 0.0, True
    for position in range(len(ids) - scored, len(ids)):
        total += log_p[position - 1, ids[position]].item()
        greedy = greedy and log_p[position - 1].argmax().item() == ids[position]
    return total, greedy


# -------------------------------------------------------------------------------- log-likelihoods


def pairs(model, tokenizer) -> list[tuple[str, str]]:
    greedy = plain(model, tokenizer, tokenizer.encode("Once upon a time"), Sampling(0.0), 6, 0)
    return [
        ("Tim was happy and", " said yes"),
        ("Once upon a time", greedy),
        ("Tim was happy and  ", "said yes"),  # its spaces belong to what follows
        ("", "One day Tim found a ball"),
        ("The ball was", " red"),  # four choices of one token, and one of several
        ("The ball was", " big"),
        ("The ball was", " the"),
        ("The ball was", " too big for Tim"),
        ("Tim was happy and", " said yes"),  # the same request again
        (STORY[:600], " and they went home."),
        ("Tim", " likes"),
    ]


def encoded(tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """All ids led by BOS, and how many of them are the continuation's."""
    moved = len(context) - len(context.rstrip(" "))
    before, text = context[: len(context) - moved], context + continuation
    ids = [1, *tokenizer.encode(text, bos=False)]
    return ids, len(ids) - 1 - (len(tokenizer.encode(before, bos=False)) if before else 0)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_log_likelihoods_are_the_models(model, tokenizer, batch_size):
    arguments, lm = pairs(model, tokenizer), QuickdraftLM(model, tokenizer, batch_size=batch_size)
    results = lm.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)
    want = [direct(model, *encoded(tokenizer, *pair)) for pair in arguments]
    lengths = [encoded(tokenizer, *pair)[1] for pair in arguments]
    assert [greedy for _, greedy in results] == [greedy for _, greedy in want]
    assert want[1][1] and not want[0][1]  # both kinds occur
    for (got, _), (exact, _), n in zip(results, want, lengths, strict=True):
        assert abs(got - exact) < PER_TOKEN * n, (got, exact)
    assert results[0] == results[8]


def test_a_score_is_that_of_the_row_alone(tokenizer):
    """Also beside a row that is beyond longrope's original context, where the factors change."""
    hf = {**BASE, **FAMILIES["phi-4-mini"], "vocab_size": 2048}
    model = random_model(config_from_hf(hf), dtype=torch.float32)
    arguments = [("Tim was happy and", " said yes"), (STORY[:250], " and they went home.")]
    lm = QuickdraftLM(model, tokenizer, batch_size=4)
    results = lm.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)
    for pair, (got, _) in zip(arguments, results):
        ids, n = encoded(tokenizer, *pair)
        assert got == pytest.approx(direct(model, ids, n)[0], abs=PER_TOKEN * n)
    lengths = [len(encoded(tokenizer, *pair)[0]) for pair in arguments]
    assert lengths[0] < model.config.rope_original_length < lengths[1]


@pytest.mark.parametrize("max_length", [512, 40])
def test_long_contexts_lose_their_first_tokens(model, tokenizer, capsys, max_length):
    lm = QuickdraftLM(model, tokenizer, batch_size=4, max_length=max_length)
    long = encoded(tokenizer, STORY, " The end.")
    fits = tokenizer.decode(tokenizer.encode(STORY, bos=False)[: max_length - 10])
    arguments = [(STORY, " The end."), (fits, " The"), (STORY, " And they all played")]
    results = lm.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)
    for (got, greedy), pair in zip(results, arguments, strict=True):
        ids, n = encoded(tokenizer, *pair)
        exact = direct(model, ids, n, max_length)
        assert abs(got - exact[0]) < PER_TOKEN * n and greedy == exact[1]
    assert len(long[0]) > 513
    lines = [line for line in capsys.readouterr().err.splitlines() if "first tokens" in line]
    assert lines == [
        f"2 of 3 requests do not fit in {max_length} positions: their first tokens are left out"
    ]


def test_exactly_what_fits_is_not_cut(model, tokenizer, capsys):
    """max_length tokens are fed, and one more is scored: the last one takes no position."""
    lm = QuickdraftLM(model, tokenizer, max_length=40)
    ids = [1, *tokenizer.encode(STORY, bos=False)[:41]]
    inputs = []
    hidden, model.hidden = (
        model.hidden,
        lambda tokens, *rest: inputs.append(tokens.tolist()) or hidden(tokens, *rest),
    )
    try:
        (fits,) = lm._loglikelihood_tokens([(None, ids[:38], ids[38:41])], disable_tqdm=True)
        assert "first tokens" not in capsys.readouterr().err
        (truncated,) = lm._loglikelihood_tokens([(None, ids[:39], ids[39:42])], disable_tqdm=True)
    finally:
        del model.hidden
    assert inputs == [[ids[:40]], [ids[1:41]]] and "1 of 1" in capsys.readouterr().err
    assert abs(fits[0] - direct(model, ids[:41], 3)[0]) < PER_TOKEN * 3
    assert abs(truncated[0] - direct(model, ids[1:42], 3)[0]) < PER_TOKEN * 3


@pytest.mark.parametrize("batch_size", [2, 5])
def test_choices_run_their_context_once(model, tokenizer, batch_size):
    """Contexts and choices of unequal lengths, some near the context's end, and one request without
    a sibling."""
    contexts = [STORY[:n] for n in (200, 61, 340)] + [
        tokenizer.decode(tokenizer.encode(STORY * 3)[:505])
    ]
    arguments = [
        (context, f" {choice}")
        for context in contexts
        for choice in ("a", "ball", "the park and a dog")
    ]
    arguments = [arguments[0], ("Tim", " ran"), *arguments[1:]]
    num_inputs, hidden = [], model.hidden
    lm = QuickdraftLM(model, tokenizer, batch_size=batch_size)
    want = [direct(model, *encoded(tokenizer, *pair)) for pair in arguments]
    model.hidden = lambda tokens, *rest: num_inputs.append(tokens.numel()) or hidden(tokens, *rest)
    try:
        results = lm.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)
        num_inputs.clear()
        lm.loglikelihood(requests("loglikelihood", arguments[4:7]), disable_tqdm=True)
    finally:
        del model.hidden
    for (got, is_top), (log_p, top), pair in zip(results, want, arguments, strict=True):
        num_targets = encoded(tokenizer, *pair)[1]
        assert abs(got - log_p) < PER_TOKEN * num_targets and is_top == top, pair
    assert sum(num_inputs) < 0.8 * sum(len(encoded(tokenizer, *pair)[0]) for pair in arguments[4:7])


def test_only_continuations_go_through_the_head(lm, model, tokenizer):
    shapes = []
    head, model.head = model.head, lambda h: shapes.append(tuple(h.shape)) or head(h)
    arguments = pairs(model, tokenizer)
    shapes.clear()
    try:
        lm.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)
        num_scored = sum(encoded(tokenizer, *pair)[1] for pair in arguments)
        assert sum(rows for rows, _ in shapes) == num_scored and all(
            len(shape) == 2 for shape in shapes
        )
        shapes.clear()
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(STORY,)]), disable_tqdm=True)
        assert (
            max(rows for rows, _ in shapes) <= eval_lm.HEAD_ROWS < sum(rows for rows, _ in shapes)
        )
    finally:
        del model.head


def test_what_cannot_be_scored_is_said(model, tokenizer):
    lm = QuickdraftLM(model, tokenizer, max_length=8)
    with pytest.raises(ValueError, match=r"continuation of 0 tokens.*'Tim'"):
        lm.loglikelihood(requests("loglikelihood", [("Tim", "")]), disable_tqdm=True)
    with pytest.raises(ValueError, match="1 to 8"):
        lm.loglikelihood(requests("loglikelihood", [("Tim", STORY)]), disable_tqdm=True)


def test_broken_weights_are_no_figures(lm, model, monkeypatch):
    monkeypatch.setattr(model, "head", lambda h: torch.full((len(h), 2048), math.nan))
    with pytest.raises(ValueError, match="not finite"):
        lm.loglikelihood(requests("loglikelihood", [("Tim", " ran")]), disable_tqdm=True)


@pytest.mark.parametrize("max_length", [512, 48])
def test_rolling_scores_every_token_once(model, tokenizer, max_length):
    """Windows of `max_length` tokens; the last one reaches back so that it is as long as the
    others."""
    lm = QuickdraftLM(model, tokenizer, batch_size=3, max_length=max_length)
    texts = [STORY, "Tim ran.", STORY[:300], "", STORY]
    results = lm.loglikelihood_rolling(
        requests("loglikelihood_rolling", [(text,) for text in texts]), True
    )
    for text, got in zip(texts, results, strict=True):
        ids = [1, *tokenizer.encode(text, bos=False)] if text else []
        want = 0.0
        for begin in range(1, len(ids), max_length):
            end = min(begin + max_length, len(ids))
            want += direct(model, ids[max(0, end - max_length - 1) : end], end - begin, max_length)[
                0
            ]
        assert abs(got - want) < PER_TOKEN * max(1, len(ids)), (text, got, want)
    assert results[0] == results[-1] < results[2] < results[1] < results[3] == 0.0


def test_without_bos_the_end_of_text_comes_first(model, tokenizer):
    tokenizer.runtime.bos_id, tokenizer.runtime.leading_ids = None, []  # as Qwen's
    lm = QuickdraftLM(model, tokenizer)
    ids = tokenizer.encode("One day Tim found a ball")
    assert lm.prefix_token_id == lm.eot_token_id == 2 and ids[0] != 1
    want = direct(model, [2, *ids], len(ids))[0]
    (empty, _), (spaces, _) = lm.loglikelihood(
        requests(
            "loglikelihood", [("", "One day Tim found a ball"), (" ", "One day Tim found a ball")]
        ),
        True,
    )
    (rolled,) = lm.loglikelihood_rolling(
        requests("loglikelihood_rolling", [("One day Tim found a ball",)]), True
    )
    assert abs(empty - want) < PER_TOKEN * len(ids) and abs(rolled - want) < PER_TOKEN * len(ids)
    led = [2, *tokenizer.encode(" One day Tim found a ball")]
    assert abs(spaces - direct(model, led, len(led) - 1)[0]) < PER_TOKEN * len(led)
    ((plain, _),) = lm.loglikelihood(requests("loglikelihood", [("Tim was", " happy")]), True)
    full = tokenizer.encode("Tim was happy")
    assert (
        abs(plain - direct(model, full, len(full) - len(tokenizer.encode("Tim was")))[0])
        < PER_TOKEN * 3
    )


def test_bos_is_never_doubled(lm, tokenizer):
    ids = tokenizer.encode("Tim ran", bos=False)
    assert (
        lm.tok_encode("Tim ran") == [1, *ids]
        and lm.tok_encode("Tim ran", add_special_tokens=False) == ids
    )
    assert lm.tok_encode("<s>Tim").count(1) == 1 and lm.tok_encode("<s>Tim")[0] == 1
    tokenizer.runtime.add_bos = False  # the folder's policy
    assert lm.tok_encode("Tim ran") == lm.tok_encode("Tim ran", add_special_tokens=True) == ids


# ------------------------------------------------------------------------------------- generation


def text_before(text: str, stops: list[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def plain(model, tokenizer, prompt: list[int], sampling: Sampling, new: int, seed: int) -> str:
    """The same prompt alone, whole, then as text."""
    ids = [
        id
        for _, id in generate(
            model, [prompt], sampling=sampling, max_new_tokens=new, stop_ids={2}, seed=seed
        )
    ]
    return tokenizer.decode(ids[:-1] if ids[-1] == 2 else ids)


GREEDY = {"do_sample": False, "temperature": 0.7}  # the harness's own tasks say that
ASKED = [
    ("Once upon a time", {"until": ["."], "max_gen_toks": 40, **GREEDY}, Sampling(0.0)),
    ("Tim and Sam", {"until": ["\n", " the"], "max_gen_toks": 25}, Sampling(0.0)),
    ("The dog was very", {"until": [], "max_gen_toks": 12}, Sampling(0.0)),
    ("Once upon a time", {"until": "park", "max_new_tokens": 30, "do_sample": True}, Sampling(1.0)),
    ("Once upon a time", {"until": "park", "max_new_tokens": 30, "do_sample": True}, Sampling(1.0)),
    (
        "A cat",
        {
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 20,
            "top_p": 0.9,
            "max_gen_toks": 30,
            "until": ["!"],
        },
        Sampling(0.8, 20, 0.9),
    ),
    # to the end token
    ("They all lived happily ever", {"until": [""], "max_gen_toks": 200}, Sampling(0.0)),
    ("", {"until": ["."], "max_gen_toks": 20}, Sampling(0.0)),
    ("Tim and Sam", {"until": ["."], "max_gen_toks": 1}, Sampling(0.0)),
]


def stops_of(settings: dict) -> list[str]:
    until = settings.get("until", [])
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


DRAFTERS = {
    "none": lambda model: None,
    "ngram": lambda model: NgramDraft(),
    # on the model's own caches
    "layers": lambda model: ModelDraft(layer_subset(model, [0, 1, 5]), on_layers=[0, 1, 5]),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_generation_is_generates_up_to_the_stop_string(model, tokenizer, drafter):
    lm = QuickdraftLM(model, tokenizer, batch_size=3, seed=5, drafter=DRAFTERS[drafter](model))
    # drafts keep laws, not draws
    arguments = [ask for ask in ASKED if drafter == "none" or not ask[2].temperature]
    results = lm.generate_until(
        requests("generate_until", [ask[:2] for ask in arguments]), disable_tqdm=True
    )
    for number, ((context, settings, sampling), got) in enumerate(
        zip(arguments, results, strict=True)
    ):
        new = settings.get("max_gen_toks") or settings["max_new_tokens"]
        prompt = tokenizer.encode(context)
        full = plain(model, tokenizer, prompt, sampling, new, 5 + number)
        assert got == text_before(full, stops_of(settings)), (context, got, full)
    assert results[0].strip() and "." not in results[0]
    assert drafter != "none" or results[3] != results[4]  # repeats of a request draw anew
    # Scoring in between changes nothing, and neither does a longer prompt.
    (score,) = lm.loglikelihood(
        requests("loglikelihood", [("Tim was", " happy")]), disable_tqdm=True
    )
    assert (
        abs(score[0] - direct(model, *encoded(tokenizer, "Tim was", " happy"))[0]) < PER_TOKEN * 3
    )
    again = lm.generate_until(
        requests("generate_until", [ask[:2] for ask in arguments[:3]]), disable_tqdm=True
    )
    assert again == results[:3]
    longer = lm.generate_until(
        requests("generate_until", [(STORY[:900], {"max_gen_toks": 3})]), disable_tqdm=True
    )
    prompt = tokenizer.encode(STORY[:900])
    assert longer[0] == plain(model, tokenizer, prompt, Sampling(0.0), 3, 0)


def test_long_prompts_of_generation_are_cut(model, tokenizer, capsys):
    lm = QuickdraftLM(model, tokenizer, max_length=64)
    arguments = [
        (STORY, {"max_gen_toks": 10, "until": ["."]}),
        ("Tim", {"max_gen_toks": 10, "until": ["."]}),
    ]
    results = lm.generate_until(requests("generate_until", arguments), disable_tqdm=True)
    full = plain(model, tokenizer, tokenizer.encode(STORY)[-54:], Sampling(0.0), 10, 0)
    assert results[0] == text_before(full, ["."])
    assert "1 of 2 requests do not fit in 64 positions" in capsys.readouterr().err


def test_a_special_token_named_as_a_stop_is_met_as_an_id(model, tokenizer, tmp_path):
    ids = [
        id
        for _, id in generate(
            model, [tokenizer.encode("Once upon a time")], sampling=Sampling(0.0), max_new_tokens=20
        )
    ]
    third = next(n for n, id in enumerate(ids) if n > 2 and id not in ids[:n])
    folder = shutil.copytree(DEMO, tmp_path / "special")
    path = folder / "tokenizer_config.json"
    added = {str(ids[third]): {"content": "<|turn|>", "special": True}}
    settings = json.loads(path.read_text()) | {"added_tokens_decoder": added}
    path.write_text(json.dumps(settings))
    (text,) = QuickdraftLM(model, load_tokenizer(folder)).generate_until(
        requests(
            "generate_until", [("Once upon a time", {"until": ["<|turn|>"], "max_gen_toks": 20})]
        ),
        True,
    )
    assert text == tokenizer.decode(ids[:third])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_beams": 4}, "num_beams = 4 is not supported"),
        ({"repetition_penalty": -1.2, "do_sample": True}, "repetition_penalty = -1.2"),
        ({"length_penalty": 1.2, "do_sample": True}, "length_penalty = 1.2"),
        ({"do_sample": True, "top_p": 1.5}, "top_p = 1.5"),
        ({"max_gen_toks": 512}, "max_gen_toks = 512 must"),
        ({"max_gen_toks": 0}, "max_gen_toks = 0 must"),
        ({"max_gen_toks": "abc"}, "generation_kwargs: .*; set --gen_kwargs KEY=NUMBER"),
    ],
)
def test_settings_that_are_not_computed_are_refused(lm, settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        lm.generate_until(requests("generate_until", [("Tim", settings)]), disable_tqdm=True)


# ---------------------------------------------------------------------------------- chat template

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{"
    " raise_exception('no system') }}"
    "{% endif %}[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Who is Tim?"},
    {"role": "assistant", "content": "A boy."},
    {"role": "user", "content": "What has he? "},
]


@pytest.fixture
def chat_folder(tmp_path):
    folder = shutil.copytree(DEMO, tmp_path / "chat")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "chat_template": TEMPLATE
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def rendered(messages: list[dict], **options) -> str:
    names = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    return render_jinja_template([messages], chat_template=TEMPLATE, **options, **names)[0][0]


def test_chats_are_rendered_as_transformers_does(model, chat_folder, capsys):
    tokenizer = load_tokenizer(chat_folder)
    lm = QuickdraftLM(model, tokenizer, name="a/b")
    text = lm.apply_chat_template(CHAT)
    assert text == rendered(CHAT, add_generation_prompt=True) and lm.tokenizer_name == "a__b"
    ids = lm.tok_encode(text)
    assert ids == tokenizer.chat(CHAT) and ids.count(1) == 1 and ids.count(2) == 3
    for start in ("The answer is:", "The answer is: "):
        chat = [*CHAT, {"role": "assistant", "content": start}]
        text = lm.apply_chat_template(chat, add_generation_prompt=False)
        assert text == rendered(chat, continue_final_message=True)
        assert text.endswith("The answer is:")  # open: neither an end token nor a new turn
    assert chat[-1]["content"] == "The answer is: "  # the caller's messages are the caller's
    capsys.readouterr()
    for _ in range(2):
        assert lm.apply_chat_template(
            [{"role": "system", "content": "Be brief."}, *CHAT]
        ) == rendered(CHAT, add_generation_prompt=True)
    assert capsys.readouterr().err.count("without system messages") == 1
    leaves_out = (
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    tokenizer.template = ChatTemplate(leaves_out, {})
    lm.apply_chat_template([{"role": "system", "content": "Be brief."}, *CHAT])
    assert "without system messages: messages[0], role 'system'" in capsys.readouterr().err


# ------------------------------------------------------------------------------ the whole harness

CHOICES = [
    ("Once upon a time there was a little", ["girl", "tree house", "of"], 0),
    ("Tim and Sam went to the", ["is", "park", "blue"], 0),  # not what the model thinks
    ("The sun was very", ["hot", "table", "and he"], 0),
    ("She was so happy that she", ["the", "jumped", "green"], 1),
    ("They saw a big", ["dog", "ran", "to"], 2),  # nor this
]
TEXTS = [STORY, STORY[:500], "Tim ran home.\nHis mom was there."]
PROMPTS = ["Once upon a time", "The cat", "One day, Sam"]

SHARED = """
dataset_path: json
test_split: test
dataset_kwargs:
  data_files: {{test: {file}}}
  cache_dir: {cache}
metadata: {{version: 1.0}}
"""
TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "local_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
    "local_answer": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, model):
    """A folder of tasks, and what the harness must find, computed here."""
    tokenizer, tmp_path = load_tokenizer(DEMO), tmp_path_factory.mktemp("harness")
    answers = [
        text_before(plain(model, tokenizer, tokenizer.encode(prompt), Sampling(0.0), 24, 0), ["."])
        for prompt in PROMPTS
    ]
    answers[1] += " or not"
    rows = {
        "local_choice": [{"context": c, "choices": words, "label": n} for c, words, n in CHOICES],
        "local_rolling": [{"text": text} for text in TEXTS],
        "local_answer": [
            {"context": prompt, "answer": answer} for prompt, answer in zip(PROMPTS, answers)
        ],
    }
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, documents in rows.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(document) + "\n" for document in documents))
        text = f"task: {name}\n" + SHARED.format(file=file, cache=tmp_path / "cache") + TASKS[name]
        (folder / f"{name}.yaml").write_text(text)
    right = 0
    for context, choices, label in CHOICES:
        scores = [
            direct(model, *encoded(tokenizer, context, f" {choice}"))[0] for choice in choices
        ]
        right += scores.index(max(scores)) == label
    total, words = 0.0, 0
    for text in TEXTS:
        ids = [1, *tokenizer.encode(text, bos=False)]
        for begin in range(1, len(ids), 512):
            end = min(begin + 512, len(ids))
            total += direct(model, ids[max(0, end - 513) : end], end - begin)[0]
        words += len(text.split())
    return folder, {
        "acc": right / len(CHOICES),
        "perplexity": math.exp(-total / words),
        "exact": 2 / 3,
    }


def test_the_harness_finds_what_the_model_thinks(lm, tasks):
    folder, want = tasks
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(
        lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
    )["results"]
    assert 0 < want["acc"] < 1
    assert results["local_choice"]["acc,none"] == want["acc"]
    assert results["local_answer"]["exact_match,none"] == pytest.approx(want["exact"])
    # A word is some three tokens here: rounding in a token's log-likelihood counts that often.
    assert results["local_rolling"]["word_perplexity,none"] == pytest.approx(
        want["perplexity"], rel=3 * PER_TOKEN
    )


def run_main(monkeypatch, capsys, *arguments) -> tuple[int, str, list[str]]:
    """(exit status, stdout, the error lines) of the script in this process, with no tasks but the
    local ones."""
    # reading 14,000 others takes seconds
    manager = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)
    monkeypatch.setattr(
        sys, "argv", ["eval_lm", "--device", "cpu", "--dtype", "float32", *map(str, arguments)]
    )
    try:
        eval_lm.main()
        status = 0
    except SystemExit as exit:
        status = exit.code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, [line for line in err.splitlines() if line.startswith("error: ")]


def test_the_command_prints_the_table_and_writes_the_results(tasks, tmp_path, monkeypatch, capsys):
    folder, want = tasks
    file = tmp_path / "results.json"
    arguments = ("--checkpoint", DEMO, "--include_path", folder, "--output", file)
    status, out, lines = run_main(
        monkeypatch, capsys, "--tasks", "local_choice,local_answer", *arguments
    )
    assert (status, lines) == (0, [])
    assert (
        f"|acc        |↑  |{want['acc']:.4f}|" in out
        and f"|exact_match|↑  |{want['exact']:.4f}|" in out
    )
    results = json.loads(file.read_text())
    assert results["results"]["local_choice"]["acc,none"] == want["acc"]
    assert results["config"]["model_args"]["checkpoint"] == str(DEMO) and not list(
        tmp_path.glob("*.partial")
    )
    options = (
        "--limit",
        "2",
        "--num_fewshot",
        "1",
        "--quantize",
        "int8",
        "--draft",
        "ngram",
        "--max_length",
        "300",
    )
    status, _, lines = run_main(
        monkeypatch, capsys, "--tasks", "local_choice", *options, *arguments
    )
    results = json.loads(file.read_text())
    assert (status, lines, results["n-shot"]["local_choice"]) == (0, [], 1)
    assert (
        results["n-samples"]["local_choice"]["effective"] == 2 and results["config"]["limit"] == 2
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--tasks", "local_choise"), "no task 'local_choise'; nearest: local_choice"),
        (("--tasks", "local_choice,zzz"), "no task 'zzz'"),
        (
            ("--tasks", "local_choice", "--output", "/no/such/folder/file.json"),
            "--output /no/such/folder/file.json",
        ),
        (
            ("--tasks", "local_choice", "--max_length", "513"),
            "--max_length 513 must lie between 1 and the model's 512",
        ),
        (("--tasks", "local_choice", "--apply_chat_template"), "no chat template"),
        (("--tasks", "local_choice", "--checkpoint", "nowhere"), "nowhere: no such folder"),
        (
            ("--tasks", "local_choice", "--quantize_head", "nonsense"),
            "head nonsense (--quantize_head) needs a scheme",
        ),
        (
            ("--tasks", "local_choice", "--include_path", "nowhere"),
            "--include_path nowhere: no such folder",
        ),
        (("--tasks", "local_answer", "--gen_kwargs", "num_beams=3"), "num_beams = 3"),
    ],
)
def test_what_is_wrong_is_one_line(tasks, monkeypatch, capsys, arguments, message):
    status, out, lines = run_main(
        monkeypatch, capsys, "--checkpoint", DEMO, "--include_path", tasks[0], *arguments
    )
    assert status == 2 and out == "" and len(lines) == 1 and message in lines[0], lines


def test_without_the_harness_it_says_what_to_install(monkeypatch, capsys):
    for name in ("lm_eval", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["eval_lm", "--checkpoint", "x", "--tasks", "y"])
    with pytest.raises(SystemExit) as exit, pytest.warns(RuntimeWarning, match="scripts.eval_lm"):
        runpy.run_module("scripts.eval_lm", run_name="__main__")
    out, err = capsys.readouterr()
    assert (
        exit.value.code == 2 and out == "" and err.count("\n") == 1 and "pip install lm_eval" in err
    )
