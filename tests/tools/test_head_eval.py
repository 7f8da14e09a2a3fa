"""The simulation of rounds against a brute force that redoes everything from the tokens, node by node."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.tools.head_helpers import fed_states, tiny_setting
from tools.bench.configurations import read_shape
from tools.bench.stages_door import BadInput
from tools.models.head_data import Text
from tools.models.head_eval import Rounds, rows_of, simulate
from tools.models.head_model import load_head, rotary_table, save_head
from tools.models.head_report import check_engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3"])
def setting(request, tmp_path_factory):
    # Such heads pass the hidden state on, so that some drafts are right.
    target, head = tiny_setting(tmp_path_factory.mktemp("target"), request.param, seed=3, std=0.05)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 61, n).tolist() for n in (5, 9, 7)]
    lengths = np.array([len(p) for p in prompts])
    rows = [row[: n + m] for row, n, m in zip(target.greedy(prompts, 12), lengths, (12, 9, 10), strict=True)]
    if request.param == "EAGLE3":  # it hardly ever says what this target does, so here an answer is its own
        with torch.no_grad():
            rows = [
                drafted(head, target, np.array(prompt), len(row))
                for prompt, row in zip(prompts, rows, strict=True)
            ]
    return target, head, rows, lengths


class BruteForce:
    """EAGLE drafting by definition: each node runs the head over all committed pairs and its own path."""

    def __init__(self, head, target, row):
        self.head, self.target = head, target
        self.w = head.weights(torch.float32)
        self.row = torch.from_numpy(row)
        self.hidden = fed_states(head, target, self.row[None])[0]
        self.table = rotary_table(head.config, len(row) + 16, "cpu")

    def output(self, start, path):
        """The head's state after the committed pairs up to start-1 and then the drafted tokens of `path`."""
        tokens = [*self.row[1 : start + 1].tolist(), *path]
        states = list(self.hidden[:start])
        keys, values, out = [], [], None
        for position, token in enumerate(tokens):
            state = states[position] if position < start else out
            embed = F.embedding(torch.tensor(token), self.target.embedding)
            x = self.head.fuse(self.w, embed, state)[None, None]
            q, k, v = self.head.qkv(self.w, x, self.table[:, position : position + 1])
            keys.append(k)
            values.append(v)
            key, value = torch.cat(keys, 2), torch.cat(values, 2)
            probs = (q[..., 0, :] @ key.mT / q.shape[-1] ** 0.5).softmax(-1)
            out = self.head.finish(self.w, x, (probs @ value)[..., None, :])[0, 0]
        return out

    def best(self, start, path, topk):
        state = self.output(start, path)
        if self.head.algorithm == "EAGLE3":
            logits = self.w["lm_head"] @ F.rms_norm(state, state.shape, self.w["norm"], 1e-5)
        else:
            logits = self.target.lm_head @ state
        values, indices = logits.softmax(-1).sort(descending=True, stable=True)
        if self.head.algorithm == "EAGLE3":
            indices = self.head.hot_token_id[indices]
        return list(zip(values[:topk].tolist(), indices[:topk].tolist(), strict=True))

    def accepted(self, start, shape):
        steps, topk, draft_tokens = shape
        beams = [(p, (token,)) for p, token in self.best(start, (), topk)]
        candidates = list(beams)
        for _ in range(steps - 1):
            children = [
                (score * p, (*path, token))
                for score, path in beams
                for p, token in self.best(start, path, topk)
            ]
            candidates += children
            beams = sorted(children, key=lambda pair: -pair[0])[:topk]
        tree = {path for _, path in sorted(candidates, key=lambda pair: -pair[0])[: draft_tokens - 1]}
        count = 0
        while start + count + 1 < len(self.row):
            path = tuple(self.row[start + 1 : start + count + 2].tolist())
            if path not in tree:
                break
            count += 1
        return count

    def rounds(self, prompt, shape):
        start, counts = prompt, []
        while start < len(self.row) - 1:
            counts.append(self.accepted(start, shape))
            start = min(start + counts[-1] + 1, len(self.row) - 1)
        return counts


def drafted(head, target, row, length):
    """A row continued by three tokens that the head drafts, now the best and now the second, and a fourth."""
    for number in range(length):
        path, judge = (), BruteForce(head, target, row)
        for depth in range(3):
            path = (*path, judge.best(len(row) - 1, path, 2)[(number + depth) % 3 == 2][1])
        row = np.array([*row, *path, 3 + number])
    return row[:length]


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 1, 4), (1, 4, 4), (2, 2, 4), (3, 4, 8)])
def test_rounds_equal_brute_force(setting, shape):
    target, head, rows, lengths = setting
    (played,) = simulate(head, target, rows, lengths, [shape], batch_tokens=64)
    histogram, rounds = np.zeros(shape[0] + 1, int), []
    with torch.no_grad():
        for row, prompt in zip(rows, lengths, strict=True):
            counts = BruteForce(head, target, row).rounds(int(prompt), shape)
            rounds.append(len(counts))
            histogram += np.bincount(counts, minlength=shape[0] + 1)
    assert played.histogram.tolist() == histogram.tolist()
    assert sorted(played.rounds.tolist()) == sorted(rounds)
    assert histogram[1:].sum() > 0  # otherwise nothing was tested


def test_the_counts_add_up():
    rounds = Rounds((3, 1, 4), np.array([4, 2]), np.array([9, 3]), np.array([1, 2, 1, 2]))
    assert rounds.tokens_per_round == 2.0
    assert rounds.acceptance() == [5 / 6, 3 / 5, 2 / 3]
    assert rounds.summary()["tokens"] == 12


def test_shapes_are_read_and_impossible_ones_refused():
    assert read_shape("3/4/8") == (3, 4, 8)
    for text in ("3/4", "3/4/8/1", "a/b/c", "0/1/2", "3/1/5", "3/1/1", "-1/1/2", ""):
        with pytest.raises(BadInput, match="no shape"):
            read_shape(text)


def test_loops_are_cut_before_the_answer_is():
    text = Text.from_rows([[1, 2, 3, *[7] * 50], [1, 2, 8, 9]], [2, 2], [0, 0])
    assert [len(row) for row in rows_of(text, None, None)[0]] == [53, 4]
    assert [len(row) for row in rows_of(text, None, None, cut_loops=True)[0]] == [6, 4]
    assert [len(row) for row in rows_of(text, 3, 1, cut_loops=True)[0]] == [5]


def test_progress_counts_every_token_once_a_shape(setting):
    target, head, rows, lengths = setting
    told = []
    simulate(head, target, rows, lengths, [(1, 1, 2), (2, 1, 3)], batch_tokens=32, on_played=told.append)
    assert len(told) > 2 and sum(told) == 2 * sum(len(row) for row in rows)


def test_one_token_answers_are_left_out(setting):
    target, head, rows, lengths = setting
    short = rows[0][: lengths[0] + 1]
    (played,) = simulate(head, target, [short, rows[1]], lengths[:2], [(2, 1, 3)])
    assert len(played.rounds) == 1


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_the_engine_agrees(tmp_path, algorithm):
    """Two programs that share no code count the same rounds."""
    from stages.part4_worker import Engine

    target, head = tiny_setting(tmp_path / "target", algorithm, seed=3, std=0.05)
    save_head(head, tmp_path / "head", torch.float32)
    engine = partial(Engine, skip_tokenizer_init=True, context_length=256, max_total_tokens=2048)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 61, n).tolist() for n in (5, 9, 7, 11)]
    found = check_engine(
        engine,
        load_head(tmp_path / "head"),
        target,
        (str(tmp_path / "target"), str(tmp_path / "head")),
        prompts,
        40,
    )
    assert [row["agrees"] for row in found] == [True, True]
    assert found[1]["engine"] > 1  # something was accepted, or nothing was compared
