"""What the draft model is fed and what it leaves behind: pairs, positions, KV of accepted tokens, rows after
a filter.

A wrong answer here leaves the text right and only costs acceptance, so the text proves nothing.
"""

from __future__ import annotations

import pytest
import torch

from tests.contract import drafters
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe
from tests.contract.reference import simulate

SHAPES = [(3, 1, 4), (3, 2, 8), (3, 4, 8)]
pytestmark = pytest.mark.needs("spec_scheduler")


def test_packed_prefill_of_three_prompts(stage, engines, zoo):
    """Prompts of different lengths in one prefill: each is shifted by one on its own."""
    prompts, checked = zoo.prompts((4, 11, 7), 6), []

    def after(probe):
        if probe.scheduler.last_batch.forward_mode.is_extend():
            assert len(probe.running()) == 3
            probe.check_draft_kv(zoo.ref_head())
            checked.append(True)

    run(engines.get(tree=(3, 1, 4)), prompts, {"max_new_tokens": 6}, after=after)
    assert checked == [True]


@pytest.mark.parametrize("chunk", [None, 8, 7, 1])
def test_pairs_of_the_prefill(stage, engines, zoo, chunk):
    """Pair j is (seq[j+1], target feature[j]) for every j of every chunk; the last token is
    the sampled one.
    """
    prompt = zoo.prompts((19,), 4)[0]
    engine = engines.get(tree=(2, 1, 3), chunked_prefill_size=chunk)
    probe, pairs = Probe(engine), {}

    def see(args, kwargs, result):
        batch = args[0]
        if batch.forward_mode.is_extend():
            hidden = batch.spec_info.hidden_states
            for token, position, feature in zip(batch.input_ids, batch.positions, hidden, strict=True):
                pairs[int(position)] = (int(token), feature.clone())

    with probe.spy(probe.draft_runner, "forward", see):
        out = run(engine, [prompt], {"max_new_tokens": 1}).tokens[0]
    sequence = prompt + out
    assert {p: token for p, (token, _) in pairs.items()} == {p: sequence[p + 1] for p in range(len(prompt))}
    want = zoo.ref().run(prompt).hidden
    for position, (_, feature) in pairs.items():
        torch.testing.assert_close(feature, want[position], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_positions_of_the_draft_forwards(stage, engines, zoo, tree):
    """Forward i of a round runs at S + i, the position its token has in a teacher-forced pass."""
    prompts = zoo.prompts((5, 9), 12)
    engine = engines.get(tree=tree)
    probe, seen, rows = Probe(engine), {}, {}

    def see(args, kwargs, result):
        batch = args[0]
        if batch.forward_mode.is_decode():
            places = batch.positions.view(-1, tree[1]).tolist()
            for row, place in zip(batch.req_pool_indices.tolist(), places, strict=False):
                seen.setdefault(row, []).append(place)

    def before(probe):
        rows.update({req.rid: req.req_pool_idx for req in probe.running()})

    with probe.spy(probe.draft_runner, "forward", see):
        done = run(engine, prompts, {"max_new_tokens": 12}, before=before)
    for i, (prompt, rounds) in enumerate(zip(prompts, done.rounds, strict=True)):
        starts = [len(prompt) + sum(rounds[:n]) for n in range(len(rounds))]
        want = [[start + level] * tree[1] for start in starts for level in range(tree[0] - 1)]
        assert want and seen[rows[f"r{i}"]][: len(want)] == want


@pytest.mark.parametrize("tree", [(4, 1, 5), (4, 4, 16)], ids=tree_id)
def test_every_request_drafts_as_if_alone(stage, engines, zoo, tree):
    """In a batch each request's tree is the reference's for its own text, token by token."""
    prompts, rounds = zoo.prompts((5, 9, 7), 12), []
    # The device may be ahead of what a request has on the host.
    texts = [[*p, *zoo.r0(p, max_new_tokens=24, ignore_eos=True)] for p in prompts]

    def see(args, kwargs, result):
        reqs, lens = args[0].reqs, result.step.seq_lens.tolist()
        rounds.append(len(reqs))
        for req, length, tokens in zip(reqs, lens, result.draft_token[: len(reqs)].tolist(), strict=False):
            text = texts[int(req.rid[1:])][: length + 1]
            assert tokens == zoo.ref_head().grow(text, *tree)[0], req.rid

    probe = Probe(engines.get(tree=tree))
    with probe.spy(probe.draft_worker, "draft", see):
        run(probe.engine, prompts, {"max_new_tokens": 12})
    assert max(rounds) == 3


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("tree", [(3, 1, 4), (4, 2, 9), (4, 4, 16)], ids=tree_id)
@pytest.mark.parametrize("last_sibling", [False, True])
def test_kv_after_scripted_accepts(stage, engines, zoo, tree, page, last_sibling):
    """After every verification the KV of both models is that of a fresh pass, for 0 … all accepted.

    With `last_sibling` the accepted path avoids first children, so accepted rows are not the first rows.
    """
    prompts, new = zoo.prompts((6, 9, 12), 30), 30
    script = [0, 3, 1, 4, 0, 2, 4]
    engine = engines.get(tree=tree, page_size=page)
    with drafters.scripted(Probe(engine), zoo.ref(), script, last_sibling=last_sibling) as record:
        done = run(engine, prompts, {"max_new_tokens": new}, ref=zoo.ref(), ref_head=zoo.ref_head())
    assert done.tokens == [zoo.r0(p, max_new_tokens=new) for p in prompts]
    for i, rounds in enumerate(done.rounds):
        wanted = [count + 1 for rid, count in record if rid == f"r{i}"]
        wanted = wanted[: len(rounds)]  # a round more may have been under way when the end was seen
        assert rounds[:-1] == wanted[:-1] and rounds[-1] <= wanted[-1], "a round accepts what it was given"
    assert {0, 1, 2, 3} <= {count for _, count in record}


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_perfect_and_never(stage, engines, zoo, tree):
    """Everything accepted (the last draft's KV has to be filled in) and nothing accepted."""
    prompts, new = zoo.prompts((6, 9), 25), 25
    want = [zoo.r0(p, max_new_tokens=new) for p in prompts]
    engine = engines.get(tree=tree)
    with drafters.perfect(Probe(engine), zoo.ref()) as record:
        done = run(engine, prompts, {"max_new_tokens": new}, ref=zoo.ref(), ref_head=zoo.ref_head())
    assert done.tokens == want
    if tree[1] == 1:
        assert [rounds[:-1] for rounds in done.rounds] == [[4] * 5 + [4] * (len(r) - 6) for r in done.rounds]
    assert max(count for _, count in record) == tree[0]
    with drafters.never(Probe(engine), zoo.ref()):
        done = run(engine, prompts, {"max_new_tokens": new}, ref=zoo.ref(), ref_head=zoo.ref_head())
    assert done.tokens == want
    assert done.rounds == [[1] * (new - 1)] * 2
    assert all(result["meta_info"]["spec_verify_ct"] == new - 1 for result in done.results)


def test_verify_logits_of_every_node(stage, engines, zoo):
    """Each node sees its own ancestors and nothing else: its logits are those of plain
    decoding of its path.
    """
    prompts, tree = zoo.prompts((5, 9), 12), (3, 4, 16) if stage.has("tree") else stage.shape
    engine = engines.get(tree=tree)
    probe, trees, compared = Probe(engine), [], []

    def drafted(args, kwargs, result):
        batch, n = args[0], tree[2]
        links = drafters.links_of(result)
        tokens = result.draft_token.view(-1, n).tolist()
        trees.append(
            [
                (drafters.up_to_the_root(zoo.ref(), req, result, i), t, drafters.Tree(a, b))
                for i, (req, t, a, b) in enumerate(zip(batch.reqs, tokens, *links, strict=True))
            ]
        )

    def verified(args, kwargs, result):
        if args[0].forward_mode.name != "TARGET_VERIFY":
            return
        logits = result.next_token_logits.view(-1, tree[2], zoo.ref().vocab)
        for (sequence, tokens, shape), rows in zip(trees.pop(), logits, strict=True):
            paths = {0: sequence}
            assert tokens[0] == sequence[-1]
            for row, kids in enumerate(shape.children):
                for kid in kids:
                    paths[kid] = [*paths[row], tokens[kid]]
            assert len(paths) == tree[2], "a node hangs on nothing"
            for row, path in paths.items():
                torch.testing.assert_close(
                    rows[row].float(), zoo.ref().run(path).logits[-1], atol=2e-4, rtol=1e-4
                )
                compared.append(row)

    with probe.spy(probe.draft_worker, "draft", drafted), probe.spy(probe.target_runner, "forward", verified):
        run(engine, prompts, {"max_new_tokens": 12}, return_logprob=True)
    assert len(compared) >= 6 * tree[2]


@pytest.mark.needs("tree")
def test_a_larger_tree_accepts_no_less(stage, engines, zoo):
    """Adding candidates to a tree of the same depth never lowers what is accepted from the same prefix."""
    prompt = zoo.prompts((9,), 40)[0]
    output = zoo.r0(prompt, max_new_tokens=40)
    small, large = (simulate(zoo.ref_head(), prompt, output, 3, 4, n) for n in (4, 37))
    assert len(large) <= len(small)
    for draft_tokens, want in ((4, small), (37, large)):
        done = run(engines.get(tree=(3, 4, draft_tokens)), [prompt], {"max_new_tokens": 40})
        assert done.rounds == [want]


def test_filter_keeps_every_row_with_its_request(stage, engines, zoo):
    """Requests that end at different times, some right after prefill, one still in chunks: row i stays
    request i.

    `check_lengths` compares verified_id with each request's last token, and the rounds with the simulation,
    after every step.
    """
    prompts = zoo.prompts((5, 9, 4, 12, 41), 20)
    limits = [1, 20, 1, 7, 12]
    engine, tree = engines.get(tree=stage.shape, chunked_prefill_size=32), stage.shape
    done = run(
        engine, prompts, [{"max_new_tokens": n} for n in limits], ref=zoo.ref(), ref_head=zoo.ref_head()
    )
    assert done.tokens == [zoo.r0(p, max_new_tokens=n) for p, n in zip(prompts, limits, strict=True)]
    assert done.rounds == [
        simulate(zoo.ref_head(), p, o, *tree) for p, o in zip(prompts, done.tokens, strict=True)
    ]


@pytest.mark.parametrize("limits", [[3, 20, 9, 20, 6], [20, 3, 20, 3, 20], [4, 8, 12, 16, 20]])
def test_rows_after_requests_end_in_any_order(stage, engines, zoo, limits):
    """Tokens and rounds are those of each request alone, whoever leaves the batch before it."""
    prompts, tree = zoo.prompts((5, 9, 4, 12, 8), 20), stage.shape
    done = run(
        engines.get(tree=tree),
        prompts,
        [{"max_new_tokens": n} for n in limits],
        ref=zoo.ref(),
        ref_head=zoo.ref_head(),
    )
    assert done.tokens == [zoo.r0(p, max_new_tokens=n) for p, n in zip(prompts, limits, strict=True)]
    assert done.rounds == [
        simulate(zoo.ref_head(), p, o, *tree) for p, o in zip(prompts, done.tokens, strict=True)
    ]


def test_ids_are_64_bit_at_every_entry_of_the_draft(stage, engines, zoo):
    engine = engines.get(tree=stage.shape)
    probe, kinds = Probe(engine), set()

    def see(args, kwargs, result):
        kinds.update({args[0].input_ids.dtype, args[0].positions.dtype, args[0].out_cache_loc.dtype})

    with probe.spy(probe.draft_runner, "forward", see):
        run(engine, zoo.prompts((5, 9), 12), {"max_new_tokens": 12})
    assert kinds == {torch.int64}


def test_one_step_never_drafts_by_decoding(stage, engines, zoo):
    """steps = 1: the only level comes from the draft extend, so no draft decode forward is ever run."""
    engine = engines.get(tree=(1, 1, 2))
    probe, modes = Probe(engine), []
    with probe.spy(
        probe.draft_runner, "forward", lambda args, kw, result: modes.append(args[0].forward_mode.name)
    ):
        done = run(engine, zoo.prompts((5, 9), 12), {"max_new_tokens": 12}, ref_head=zoo.ref_head())
    assert done.tokens == [zoo.r0(p, max_new_tokens=12) for p in zoo.prompts((5, 9), 12)]
    assert set(modes) == {"EXTEND", "DRAFT_EXTEND"}
