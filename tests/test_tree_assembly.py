"""Many proposals, one tree: merged, best first, credited to those who proposed."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import InputError
from foretell._calibration import LEAST, Calibration
from foretell._proposal import Proposal
from foretell._tree import Node, Source, credit, draft_of, grow, learn


def proposal(*nodes):
    """Each node a (parent, token, probability)."""
    return Proposal(
        tuple(token for _, token, _ in nodes),
        (-1, *(parent for parent, _, _ in nodes)),
        tuple(probability for _, _, probability in nodes),
        tuple(f"kind {token}" for _, token, _ in nodes),
    )


@st.composite
def proposals(draw):
    """Any tree over three tokens, with any probabilities."""
    found, taken = [], set()
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(0, len(found)))
        token = draw(st.integers(0, 2))
        if (parent, token) not in taken:
            taken.add((parent, token))
            found.append((parent, token, draw(st.floats(0, 1))))
    return proposal(*found)


several = st.dictionaries(st.sampled_from("abc"), proposals(), max_size=3)


def grown(made, limit=100, **options):
    return list(grow(made, Calibration(), limit, **options))


def spelled(made, parents_of=lambda one: one.parents):
    """The paths of a proposal or draft, each as the tokens that lead to it."""
    paths = [()]
    for position, token in enumerate(made.tokens):
        parents = parents_of(made)
        parent = position if parents is None else parents[position + 1]
        paths.append((*paths[parent], token))
    return paths[1:]


# --- Proposals -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1,), None, (), ("x",)), "need as many probabilities"),
        (((1,), None, (0.5,), ()), "need as many probabilities"),
        (((1,), None, (1.5,), ("x",)), r"outside 0\.\.1"),
        (((1,), None, (float("nan"),), ("x",)), r"outside 0\.\.1"),
        (((1,), (-1,), (0.5,), ("x",)), "need 2 parents"),
        (((1,), (0, 0), (0.5,), ("x",)), "need 2 parents, the first one -1"),
        (((1,), (-1, 1), (0.5,), ("x",)), "not an earlier node"),
        (((1,), (-1, -1), (0.5,), ("x",)), "not an earlier node"),
        (((1, 1), (-1, 0, 0), (0.5, 0.5), ("x", "y")), "twice after the same parent"),
    ],
)
def test_what_is_not_a_tree_with_evidence_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Proposal(*arguments)


@given(proposals())
def test_children_are_the_other_way_round_of_parents(made):
    for node, following in enumerate(made.children):
        for position in following:
            assert made.parents[position + 1] == node
    assert sum(map(len, made.children)) == len(made)


def test_a_draft_without_evidence_stands_on_its_depth():
    draft = Proposal((4, 5, 6), (-1, 0, 1, 1), (0.5,) * 3, ("x",) * 3).draft()
    made = Proposal.of(draft)
    assert made.kinds == ("depth 1", "depth 2", "depth 2")
    assert made.draft() == draft


# --- Growing -------------------------------------------------------------------------


def test_the_most_probable_path_comes_first_whoever_proposed_it():
    nodes = grown(
        {
            "a": proposal((0, 1, 0.5), (1, 2, 0.9)),
            "b": proposal((0, 3, 0.4), (1, 4, 0.5), (0, 5, 0.1)),
        }
    )
    assert [node.token for node in nodes] == [1, 2, 3, 4, 5]
    assert [node.parent for node in nodes] == [0, 1, 0, 3, 0]
    expected = [0.5, 0.45, 0.4, 0.2, 0.1]
    assert [node.path_probability for node in nodes] == pytest.approx(expected)


def test_the_same_token_after_the_same_parent_is_one_node():
    nodes = grown(
        {
            "a": proposal((0, 1, 0.5), (1, 2, 0.2)),
            "b": proposal((0, 1, 0.8), (1, 2, 0.5), (1, 3, 0.1)),
        }
    )
    assert [(node.token, node.parent) for node in nodes] == [(1, 0), (2, 1), (3, 1)]
    assert [node.probability for node in nodes] == pytest.approx([0.8, 0.5, 0.1])
    assert nodes[0].sources == (Source("a", 0), Source("b", 0))
    assert nodes[2].sources == (Source("b", 2),)


def test_two_who_are_sure_of_different_tokens_cannot_both_be_right():
    nodes = grown({"a": proposal((0, 1, 0.9)), "b": proposal((0, 2, 0.6))})
    assert [node.probability for node in nodes] == pytest.approx([0.6, 0.4])


def test_what_experience_says_of_a_drafter_decides_and_not_what_it_claims():
    calibration = Calibration()
    made = {"liar": proposal((0, 1, 0.9)), "modest": proposal((0, 2, 0.4))}
    assert next(grow(made, calibration, 1)).token == 1
    for _ in range(6):
        learn(made, [3], calibration)
        learn({"modest": made["modest"]}, [2], calibration)
    assert next(grow(made, calibration, 1)).token == 2


@given(several, st.integers(0, 12))
def test_every_prefix_is_a_valid_draft_within_the_limit(made, limit):
    nodes = grown(made, limit)
    assert len(nodes) <= limit
    for count in range(len(nodes) + 1):
        draft = draft_of(nodes[:count])  # a Draft checks that it is a tree
        assert len(draft) == count
    for node in nodes:
        above = 1.0 if node.parent == 0 else nodes[node.parent - 1].path_probability
        assert node.path_probability == pytest.approx(above * node.probability)
        assert 0 < node.probability <= 1
    chances = [node.path_probability for node in nodes]
    assert chances == sorted(chances, reverse=True)
    for parent in range(len(nodes) + 1):
        assert sum(node.probability for node in nodes if node.parent == parent) <= 1 + 1e-9


@given(several)
def test_without_a_limit_it_is_the_union_of_all_proposals(made):
    nodes = grown(made)
    union = {path for one in made.values() for path in spelled(one)}
    tree = spelled(draft_of(nodes))
    assert len(tree) == len(set(tree))
    assert set(tree) == union
    for node, path in zip(nodes, tree, strict=True):
        for source in node.sources:
            assert spelled(made[source.drafter])[source.position] == path
        assert {source.drafter for source in node.sources} == {
            drafter for drafter, one in made.items() if path in spelled(one)
        }


@settings(deadline=None)
@given(several, st.integers(1, 4))
def test_no_other_tree_of_that_size_expects_more_tokens(made, size):
    nodes = grown(made)[:11]
    best = sum(node.path_probability for node in nodes[:size])
    for chosen in combinations(range(1, len(nodes) + 1), min(size, len(nodes))):
        if all(nodes[number - 1].parent in (0, *chosen) for number in chosen):
            total = sum(nodes[number - 1].path_probability for number in chosen)
            assert total <= best + 1e-9


@given(several, st.integers(0, 12))
def test_for_a_model_that_verifies_no_trees_it_is_a_chain(made, limit):
    nodes = grown(made, limit, chain=True)
    assert draft_of(nodes).parents is None
    assert [node.parent for node in nodes] == list(range(len(nodes)))
    for above, node in zip([None, *nodes], nodes, strict=False):
        rivals = [
            max(made[s.drafter].probabilities[i], LEAST)
            for s in (above.sources if above else [Source(name, -1) for name in made])
            for i in made[s.drafter].children[s.position + 1]
        ]
        mine = [made[s.drafter].probabilities[s.position] for s in node.sources]
        assert max(*mine, LEAST) == pytest.approx(max(rivals))


def test_nothing_proposed_is_an_empty_draft():
    assert grown({}) == grown({"a": Proposal()}) == []
    assert len(draft_of([])) == 0


# --- Learning and credit -------------------------------------------------------------


class Witness(Calibration):
    """Remembers what it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def observe(self, drafter, kind, estimate, right):
        self.told.append((drafter, kind, right))


def test_only_what_the_target_was_asked_about_teaches():
    made = {
        "a": proposal((0, 1, 0.5), (1, 2, 0.5), (1, 3, 0.5), (0, 4, 0.5), (4, 2, 0.5)),
        "b": proposal((0, 9, 0.5), (1, 2, 0.5)),
    }
    witness = Witness()
    learn(made, [1, 3, 7], witness)
    assert witness.told == [
        ("a", "kind 1", True),
        ("a", "kind 4", False),
        ("a", "kind 2", False),
        ("a", "kind 3", True),
        ("b", "kind 9", False),
    ]


def test_a_plain_step_teaches_what_its_one_token_says():
    witness = Witness()
    learn({"a": proposal((0, 1, 0.5), (1, 2, 0.5))}, [1], witness)
    assert witness.told == [("a", "kind 1", True)]
    learn({"a": proposal((0, 1, 0.5))}, [], witness)
    assert len(witness.told) == 1


@given(proposals(), st.lists(st.integers(0, 2), max_size=6))
def test_what_teaches_is_each_node_after_a_right_path(made, tokens):
    witness = Witness()
    learn({"a": made}, tokens, witness)
    expected = [
        ("a", f"kind {path[-1]}", path[-1] == tokens[len(path) - 1])
        for path in spelled(made)
        if len(path) <= len(tokens) and list(path[:-1]) == tokens[: len(path) - 1]
    ]
    assert sorted(witness.told) == sorted(expected)


def test_credit_goes_to_everyone_who_proposed_a_node():
    a, b = Source("a", 0), Source("b", 0)
    nodes = [
        Node(5, 0, 0.9, 0.9, (a, b)),
        Node(6, 1, 0.9, 0.8, (a,)),
        Node(7, 1, 0.1, 0.1, (b,)),
    ]
    assert credit(nodes, [0, 1, 2]) == {"a": (2, 2), "b": (2, 1)}
    assert credit(nodes, [0]) == {"a": (2, 0), "b": (2, 0)}
    assert credit([], [0]) == {}
