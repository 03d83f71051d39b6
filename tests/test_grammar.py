"""Answers under a grammar: valid JSON that obeys its schema with every draft, the exact law, and
neighbours untouched.

Oracles: Python's json, a check of the schema by hand, the same request without a draft, all texts
enumerated.
"""

import itertools
import json
import sys

import pytest
import torch
from conftest import ROOT
from test_speculative import LONG_PROMPT, p_value, tiny

import decoding.readback as timing
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.grammar import Grammar, JsonGrammars
from decoding.sampling import Sampling
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from loading import load_drafter, load_model, load_tokenizer

pytestmark = pytest.mark.attack
DEMO = ROOT / "checkpoints" / "demo"
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age", "likes"],
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["cats", "dogs", "the park"]}, "maxItems": 2},
    },
}
SHORT = {
    "anyOf": [
        {"const": "a little dog"},
        {"type": "integer", "minimum": 10, "maximum": 30},
        {"type": "null"},
    ]
}
SPECS = ("none", "model", "pard", "ngram", "suffix", "layers:0-2", "quantized:int8")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def model():
    return load_model(DEMO, dtype=torch.float32, pack=False)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return JsonGrammars(tokenizer, tokenizer.stop_ids)


def drafter_of(spec: str, model, tokenizer):
    folders = {"model": f"{DEMO}-draft", "pard": f"{DEMO}-pard"}
    return None if spec == "none" else load_drafter(folders.get(spec, spec), model, tokenizer)


def answers(
    engine: Engine, tokenizer, rows: list[tuple], new: int = 120, likely: tuple = ()
) -> list:
    """The requests (prompt, temperature, seed, grammar or None) of these rows, finished."""
    requests, bias = [], tuple((id, 30.0) for id in likely)
    for prompt, temperature, seed, grammar in rows:
        id = engine.add_request(
            tokenizer.encode(prompt),
            sampling=Sampling(temperature, logit_bias=bias),
            max_new_tokens=new,
            stop_ids=tokenizer.stop_ids,
            seed=seed,
            grammar=grammar and grammar.copy(),
        )
        requests.append(engine.requests[id])
    while engine.has_unfinished():
        engine.step()
    return requests


def obeys(text: str) -> bool:
    person = json.loads(text)
    return (
        person.keys() == {"name", "age", "likes"}
        and len(person["name"]) <= 12
        and 0 <= person["age"] <= 99
        and isinstance(person["age"], int)
        and len(person["likes"]) <= 2
        and set(person["likes"]) <= {"cats", "dogs", "the park"}
    )


@pytest.fixture(scope="module")
def rows(grammars):
    person, short = grammars.compile(SCHEMA), grammars.compile(SHORT)
    return [
        ("Tom said", 0, 0, person),
        ("Once upon a time", 0, 0, None),
        ("Lily:", 1, 3, person),
        ("One day", 1, 4, None),
        ("A dog", 1, 5, short),
        ("The park", 0, 6, short),
    ]


@pytest.fixture(scope="module")
def alone(model, tokenizer, rows):
    """The tokens of each row alone, without a draft."""
    engine = Engine(model, 1, 200)
    return [answers(engine, tokenizer, [row])[0].tokens for row in rows]


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize(
    "spec",
    [spec if spec is SPECS[0] else pytest.param(spec, marks=pytest.mark.attack) for spec in SPECS],
)
def test_json_obeys_its_schema_under_every_draft_beside_free_text(
    spec, lag, model, tokenizer, rows, alone, monkeypatch
):
    """Greedy rows equal the same rows alone and undrafted. A host that reads steps late, as a GPU's
    does, must not fill masks from old tokens."""
    if lag and spec not in ("none", "model"):
        pytest.skip("the host is the same for all drafts")
    monkeypatch.setattr(timing, "host_lag", lambda device: lag)
    if spec.startswith("quantized"):
        # a model that has run may be packed
        model = load_model(DEMO, dtype=torch.float32, pack=False)
    engine = Engine(model, 4, 200, drafter=drafter_of(spec, model, tokenizer), speculate_k=3)
    for order in (1, -1):  # slots whose last request had another grammar, or none
        requests = answers(engine, tokenizer, rows[::order])[::order]
        texts = [tokenizer.decode(request.tokens) for request in requests]
        for (_, temperature, _, grammar), request, tokens in zip(
            rows, requests, alone, strict=True
        ):
            assert request.tokens == tokens or (temperature and spec != "none")
            assert request.finish_reason == "stop" or grammar is None
        assert obeys(texts[0]) and obeys(texts[2])
        assert all(json.loads(text) in ("a little dog", None, *range(10, 31)) for text in texts[4:])
        assert spec == "none" or any(step.k for request in requests for step in request.steps)


def test_an_end_inside_the_json_is_length_and_any_object_is_an_object(model, tokenizer, grammars):
    engine = Engine(model, 2, 300, drafter=NgramDraft(2), speculate_k=3)
    rows = [
        ("Tom said", 0, 0, grammars.compile(SCHEMA)),
        ("Tom said", 1, 1, grammars.compile(SCHEMA)),
    ]
    for request in answers(engine, tokenizer, rows, new=6):
        text = tokenizer.decode(request.tokens)
        assert (
            request.finish_reason == "length" and len(request.tokens) == 6 and text.startswith("{")
        )
        with pytest.raises(ValueError):
            json.loads(text)
    anything = grammars.compile({"type": "object"})
    closing = [
        id
        for id, piece in enumerate(tokenizer.pieces())
        if piece in (b"}", b'"}', b'"', b":", b"0")
    ]
    for request in answers(
        engine, tokenizer, [("Tom:", 1, seed, anything) for seed in range(4)], 200, closing
    ):
        assert request.finish_reason == "stop" and isinstance(
            json.loads(tokenizer.decode(request.tokens)), dict
        )


# ---------------------------------------------------------------------------------------- the law


class AfterToken:
    """A grammar that allows after each token the ids of one row of `allowed` (V + 1, V); the last
    row begins."""

    def __init__(self, allowed: torch.Tensor):
        self.allowed = allowed

    def masks(self, tokens, draft_tokens=()):
        previous = [tokens[-1] if tokens else -1]
        for id in draft_tokens:
            if not self.allowed[previous[-1], id]:
                break
            previous.append(id)
        bits = self.allowed[previous].long() << torch.arange(self.allowed.size(1))
        return bits.sum(1, keepdim=True).int()


def random_masks(seed: int, V: int = 4) -> torch.Tensor:
    allowed = torch.rand(V + 1, V, generator=torch.Generator().manual_seed(seed)) < 0.6
    allowed[:, 0] = True
    return allowed


@pytest.mark.parametrize(
    "draft",
    ["none", *(pytest.param(name, marks=pytest.mark.attack) for name in ("model", "ngram"))],
)
def test_masked_sequences_have_the_masked_models_law(draft):
    """Exact probabilities of all texts of three tokens, against 1,500 rows. Control: the unmasked
    law is refused."""
    model, n, B = tiny(1), 3, 1500
    V = model.config.vocab_size
    allowed = random_masks(0)
    drafter = {"none": None, "model": ModelDraft(tiny(2)), "ngram": NgramDraft(1)}[draft]
    engine = Engine(model, B, len(LONG_PROMPT) + n, drafter=drafter, speculate_k=2)
    requests = []
    for seed in range(B):
        sampling = Sampling(1.0)
        id = engine.add_request(
            LONG_PROMPT, sampling=sampling, max_new_tokens=n, seed=seed, grammar=AfterToken(allowed)
        )
        requests.append(engine.requests[id])
    while engine.has_unfinished():
        engine.step()
    tails = torch.tensor(list(itertools.product(range(V), repeat=n)))  # (V^n, n)
    tokens = torch.cat((torch.tensor(LONG_PROMPT).expand(len(tails), -1), tails), dim=1)
    with torch.inference_mode():
        # (V^n, n, V)
        logits = model(tokens, torch.arange(tokens.size(1)))[:, len(LONG_PROMPT) - 1 : -1].double()
    previous = torch.cat((torch.full((len(tails), 1), -1), tails[:, :-1]), dim=1)

    def law(logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1).gather(2, tails[..., None])[..., 0].prod(1)

    ids = torch.tensor([request.tokens for request in requests])  # (B, n)
    counts = torch.bincount((ids * V ** torch.arange(n).flip(0)).sum(1), minlength=V**n)
    assert p_value(counts, law(logits.masked_fill(~allowed[previous], -torch.inf))) > 1e-6
    assert p_value(counts, law(logits)) < 1e-12


@pytest.mark.compiled
def test_grammars_come_and_go_without_compiling():
    """One after the other in a slot, pairs with penalties of their own, the second of each pair
    with masks: all as eager."""
    model, tokens = tiny(1), {}
    for compile in (False, True):
        engine = Engine(
            model,
            1,
            30,
            compile=compile,
            compile_prompts=False,
            drafter=NgramDraft(1),
            speculate_k=2,
        )
        if compile:
            engine.warm_up("penalized")
        with torch.compiler.set_stance("fail_on_recompile" if compile else "default"):
            requests = []
            for number in range(6):
                sampling = Sampling(
                    0, repetition_penalty=1.1 + number // 2 / 10, presence_penalty=number // 2 / 4
                )
                id = engine.add_request(
                    [1, 2, 3],
                    sampling=sampling,
                    max_new_tokens=3 + number,
                    seed=number,
                    grammar=AfterToken(random_masks(number)) if number % 2 else None,
                )
                requests.append(engine.requests[id])
            while engine.has_unfinished():
                engine.step()
        tokens[compile] = [request.tokens for request in requests]
    assert tokens[True] == tokens[False] and tokens[True][4] != tokens[True][5][:7]


# --------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "objct"}, "Invalid type: objct"),
        ({"type": "string", "pattern": "("}, "regex parse error"),
        ({"$ref": "http://a.example/b"}, "http://a.example/b"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
        ({"$ref": "#"}, "it allows no text"),
    ],
)
def test_a_schema_that_cannot_be_obeyed_is_refused_in_one_line(schema, message, grammars):
    with pytest.raises(ValueError, match=r"^the schema: ") as caught:
        grammars.compile(schema)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def optional_properties(num_properties: int) -> dict:
    properties = {f"p{number}": {"type": "string"} for number in range(num_properties)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def test_a_grammar_that_fails_says_so_in_the_librarys_words(grammars):
    grammar = grammars.compile(optional_properties(600))
    assert grammar.error is None
    assert not grammar.masks(grammars("{"))[0].any()
    assert "max is 2000" in str(grammar.error) and "\n" not in str(grammar.error)


def test_a_grammar_that_fails_ends_its_own_request_alone(model, tokenizer, grammars, rows, alone):
    class Broken(Grammar):
        def mask(self):
            return super().mask() * (self.num_consumed < 4)

    broken = grammars.compile(SCHEMA)
    broken.copy = lambda: Broken(broken.matcher.deep_copy(), broken.stop_ids)
    requests = answers(Engine(model, 3, 200), tokenizer, [rows[0], ("Tom", 0, 0, broken), rows[1]])
    assert requests[1].finish_reason == "error" and "not finite" in str(requests[1].error)
    assert [requests[0].tokens, requests[2].tokens] == alone[:2]


def test_an_end_that_only_the_model_has_is_no_tokens(tokenizer, grammars):
    """config.json may name an id beyond the tokenizer's vocabulary."""
    ends = tokenizer.stop_ids | {tokenizer.vocab_size + 5}
    masks = [
        made.compile(SCHEMA).masks([])[0] for made in (grammars, JsonGrammars(tokenizer, ends))
    ]
    assert torch.equal(*masks)
    with pytest.raises(UserError, match="need an end token"):
        JsonGrammars(tokenizer, {tokenizer.vocab_size + 5})


def test_a_request_whose_grammar_fails_has_its_error(model, grammars):
    engine = Engine(model, 1, 200)
    grammar = grammars.compile(optional_properties(600))
    id = engine.add_request([5], sampling=Sampling(0), max_new_tokens=20, grammar=grammar)
    request = engine.requests[id]
    while engine.has_unfinished():
        engine.step()
    assert str(request.error) == str(grammar.error) and "the schema" in str(request.error)


def test_without_the_library_or_an_end_one_line_says_what_helps(tokenizer, monkeypatch):
    with pytest.raises(ValueError, match=r"end token.*--ignore_eos"):
        JsonGrammars(tokenizer, frozenset())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="pip install llguidance"):
        JsonGrammars(tokenizer, tokenizer.stop_ids)
