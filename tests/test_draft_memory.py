"""decoding/memory.py: who learns from whom. After any history a request whose seed was used before
gets what a new engine gives it, and one whose seed is new what it got before there was a rule.
The last test has the law of a repeated seed."""

import types

import pytest
import torch
from steps import plan_k
from test_speculative import joint_law, p_value, tiny

import decoding.memory
from decoding.engine import Engine
from decoding.memory import Memories, MemoryPlan
from decoding.prefill import lacks_positions
from decoding.sampling import Sampling
from decoding.scheduler import Request
from drafts.base import Drafter, ModelDraft
from drafts.hybrid import HybridDraft
from drafts.ngram import NgramDraft
from drafts.suffix import END, IndexedText, SuffixDraft
from drafts.target_layers import layer_subset
from tests.attacks.law import NEAR_COSTS, SharedByAll

PROMPT = [1, 2, 3, 1, 2, 0, 3, 1, 2]
SAMPLED = Sampling(1)
DRAFTERS = {
    "model": lambda model: ModelDraft(tiny(7, n_layers=1, max_seq_length=96)),
    "layers": lambda model: ModelDraft(layer_subset(model, [0]), on_layers=[0]),
    "ngram": lambda model: NgramDraft(1),
    "suffix": lambda model: SuffixDraft(),
    "hybrid": lambda model: HybridDraft(
        SuffixDraft(), ModelDraft(tiny(7, n_layers=1, max_seq_length=96))
    ),
}


@pytest.fixture(scope="module")
def model():
    return tiny(3, max_seq_length=96)


def engine_of(model, kind: str, k: int | str, batch_size: int = 1, rule=Memories) -> Engine:
    drafter = DRAFTERS[kind](model)
    engine = Engine(model, batch_size, 90, drafter=drafter, speculate_k=k)
    engine.planner.costs = NEAR_COSTS
    engine.planner.memories = drafter.memories = rule()
    return engine


def add(engine: Engine, prompt: list[int], seed: int, sampling: Sampling = SAMPLED, n: int = 12):
    id = engine.add_request(prompt, sampling=sampling, max_new_tokens=n, seed=seed)
    return engine.requests[id]


def ask(engine: Engine, *args, **options) -> tuple[list[int], list]:
    """An answer, and how its rounds went."""
    request = add(engine, *args, **options)
    while engine.has_unfinished():
        engine.step()
    return request.tokens, request.token_records


def quoted(engine: Engine) -> None:
    """Seed 5 answers, and other requests quote the answer."""
    answer, _ = ask(engine, PROMPT, 5)
    ask(engine, PROMPT + answer, 6)
    ask(engine, PROMPT + answer, 7, Sampling(0))


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize(
    "kind, k, rule, is_new",
    [
        *((kind, "auto", Memories, True) for kind in DRAFTERS),
        ("suffix", 3, Memories, True),
        ("hybrid", 3, Memories, True),
        ("model", "auto", SharedByAll, False),
        ("suffix", 3, SharedByAll, False),
        ("hybrid", "auto", SharedByAll, False),
    ],
)
def test_a_seed_that_was_used_begins_as_in_a_new_engine(model, kind, k, rule, is_new):
    """The same tokens by the same rounds, whatever was answered and quoted before. The second
    answers of two new engines are compared, because a seed's first shares its memory."""
    engine = engine_of(model, kind, k, rule=rule)
    quoted(engine)
    new = engine_of(model, kind, k, rule=rule)
    add(new, PROMPT, 5, n=1)
    new.abort(new.scheduler.next_id - 1)
    assert (ask(engine, PROMPT, 5) == ask(new, PROMPT, 5)) == is_new


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("k", ["auto", 3])
def test_a_seed_that_is_new_shares_as_before(model, kind, k):
    """With other seeds, and greedy, all requests go as if there were no rule."""
    texts = []
    for rule in (Memories, SharedByAll):
        engine = engine_of(model, kind, k, 3, rule)
        rows = [
            add(engine, PROMPT[: 3 + seed], seed, Sampling(0) if seed == 4 else SAMPLED, 20)
            for seed in range(6)
        ]
        while engine.has_unfinished():
            engine.step()
        texts.append([(row.tokens, row.token_records) for row in rows])
    assert texts[0] == texts[1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule, are_alone", [(Memories, True), (SharedByAll, False)])
@pytest.mark.parametrize("kind", ["model", "suffix", "hybrid"])
def test_rows_of_one_seed_choose_their_lengths_alone(model, kind, rule, are_alone):
    """Rows of a file share a seed. Each gets the text and the rounds that it gets alone, whatever
    the rows next to it do: one K of a batch would tell each row of the others' numbers."""
    prompts = [PROMPT[:n] for n in (3, 5, 9)]

    def rounds(rows: list[list[int]]) -> dict:
        engine = engine_of(model, kind, "auto", 3, rule)
        add(engine, PROMPT, 5, n=1)
        engine.abort(0)
        requests = {tuple(prompt): add(engine, prompt, 5, n=30) for prompt in rows}
        while engine.has_unfinished():
            engine.step()
        return {
            prompt: (request.tokens, [(record.index, record.k) for record in request.token_records])
            for prompt, request in requests.items()
        }

    alone = rounds(prompts[:1]) | rounds(prompts[1:2]) | rounds(prompts[2:])
    assert (rounds(prompts) == alone) == are_alone


def test_figures_are_made_once():
    made = []

    class Figures:
        def __init__(self):
            made.append(self)

    memory = Memories().shared
    assert memory.of(Figures) is memory.of(Figures) and len(made) == 1


def test_who_shares(monkeypatch):
    memories = Memories()
    running = []

    def assigned(seed: int, temperature: float = 1.0) -> Request:
        request = Request(len(running), [1], Sampling(temperature), 9, seed=seed)
        memories.assign(request, running)
        running.append(request)
        return request

    first = assigned(1)
    assert first.memory is memories.shared
    assert assigned(2).memory is memories.shared
    assert assigned(1, 0.0).memory is memories.shared, "greedy text needs no numbers"
    second = assigned(1)
    assert first.memory is not memories.shared, "it leaves when a second one comes"
    assert len({first.memory, second.memory, assigned(1).memory, memories.shared}) == 4
    running.clear()
    assert not assigned(1).memory.is_shared, "a seed stays used"
    monkeypatch.setattr(decoding.memory, "MAX_SEEDS", len(memories.seeds))
    assert assigned(3).memory is assigned(4).memory is memories.shared
    assert len(memories.seeds) == 2 and assigned(1).memory is memories.shared
    running.clear()
    assert assigned(4).memory is not memories.shared, "it was used before"
    assert assigned(5).memory is memories.shared
    assert [*memories.seeds] == [4, 5], "the seed whose last use is the longest ago is forgotten"


def test_a_draft_ends_at_its_rows_limit(model):
    """Rows of one round that may draft 0, 1 and 3 tokens."""
    engine = engine_of(model, "layers", 3, 3)
    rows = [add(engine, PROMPT, seed, n=30) for seed in range(3)]
    while len(engine.scheduler.decoding()) < 3:
        engine.step()
    limits = dict(zip(rows, (0, 1, 3)))
    plan_k(engine, lambda requests: limits[requests[0]])
    for row in rows:
        row.memory = decoding.memory.Memory(is_shared=False)
    engine.step()
    assert [row.token_records[-1].k for row in rows] == [0, 1, 3]
    assert engine.batch.num_drafted.tolist() == [0, 1, 3]


def test_a_drafts_context_ends_by_its_own_rows_limit():
    """Row 0 drafts two tokens and row 1 eight, from the same position; both texts have room for the
    former alone."""
    drafter = ModelDraft(tiny(7, n_layers=1, max_seq_length=20))
    Engine(tiny(3, max_seq_length=96), 2, 90, drafter=drafter, speculate_k=8)
    drafter.probs.fill_(1.0)
    limits = torch.tensor([2, 8])
    batch = types.SimpleNamespace(pos=torch.tensor([15, 15]), draft_limit=limits)
    assert drafter.proposal(batch, 8).q.amax(dim=(1, 2)).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("may_draft", [True, False])
def test_a_request_without_drafts_catches_up_with_the_others_of_its_step(may_draft):
    """What a round counts as computed in the draft's cache must be there, whoever drafts."""
    request = types.SimpleNamespace(is_draft_behind=True, may_draft=may_draft, num_positions=9)
    engine = types.SimpleNamespace(drafter=types.SimpleNamespace(max_positions=64))
    plan = MemoryPlan(None, [request], 3, expected=[None], num_first_inputs=2)
    assert lacks_positions(engine, [plan])


def test_an_engine_made_later_knows_the_seeds_of_its_drafter(model):
    drafter: Drafter = SuffixDraft()
    for is_shared in (True, False):
        engine = Engine(model, 1, 40, drafter=drafter, speculate_k=2)
        request = add(engine, PROMPT, 5)
        assert request.memory.is_shared == is_shared
        while engine.has_unfinished():
            engine.step()


class SeedsOfTokens(SuffixDraft):
    """The rule before: the pool hides only tokens under the seed of the request that brought them,
    the end of its prompt included."""

    answers = ()

    def remember(self, request):
        del self.texts[request]
        ids = [*request.prompt[-self.depth :], *request.tokens, END]
        self.answers = [*self.answers, (request.noise_seed, ids)]

    def best_continuation(self, text, request):
        self.pool = [IndexedText()]
        for seed, ids in self.answers:
            if seed != request.noise_seed:
                self.pool[0].extend(ids)
        return super().best_continuation(text, request)


@pytest.mark.attack
@pytest.mark.parametrize("rule", [Memories, SharedByAll])
def test_a_quoted_answer_keeps_the_law_of_its_seed(rule):
    """A seed answers, another one's prompt quotes the answer, and the first answers again: over 800
    seeds the last answer has the exact joint law (p > 1e-6, the probability of a false alarm), and
    by the rule before it has not (p < 1e-12)."""
    model, prompt, n = tiny(3), [1, 2, 3, 1, 2], 4
    drafter = SuffixDraft() if rule is Memories else SeedsOfTokens()
    engine = Engine(model, 1, 30, drafter=drafter, speculate_k=3)
    counts = torch.zeros(4**n)
    for seed in range(800):
        engine.planner.memories = drafter.memories = rule()
        drafter.pool, drafter.answers = [IndexedText(), IndexedText()], ()
        answer, _ = ask(engine, prompt, seed, n=n)
        ask(engine, prompt + answer, 10**6 + seed, n=2)
        tokens, _ = ask(engine, prompt, seed, n=n)
        counts[sum(id * 4**i for i, id in enumerate(reversed(tokens)))] += 1
    p = p_value(counts, joint_law(model, prompt, n, SAMPLED))
    assert p > 1e-6 if rule is Memories else p < 1e-12
