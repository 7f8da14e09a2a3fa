"""With temperature, the joint law of the first tokens is the target's: chi-square on toy vocabularies.

Many seeded requests with one prompt run in one engine; the exact law comes from the reference model, so a
wrong filter, a biased residual or a random number used twice moves counts by tens of standard deviations.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.contract import drafters, models
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe, swapped
from tests.contract.reference import filtered_probs, greedy

SAMPLES = 800
TREES = [None, (2, 1, 3), (2, 2, 6), (2, 3, 9)]
P_VALUE = 1e-4  # the seeds are fixed, so a pass stays a pass


def exact_law(ref, prompt, length, **filters) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `length` tokens after the prompt."""
    law = {(): 1.0}
    for _ in range(length):
        longer = {}
        for sequence, mass in law.items():
            probs = filtered_probs(ref.run([*prompt, *sequence]).logits[-1], **filters).tolist()
            longer.update({(*sequence, token): mass * p for token, p in enumerate(probs) if p > 0})
        law = longer
    return law


def chi_square_p(observed: dict, expected: dict, total: int) -> float:
    """P-value of Pearson's test; cells expected fewer than 5 times are pooled. Wilson–Hilferty tail."""
    assert not set(observed) - set(expected), f"impossible: {sorted(set(observed) - set(expected))[:5]}"
    pooled, cells = [0.0, 0.0], []
    for key, probability in expected.items():
        if probability * total < 5:
            pooled = [pooled[0] + observed.get(key, 0), pooled[1] + probability * total]
        else:
            cells.append((observed.get(key, 0), probability * total))
    if pooled[1] > 0:
        cells.append(tuple(pooled))
    statistic = sum((have - want) ** 2 / want for have, want in cells)
    freedom = len(cells) - 1
    if freedom < 1:
        return 1.0
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    return 0.5 * math.erfc(z / math.sqrt(2))


def draw(engine, prompt, params, samples=SAMPLES, length=3):
    """`samples` outputs of `length` tokens, each request with a seed of its own."""
    each = [
        {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True, **params, "sampling_seed": seed}
        for seed in range(samples)
    ]
    results = engine.generate(input_ids=[prompt] * samples, sampling_params=each)
    return [tuple(result["output_ids"]) for result in results]


def check_law(ref, prompt, outputs, **filters):
    """First token, then the pairs (1, 2) and (2, 3), then all three together, against the exact law."""
    total, law = len(outputs), exact_law(ref, prompt, 3, **filters)
    for positions in ((0,), (0, 1), (1, 2), (0, 1, 2)):
        want, have = {}, {}
        for sequence, mass in law.items():
            key = tuple(sequence[i] for i in positions)
            want[key] = want.get(key, 0.0) + mass
        for sequence in outputs:
            key = tuple(sequence[i] for i in positions)
            have[key] = have.get(key, 0) + 1
        p = chi_square_p(have, want, total)
        assert p > P_VALUE, f"tokens {positions} do not follow the target: p = {p:.2g}"


def big(engines, spec, tree, **more):
    return engines.get(spec, tree=tree, max_running_requests=256, max_total_tokens=16384, **more)


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_joint_law_at_temperature_one(stage, engines, zoo, tree):
    """Of how often each token, pair and triple came: how probable counts so far from the law's are (p)."""
    spec, prompt = models.TOY8, [3, 1, 4, 1, 5]
    outputs = draw(big(engines, spec, tree), prompt, {}, 1600)
    check_law(zoo.ref(spec), prompt, outputs)
    assert len(set(outputs)) > 20


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_p": 0.7},
        {"top_k": 4},
        {"min_p": 0.15},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=lambda f: ",".join(f"{k}={v}" for k, v in f.items()),
)
@pytest.mark.parametrize("tree", [(2, 1, 3), (2, 2, 6)], ids=tree_id)
def test_filters(stage, engines, zoo, tree, filters):
    """No token outside the filter's set, and inside it the renormalised law."""
    spec, prompt = models.TOY16, [3, 1, 4, 1, 5, 9, 2, 6]
    check_law(zoo.ref(spec), prompt, draw(big(engines, spec, tree), prompt, filters), **filters)


@pytest.mark.parametrize(
    "filters",
    [{"top_p": 0.7}, {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.1}],
    ids=lambda f: ",".join(f),
)
def test_filters_plain(stage, engines, zoo, filters):
    spec, prompt = models.TOY16, [3, 1, 4, 1, 5, 9, 2, 6]
    check_law(zoo.ref(spec), prompt, draw(big(engines, spec, None), prompt, filters), **filters)


@pytest.mark.parametrize("tree", [(2, 1, 3), (2, 2, 6)], ids=tree_id)
def test_the_final_draw_has_a_number_of_its_own(stage, engines, zoo, tree):
    """A draft that is always the most probable token, so every rejection comes with a large used-up number.

    With one number for both draws the tokens in the lower part of the residual could never come out.
    """
    spec, prompt = models.TOY8, [3, 1, 4, 1, 5]
    ref, engine = zoo.ref(spec), big(engines, spec, tree)
    probe = Probe(engine)
    real = probe.draft_worker.draft

    def draft(batch, *args, **kwargs):
        verify_input = real(batch, *args, **kwargs)
        bs, links = len(batch.reqs), drafters.links_of(verify_input)
        tokens = verify_input.draft_token.view(bs, -1)
        for i, req in enumerate(batch.reqs):
            shape, paths = drafters.Tree(links[0][i], links[1][i]), {0: req.all_token_ids()}
            for row, kids in enumerate(shape.children):
                order = torch.argsort(ref.run(paths[row]).logits[-1], descending=True, stable=True).tolist()
                for kid, token in zip(kids, order, strict=False):
                    tokens[i, kid], paths[kid] = token, [*paths[row], token]
        return verify_input

    with swapped(probe.draft_worker, "draft", draft):
        outputs = draw(engine, prompt, {}, 1000)
    check_law(ref, prompt, outputs)


@pytest.mark.parametrize("tree", [(2, 1, 3), (2, 2, 6)], ids=tree_id)
def test_a_head_that_knows_nothing_does_not_bend_the_law(stage, engines, zoo, tree):
    spec, prompt = models.TOY8, [7, 0, 2]
    check_law(zoo.ref(spec), prompt, draw(big(engines, spec, tree, skill=0.0), prompt, {}))


@pytest.mark.parametrize("tree", [(2, 1, 3), (2, 2, 6)], ids=tree_id)
def test_poisoned_memory_does_not_bend_the_law(stage, engines, zoo, tree):
    """NaN in every free slot before every step: a buffer that is read before it is written would show."""
    spec, prompt = models.TOY8, [3, 1, 4, 1, 5]
    engine = big(engines, spec, tree)
    clean = draw(engine, prompt, {}, 200)
    engine.flush_cache()
    probe = Probe(engine)
    with probe.watch(before=probe.poison):
        assert draw(engine, prompt, {}, 200) == clean


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_greedy_requests_in_a_mixed_batch_stay_exact(stage, engines, zoo, tree):
    prompts = zoo.prompts((5, 9, 13, 7), 20)
    params = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"top_k": 1, "temperature": 1.0},
        {"temperature": 2.0},
    ]
    done = run(
        engines.get(tree=tree),
        prompts,
        [{**p, "max_new_tokens": 20} for p in params],
        ref=zoo.ref(),
        ref_head=zoo.ref_head() if tree else None,
    )
    for i in (0, 2):
        assert done.tokens[i] == zoo.r0(prompts[i], max_new_tokens=20)


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_a_seed_fixes_the_text(stage, engines, zoo, tree):
    """The same seed gives the same text whatever the batch; different seeds differ; unseeded requests too."""
    prompt, other = zoo.prompts((5, 9), 20)
    engine = engines.get(tree=tree)

    def text(seeds, prompts):
        return run(
            engine,
            prompts,
            [{"temperature": 1.0, **({} if s is None else {"sampling_seed": s})} for s in seeds],
            check=False,
        ).tokens

    alone = text([11], [prompt])[0]
    assert text([5, 11, 8], [other, prompt, prompt])[1] == alone
    assert len({tuple(t) for t in text(range(16), [prompt] * 16)}) > 12
    assert len({tuple(t) for t in text([None] * 16, [prompt] * 16)}) > 12


@pytest.mark.needs("spec_scheduler")
def test_two_engines_with_one_random_seed_agree(stage, engines, zoo):
    prompts = zoo.prompts((5, 9), 20)

    def outputs():
        with engines.fresh(tree=(3, 1, 4), random_seed=123) as engine:
            return run(engine, prompts, {"temperature": 1.0}).tokens

    assert outputs() == outputs()


@pytest.mark.needs("sampling_verify")
def test_acceptance_thresholds_below_one_are_lossy_and_accept_more(stage, engines, zoo):
    """With threshold 0 every draft is accepted; at the default nothing of this happens."""
    prompts, tree = zoo.prompts((5, 9), 20), (3, 1, 4)
    lossy = engines.get(tree=tree, speculative_accept_threshold_single=1e-6)
    done = run(lossy, prompts, {"temperature": 1.0, "max_new_tokens": 21})
    assert all(set(rounds) == {4} for rounds in done.rounds)
    done = run(engines.get(tree=tree), prompts, {"temperature": 1.0, "max_new_tokens": 21})
    assert any(count < 4 for rounds in done.rounds for count in rounds)


def test_the_oracle_itself():
    """The chi-square test notices the bias that v0.4.6 had and passes the true law."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(
        torch.multinomial(torch.tensor([0.5, 0.25, 0.25]), 4000, True, generator=generator)
    )
    law = {(i,): p for i, p in enumerate((0.5, 0.25, 0.25))}
    assert chi_square_p({(i,): int(n) for i, n in enumerate(counts)}, law, 4000) > P_VALUE
    assert chi_square_p({(0,): 2000, (2,): 2000}, law, 4000) < 1e-9
    assert chi_square_p({(0,): 2000, (1,): 880, (2,): 1120}, law, 4000) < 1e-4


def test_reference_filters_agree_with_brute_force():
    """top-p keeps the smallest set that reaches top_p, min-p what is at least a share of the best."""
    logits = torch.log(torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1]))
    assert filtered_probs(logits, top_p=0.7).nonzero().flatten().tolist() == [1, 2, 3]
    assert filtered_probs(logits, top_p=0.64).nonzero().flatten().tolist() == [1, 2]
    assert filtered_probs(logits, min_p=0.6).nonzero().flatten().tolist() == [1, 2]
    assert filtered_probs(logits, top_k=1).tolist() == [0, 1, 0, 0, 0]
    assert all(abs(float(filtered_probs(logits, top_k=k).sum()) - 1) < 1e-12 for k in range(1, 6))
    assert list(itertools.islice(filtered_probs(logits, temperature=0.5).tolist(), 1))[0] < 0.05


def test_reference_greedy_stops():
    class Fake:
        eos = frozenset({2})
        vocab = 4

        def run(self, tokens):
            row = torch.zeros(1, 4)
            row[0, (len(tokens)) % 4] = 5.0
            return type("Pass", (), {"logits": row})

    assert greedy(Fake(), [0], {"max_new_tokens": 9}).tokens == [1, 2]
    assert greedy(Fake(), [0], {"max_new_tokens": 5, "ignore_eos": True}).tokens == [1, 2, 3, 0, 1]
    assert greedy(Fake(), [0], {"max_new_tokens": 9, "stop_token_ids": [1]}).tokens == [1]
