"""The look-up of NGRAM: C++ against its twin, what is proposed and what forgotten, how it gets compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.spec_v2.server_args import ServerArgs
from stages.spec_v2.speculative.cpp_ngram import ngram_corpus
from stages.spec_v2.speculative.cpp_ngram.ngram_corpus import NgramCorpus, build_library, make_corpus
from stages.spec_v2.speculative.cpp_ngram.ngram_twin import NgramTwin

REQUESTS = st.integers(0, 3)
RUNS = st.lists(st.tuples(REQUESTS, st.lists(st.integers(0, 4), max_size=12)), max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), RUNS),
        st.tuples(st.just("match"), RUNS, st.sampled_from([1, 2, 5, 12, 64])),
        st.tuples(st.just("forget"), REQUESTS),
    ),
    max_size=30,
)


@st.composite
def sizes(draw):
    low = draw(st.integers(1, 3))
    return (
        draw(st.sampled_from([1, 2, 3, 5, 8, 17, 40, 100, 100_000])),
        draw(st.sampled_from([2, 3, 4, 6, 18])),
        low,
        draw(st.integers(low, 8)),
        draw(st.sampled_from(["BFS", "PROB"])),
    )


@settings(max_examples=200, deadline=None)
@given(sizes(), STEPS)
def test_cpp_is_its_twin(arguments, steps):
    """The same trees to the last sibling, the same nodes evicted, whatever happens in whatever order."""
    corpus, twin = NgramCorpus(*arguments), NgramTwin(*arguments)
    for name, *what in steps:
        if name == "forget":
            corpus.forget(*what), twin.forget(*what)
        else:
            ids, runs = [i for i, _ in what[0]], [run for _, run in what[0]]
            if name == "append":
                corpus.append(ids, runs), twin.append(ids, runs)
            else:
                have, want = corpus.match(ids, what[1], runs), twin.match(ids, what[1], runs)
                assert have.shape == want.shape and np.array_equal(have, want)
        assert corpus.size == twin.size <= arguments[0]


def test_cpp_is_its_twin_where_tables_grow():
    """More nodes than the first buckets, freed and used again."""
    rng = np.random.default_rng(0)
    corpus, twin = NgramCorpus(5000), NgramTwin(5000)
    for i in range(60):
        ids, runs = [i % 7], [rng.integers(0, 200, 40).tolist()]
        corpus.append(ids, runs), twin.append(ids, runs)
        if i % 5 == 0:
            corpus.forget(i % 3), twin.forget(i % 3)
        assert np.array_equal(corpus.match([i % 7], 12), twin.match([i % 7], 12))
    assert corpus.size == twin.size == 5000


@pytest.fixture(params=[NgramCorpus, NgramTwin], ids=["cpp", "python"])
def make(request):
    return request.param


def paths(fields: np.ndarray) -> set[tuple[int, ...]]:
    """The tokens on the way to each row of a tree [5, n] that a walk from the root reaches."""
    tokens, _, _, child, sibling = fields.tolist()
    found, stack = set(), [(child[0], ())]
    while stack:
        row, way = stack.pop()
        if row >= 0:
            found.add((*way, tokens[row]))
            stack += [(child[row], (*way, tokens[row])), (sibling[row], way)]
    return found


def test_fields_of_a_tree(make):
    """Links, depths and mask bits tell of one tree; rows without a draft hang on nobody."""
    corpus = make(1000, 6)
    corpus.append([0], [[1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2]])
    n = 16
    tokens, mask, depth, child, sibling = corpus.match([0], n)[:, 0].tolist()
    assert tokens[0] == 2 and depth[0] == 0 and mask[0] == 1
    parent = {}
    for row in range(n):
        here = child[row]
        while here >= 0:
            assert here > row and here not in parent
            parent[here] = row
            here = sibling[here]
    for row, up in parent.items():
        assert depth[row] == depth[up] + 1 and mask[row] == mask[up] | 1 << row
    drafts = 1 + len(parent)
    assert 3 < drafts < n and set(parent) == set(range(1, drafts))
    for row in range(drafts, n):
        assert (tokens[row], mask[row], depth[row], child[row], sibling[row]) == (0, 1 << row, 0, -1, -1)
    assert paths(corpus.match([0], n)[:, 0]) >= {(3, 5, 1, 2), (3, 1), (4, 1)}


def test_what_is_said_besides_is_gone_on_from_and_not_kept(make):
    """The trees of a look-up ahead are those behind the same words, of what was known before them."""
    corpus = make(1000, 6)
    corpus.append([0, 1], [[1, 2, 3, 1, 2, 4], [1, 2, 5, 9]])
    size, before = corpus.size, corpus.match([0, 1], 12)
    ahead = corpus.match([0, 1], 12, [[9, 1, 2], []])
    assert ahead[0, 0, 0] == 2 and paths(ahead[:, 0]) >= {(4,), (3, 1, 2), (5, 9)}
    assert np.array_equal(ahead[:, 1], before[:, 1])
    assert paths(corpus.match([0], 12, [[9, 9]])[:, 0]) == set(), "the first 9 is not found yet"
    assert corpus.size == size and np.array_equal(corpus.match([0, 1], 12), before)
    corpus.append([0], [[9, 9]])
    assert (9,) in paths(corpus.match([0], 12)[:, 0])


def test_the_longest_match_is_asked_first(make):
    corpus = make(1000, 6)
    corpus.append([0], [[7, 1, 2, 8, 3, 1, 2, 9, 7, 1, 2]])
    assert paths(corpus.match([0], 2)[:, 0]) == {(8,)}, "9 was said later, but not behind 7"
    assert paths(corpus.match([0], 3)[:, 0]) > {(8,)}


def test_by_what_was_said_last_or_most_often(make):
    said = [1, 2, 5, 1, 2, 6, 1, 3, 7, 1]
    for match_type, best in (("BFS", 3), ("PROB", 2)):
        corpus = make(1000, 3, match_type=match_type)
        corpus.append([0], [said])
        assert paths(corpus.match([0], 2)[:, 0]) == {(best,)}


def test_breadth_falls_with_the_length_of_a_match(make):
    """One token proposes up to the most children, the longest match the fewest."""
    corpus = make(1000, 4, 1, 3)
    corpus.append([0], [[t for i in range(5) for t in (1, 2, 3, 10 + i)] + [9, 1]])
    assert paths(corpus.match([0], 64)[:, 0]) == {(2,), (2, 3), (2, 3, 14)}
    corpus.append([0], [[8, 3]])
    assert {p for p in paths(corpus.match([0], 64)[:, 0]) if len(p) == 1} == {(14,), (13,), (12,)}
    corpus.append([0], [[1, 2, 3]])
    assert {p for p in paths(corpus.match([0], 2)[:, 0]) if len(p) == 1} == {(14,)}


def test_ones_own_words_come_before_those_of_others(make):
    corpus = make(1000, 4)
    corpus.append([0, 1], [[1, 2, 3, 1, 2], [1, 2, 4, 1, 2]])
    assert paths(corpus.match([0, 1], 2)[:, 0]) == {(3,)}
    assert paths(corpus.match([0, 1], 2)[:, 1]) == {(4,)}
    corpus.append([2], [[1, 2]])
    assert paths(corpus.match([2], 2)[:, 0]) == {(4,)}, "who has said nothing yet hears the last of all"
    corpus.forget(1)
    assert paths(corpus.match([2], 2)[:, 0]) == {(4,)}, "what was said stays where it is shared"


def test_a_request_that_is_forgotten_leaves_its_place(make):
    corpus = make(10_000, 5)
    corpus.append([0], [list(range(50))])
    shared = corpus.size - 1
    before = corpus.size
    corpus.append([1], [list(range(50))])
    assert corpus.size == before + shared - shared // 2, "its own trie; the shared one knew it all"
    corpus.forget(1)
    corpus.forget(1)
    assert corpus.size == before


def test_the_oldest_is_evicted_first(make):
    """A run that was said again outlives a later one that was not."""
    corpus = make(80, 3)
    corpus.append([0, 1, 3, 2], [[1, 2, 3], [4, 5, 6], [10, 11, 12], [1, 2, 3]])
    for request in (0, 1, 2):
        corpus.forget(request)
    token = 20
    while corpus.size < 80:  # three nodes each in its own trie and in the shared one; the last makes some go
        corpus.append([3], [[token]])
        token += 1
    corpus.append([4, 5], [[1, 2], [4, 5]])
    kept = corpus.match([4, 5], 2)
    assert paths(kept[:, 0]) == {(3,)} and paths(kept[:, 1]) == set()


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 50, 1000])
def test_memory_is_bounded(make, capacity):
    rng = np.random.default_rng(1)
    corpus = make(capacity, 8)
    for i in range(40):
        corpus.append([i % 9], [rng.integers(0, 30, 20).tolist()])
        assert corpus.size <= capacity
        assert corpus.match([i % 9], 12).shape == (5, 1, 12)


# ---- the compiler ----


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache in which nothing has been compiled yet."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    ngram_corpus.load_library.cache_clear()
    yield tmp_path / "cache" / "ngram"
    ngram_corpus.load_library.cache_clear()


def args(**flags):
    return ServerArgs.from_kwargs(model_path="m", device="cpu", speculative_algorithm="NGRAM", **flags)


def test_it_is_compiled_once(cache, monkeypatch):
    library = build_library()
    assert [library] == list(cache.iterdir())
    monkeypatch.setenv("PATH", "")
    assert build_library() == library, "without a compiler, since it is there"


@pytest.mark.slow
def test_another_source_is_another_library(cache, monkeypatch, tmp_path):
    first = build_library()
    other = tmp_path / "ngram_corpus.cpp"
    other.write_bytes(ngram_corpus.SOURCE.read_bytes() + b"// changed\n")
    monkeypatch.setattr(ngram_corpus, "SOURCE", other)
    assert build_library() != first and len(list(cache.iterdir())) == 2


@pytest.mark.slow
def test_processes_that_compile_at_once(cache):
    """Each of them finds a whole library, and nothing half-made stays behind."""
    code = (
        "from stages.spec_v2.speculative.cpp_ngram.ngram_corpus import NgramCorpus\n"
        "corpus = NgramCorpus(100, 4)\n"
        "corpus.append([0], [[1, 2, 3, 1, 2]])\n"
        "print(corpus.match([0], 2)[0, 0, 1])\n"
    )
    several = [
        subprocess.Popen([sys.executable, "-c", code], env=os.environ, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in several] == ["3\n"] * 3
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_without_a_compiler_it_is_refused(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"no compiler 'g\+\+' here: install g\+\+.*FLEDGE_NGRAM=python"):
        make_corpus(args())
    monkeypatch.setenv("FLEDGE_NGRAM", "python")
    assert isinstance(make_corpus(args()), NgramTwin)
    monkeypatch.setenv("FLEDGE_NGRAM", "rust")
    with pytest.raises(ValueError, match="FLEDGE_NGRAM='rust'.*'cpp' or 'python'"):
        make_corpus(args())


def test_a_compiler_that_fails_is_quoted(cache, monkeypatch, tmp_path):
    source = tmp_path / "ngram_corpus.cpp"
    source.write_text("no C++ at all\n")
    monkeypatch.setattr(ngram_corpus, "SOURCE", source)
    with pytest.raises(RuntimeError, match=r"g\+\+ does not compile ngram_corpus.cpp \(it says: .*error"):
        make_corpus(args())
    assert list(cache.iterdir()) == []


def test_a_cache_that_is_no_folder_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="set FLEDGE_CACHE to a folder"):
        build_library()


# ---- the flags ----


def test_defaults_are_upstreams():
    made = args()
    assert made.speculative_num_draft_tokens == 12
    assert (made.speculative_ngram_min_bfs_breadth, made.speculative_ngram_max_bfs_breadth) == (1, 10)
    assert (made.speculative_ngram_max_trie_depth, made.speculative_ngram_capacity) == (18, 10_000_000)
    assert made.speculative_ngram_match_type == "BFS"


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"speculative_draft_model_path": "x"}, "draft_model_path='x' means nothing to .*'NGRAM'"),
        ({"speculative_num_steps": 3}, "speculative_num_steps=3 means nothing"),
        ({"speculative_eagle_topk": 2}, "speculative_eagle_topk=2 means nothing"),
        ({"speculative_token_map": "x"}, "speculative_token_map='x'.*NGRAM borrows none"),
        ({"speculative_ngram_min_bfs_breadth": 11}, "lower the one or raise the other"),
        ({"enable_dp_attention": True, "tp_size": 2, "dp_size": 2}, "enable_dp_attention, and upstream's"),
        ({"speculative_num_draft_tokens": 65}, "from 2 to 64"),
        ({"speculative_ngram_max_trie_depth": 1}, "from 2 to 256"),
        ({"speculative_ngram_match_type": "DFS"}, "BFS, PROB"),
        ({"speculative_ngram_capacity": 0}, "speculative_ngram_capacity=0"),
        ({"speculative_ngram_branch_length": 18}, "does not have"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_flags_that_make_no_sense(flags, words):
    with pytest.raises(ValueError, match=words):
        args(**flags)


def test_its_flags_without_it():
    head = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "a-head"}
    for flags, words in ((head, "means nothing to speculative_algorithm='EAGLE'"), ({}, "add .*'NGRAM'")):
        with pytest.raises(ValueError, match=words):
            ServerArgs.from_kwargs(model_path="m", device="cpu", speculative_ngram_capacity=5, **flags)
