"""When the number of steps goes up, down, or stays, and what a file about it may hold."""

import json
import re

import pytest

from stages.spec_v2.arg_groups.adaptive_config import AdaptiveSlot, all_candidate_steps, read_adaptive_config
from stages.spec_v2.server_args import ServerArgs
from stages.spec_v2.speculative.adaptive_spec_params import AdaptiveSpeculativeParams, AdaptiveStepSlot

EAGER = {"ema_alpha": 1.0, "update_interval": 1, "warmup_batches": 0}  # the last result decides alone


def slot(*candidates, initial=3, **more):
    return AdaptiveStepSlot(AdaptiveSlot(candidates, **{**EAGER, **more}), initial)


def after(made, *averages):
    """Steps once rounds with these averages have come in, each as two requests that differ."""
    for average in averages:
        made.update([average + 0.5, average - 0.5], made.current_steps)
    return made.current_steps


@pytest.mark.parametrize(
    "candidates, current, average, expected",
    [
        # Upstream's own numbers: down at most p - 0.75, up above current - 0.5.
        ((1, 3, 5, 7), 3, 0.7, 3),
        ((1, 3, 5, 7), 3, 0.2, 1),
        ((1, 3, 5, 7), 3, 0.25, 1),
        ((1, 3, 5, 7), 3, 0.26, 3),
        ((1, 3, 5, 7), 3, 2.5, 3),
        ((1, 3, 5, 7), 3, 2.6, 5),
        ((1, 3, 5, 7), 1, 0.5, 1),
        ((1, 3, 5, 7), 1, 0.6, 3),
        ((1, 3, 5, 7), 7, 2.25, 3),
        ((1, 3, 5, 7), 7, 0.1, 1),
        ((0, 1, 3), 1, 0.25, 0),
        ((0, 1, 3), 1, 0.3, 1),
        ((0, 1, 3), 3, 0.2, 0),
        ((0, 2), 2, 0.3, 2),
    ],
)
def test_down_up_or_neither(candidates, current, average, expected):
    assert after(slot(*candidates, initial=current), average) == expected


def test_it_climbs_over_several_only_as_far_as_the_average_reaches():
    assert after(slot(1, 2, 3, 4, initial=1), 2.6) == 4
    assert after(slot(1, 2, 3, 4, initial=1), 1.6) == 3


def test_hysteresis_moves_both_thresholds():
    assert after(slot(1, 3, down_hysteresis=0.0), 0.5) == 1
    assert after(slot(1, 3, down_hysteresis=-0.5), 0.1) == 3
    assert after(slot(3, 5, up_hysteresis=0.3), 2.7) == 3
    assert after(slot(3, 5, up_hysteresis=0.1), 2.7) == 5


def test_a_ceiling_holds_down_but_never_back():
    assert after(slot(1, 3, 5, 7, initial=7, ceiling_coeff=1), 4.0) == 3
    assert after(slot(1, 3, 5, 7, initial=7), 4.0) == 5
    assert after(slot(1, 3, 5, 7, initial=3, ceiling_coeff=1), 2.6) == 5


def test_from_no_drafts_the_fewest_are_tried():
    made = slot(0, 2, 4, initial=2)
    assert after(made, -0.0) == 0 and made.ema_accept_len == 0
    made.update([0, 0], 0)
    assert made.current_steps == 2 and made.ema_accept_len == 0
    assert after(slot(0), 0.0) == 0


def test_a_slot_that_begins_without_drafts_knows_nothing_of_them():
    made = slot(0, 4, initial=0, ema_alpha=0.5)
    made.update([0], 0)
    assert made.current_steps == 4 and made.ema_accept_len == 3, "else the first round would end it again"


def test_a_late_round_without_drafts_is_not_taken_for_a_bad_one():
    made = slot(0, 3, initial=3)
    made.update([0, 0], 0)
    assert made.ema_accept_len == 2 and made.current_steps == 3


def test_the_average_moves_slowly_and_decides_seldom():
    """Defaults: weight 0.2; ten batches pass, then every fifth decides."""
    made = AdaptiveStepSlot(AdaptiveSlot((1, 3)), 3)
    steps = []
    for _ in range(20):
        made.update([0, 0], 3)
        steps.append(made.current_steps)
    assert steps == [3] * 14 + [1] * 6
    assert made.ema_accept_len == pytest.approx(2 * 0.8**20)


def test_batches_go_to_their_slot():
    config = {4: AdaptiveSlot((5,)), 8: AdaptiveSlot((3,)), 1: AdaptiveSlot((7,))}
    params = AdaptiveSpeculativeParams(config, 3)
    assert [params.get_steps_for_batch(n) for n in (1, 3, 4, 7, 8, 100)] == [7, 7, 5, 5, 3, 3]
    params = AdaptiveSpeculativeParams(config, 3, [2, 4, 8])
    assert [params.get_steps_for_batch(n) for n in (2, 3, 5, 9)] == [7, 5, 3, 3], "padded to a graph's size"
    assert {n: params.cuda_graph_bs_for_step(n) for n in (3, 5, 7, 9)} == {3: [8], 5: [4], 7: [2], 9: []}


def test_slots_learn_apart_and_forget_together():
    config = {1: AdaptiveSlot((1, 3), **EAGER), 2: AdaptiveSlot((1, 3), **EAGER)}
    params = AdaptiveSpeculativeParams(config, 3)
    params.on_verify_complete([0], 3, batch_size=3)  # two of its three requests have ended
    assert [params.get_steps_for_batch(n) for n in (1, 3)] == [3, 1]
    params.reset()
    assert [params.get_steps_for_batch(n) for n in (1, 3)] == [3, 3]


def test_who_never_drafts_is_refused():
    with pytest.raises(ValueError, match="never drafts: give a slot another candidate"):
        AdaptiveSpeculativeParams({1: AdaptiveSlot((0,)), 8: AdaptiveSlot((0,))}, 0)


# ---- the file ----


def read(tmp_path, config):
    path = tmp_path / "adaptive.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return read_adaptive_config(str(path), 63)


def test_without_a_file_it_is_upstreams():
    slots = read_adaptive_config(None, 63)
    assert {size: slot.candidate_steps for size, slot in slots.items()} == {
        1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)
    }  # fmt: skip
    assert [slot.down_hysteresis for slot in slots.values()] == [-0.25, 0, 0, 0]
    assert all_candidate_steps(slots) == [0, 1, 3, 5, 7]


def test_what_stands_beside_the_slots_holds_where_they_do_not_say_otherwise(tmp_path):
    config = {
        "ema_alpha": 0.5,
        "4": {"candidate_steps": [3, 1, 3]},
        "1": {"candidate_steps": [0], "ema_alpha": 1},
    }
    assert read(tmp_path, config) == {
        1: AdaptiveSlot((0,), ema_alpha=1),
        4: AdaptiveSlot((1, 3), ema_alpha=0.5),
    }


@pytest.mark.parametrize(
    "config, words",
    [
        ("[1", "as JSON"),
        ([1], "no object"),
        ({}, "at least one batch size, .* has nothing"),
        ({"0": {"candidate_steps": [1]}}, "from 1 up"),
        ({"candidate_steps": [1]}, "at least one batch size, .* has 'candidate_steps'"),
        ({"1": {"candidate_steps": [1]}, "candidate_steps": [1]}, "each slot needs its own"),
        ({"1": {"candidate_steps": [1]}, "emaalpha": 1}, "unknown key 'emaalpha'; known are .*ema_alpha"),
        ({"1": {"candidate_steps": [1], "steps": 1}}, "slot 1 of .* unknown key 'steps'"),
        ({"1": [1]}, "slot 1 of .* has no candidate_steps"),
        ({"1": {"candidate_steps": []}}, r"candidate_steps=\[\]"),
        ({"1": {"candidate_steps": [64]}}, "from 0 to 63"),
        ({"1": {"candidate_steps": [-1]}}, "from 0 to 63"),
        ({"1": {"candidate_steps": [True]}}, "from 0 to 63"),
        ({"1": {"candidate_steps": 3}}, "candidate_steps=3"),
        ({"1": {"candidate_steps": [1], "ema_alpha": 0}}, "ema_alpha=0"),
        ({"1": {"candidate_steps": [1], "update_interval": 0}}, "update_interval=0"),
        ({"1": {"candidate_steps": [1], "warmup_batches": 1.5}}, "warmup_batches=1.5"),
        ({"1": {"candidate_steps": [1], "down_hysteresis": "low"}}, "down_hysteresis='low'"),
        ('{"1": {"candidate_steps": [1], "up_hysteresis": NaN}}', "up_hysteresis=nan"),
        ({"1": {"candidate_steps": [1], "ceiling_coeff": -1}}, "ceiling_coeff=-1"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, config, words):
    with pytest.raises(ValueError, match=r"speculative_adaptive_config='.*adaptive\.json'") as caught:
        read(tmp_path, config)
    assert re.search(words, str(caught.value)), caught.value


def make(**flags):
    eagle = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "head"}
    return ServerArgs.from_kwargs(
        model_path="target", device="cpu", speculative_adaptive=True, **{**eagle, **flags}
    )


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, (3, 1, 4)),
        ({"speculative_num_steps": 5}, (5, 1, 6)),
        ({"speculative_num_draft_tokens": 2}, (1, 1, 2)),
        ({"speculative_eagle_topk": 1, "speculative_algorithm": "NEXTN"}, (3, 1, 4)),
    ],
)
def test_where_it_begins(flags, expected):
    args = make(**flags)
    numbers = args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens
    assert numbers == expected
