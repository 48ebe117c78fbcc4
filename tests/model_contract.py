"""The contract of `foretell.Model`, as checks that any backend can be held to.

A backend's test file needs two lines::

    @pytest.mark.parametrize("check", model_contract.CHECKS, ids=model_contract.name)
    def test_contract(check):
        check(make_model())

or `model_contract.check_contract(make_model)` outside of pytest. The model should have random
weights, at least 5 token ids and a context of 48 to 256 positions (it is filled once). Bits are
compared, not values: row invariance is what everything else follows from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from foretell import CapabilityError, ContextLengthError, InputError, Model, Rows, Session
from foretell.backends.table import TableModel

Check = Callable[[Model], None]


def check_contract(make_model: Callable[[], Model]) -> None:
    """Run every check on a model of its own."""
    for check in CHECKS:
        check(make_model())


def name(check: Check) -> str:
    """The check's name, for pytest's ids."""
    return check.__name__


# --- Helpers -------------------------------------------------------------------------


def random_tokens(model: Model, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(model.vocab_size, size=count).tolist()


def random_tree(count: int, seed: int) -> list[int]:
    """Parents of a random forest; wide and deep ones both occur."""
    rng = np.random.default_rng(seed)
    lowest = 0 if seed % 2 else -1  # one root, as in a draft, or several
    return [-1, *(int(rng.integers(lowest, node)) for node in range(1, count))]


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def prefilled(model: Model, tokens: Sequence[int]) -> Session:
    session = model.new_session()
    if tokens:
        model.forward([Rows(session, tokens, logits="none")])
        session.keep(range(len(tokens)))
    return session


def one_by_one(model: Model, session: Session, tokens: Sequence[int]) -> np.ndarray:
    """Plain decoding: one token a pass; the logits after each."""
    rows = []
    for token in tokens:
        rows.append(model.forward([Rows(session, [token])]).logits[0].copy())
        session.keep([0])
    return np.array(rows)


def cache(session: Session) -> tuple[np.ndarray, np.ndarray]:
    keys, values = session.keys_values()
    return keys.copy(), values.copy()


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes()


def assert_same_cache(got: Session, expected: Session) -> None:
    assert got.length == expected.length
    for one, other in zip(cache(got), cache(expected), strict=True):
        assert_same_bits(one, other)


# --- What a pass gives back ----------------------------------------------------------


def a_new_session_is_empty(model: Model) -> None:
    session = model.new_session()
    assert session.length == 0
    for array in session.keys_values():
        assert array.ndim == 4
        assert array.shape[2] == 0
        assert array.dtype == np.float32
    session.keep([])
    session.rollback(0)
    assert session.fork().length == session.length == 0


def logits_are_those_asked_for(model: Model) -> None:
    tokens = random_tokens(model, 7)
    every = model.forward([Rows(model.new_session(), tokens)])
    last = model.forward([Rows(model.new_session(), tokens, logits="last")])
    none = model.forward([Rows(model.new_session(), tokens, logits="none")])
    assert every.logits.shape == (7, model.vocab_size)
    assert none.logits.shape == (0, model.vocab_size)
    assert_same_bits(last.logits, every.logits[-1:])
    for output in (every, last, none):
        assert output.logits.dtype == np.float32
        assert output.logits.flags.c_contiguous


def outputs_come_in_the_order_of_their_rows(model: Model) -> None:
    a, b = random_tokens(model, 4, seed=1), random_tokens(model, 6, seed=2)
    output = model.forward(
        [
            Rows(model.new_session(), a, logits="none"),
            Rows(model.new_session(), b),
            Rows(model.new_session(), a, logits="last"),
            Rows(model.new_session(), a),
        ]
    )
    assert output.logits.shape == (0 + 6 + 1 + 4, model.vocab_size)
    assert len(output.of(0).logits) == 0
    alone = model.forward([Rows(model.new_session(), b)]).logits
    assert_same_bits(output.of(1).logits, alone)
    assert_same_bits(output.of(3).logits[-1:], output.of(2).logits)
    assert_same_bits(output.of(3).of(0).logits, output.of(3).logits)


def an_output_outlives_the_next_pass(model: Model) -> None:
    session = model.new_session()
    output = model.forward([Rows(session, random_tokens(model, 3))])
    before = output.logits.copy()
    session.keep(range(3))
    model.forward([Rows(session, random_tokens(model, 5, seed=1))])
    assert_same_bits(output.logits, before)


def tokens_come_in_any_sequence(model: Model) -> None:
    tokens = random_tokens(model, 4)
    expected = model.forward([Rows(model.new_session(), tokens)]).logits
    for form in (tuple(tokens), np.array(tokens), np.array(tokens, dtype=np.int32)):
        assert_same_bits(model.forward([Rows(model.new_session(), form)]).logits, expected)


# --- Row invariance ------------------------------------------------------------------


def chunks_do_not_matter(model: Model) -> None:
    tokens = random_tokens(model, 40)
    plain = model.new_session()
    expected = one_by_one(model, plain, tokens)
    for chunk in (2, 3, 5, 8, 13, 32, 40):
        session = model.new_session()
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            logits = model.forward([Rows(session, part)]).logits
            assert_same_bits(logits, expected[start : start + chunk])
            session.keep(range(len(part)))
        assert_same_cache(session, plain)


def a_pass_of_any_length_equals_single_steps(model: Model) -> None:
    prompt, tokens = random_tokens(model, 11, seed=3), random_tokens(model, 33, seed=4)
    plain = prefilled(model, prompt)
    expected = one_by_one(model, plain, tokens)
    session = prefilled(model, prompt)
    for count in range(1, len(tokens) + 1):
        output = model.forward([Rows(session, tokens[:count])])
        assert_same_bits(output.logits, expected[:count])
    session.keep(range(len(tokens)))
    assert_same_cache(session, plain)


def an_explicit_chain_is_a_chain(model: Model) -> None:
    tokens = random_tokens(model, 6)
    one, other = prefilled(model, tokens), prefilled(model, tokens)
    a = model.forward([Rows(one, tokens)])
    b = model.forward([Rows(other, tokens, parents=range(-1, 5))])
    assert_same_bits(a.logits, b.logits)
    one.keep(range(6))
    other.keep(range(6))
    assert_same_cache(one, other)


def every_node_of_a_tree_equals_plain_decoding_of_its_path(model: Model) -> None:
    if not model.capabilities.tree:
        pytest.skip("the model verifies no trees")
    for seed in range(6):
        prompt = random_tokens(model, [0, 1, 7, 9, 15, 16][seed], seed=seed)
        tokens = random_tokens(model, 12, seed=100 + seed)
        parents = random_tree(12, seed)
        session = prefilled(model, prompt)
        logits = model.forward([Rows(session, tokens, parents)]).logits.copy()
        for node in range(12):
            path = path_to(node, parents)
            plain = prefilled(model, prompt)
            expected = one_by_one(model, plain, [tokens[i] for i in path])
            assert_same_bits(logits[node], expected[-1])
            model.forward([Rows(session, tokens, parents)])
            session.keep(path)
            assert_same_cache(session, plain)
            session.rollback(len(path))


def generation_goes_on_after_a_kept_branch(model: Model) -> None:
    if not model.capabilities.tree:
        pytest.skip("the model verifies no trees")
    tokens = random_tokens(model, 6)
    session, plain = prefilled(model, tokens[:2]), prefilled(model, tokens[:2])
    rest = random_tokens(model, 5, seed=9)
    parents = [-1, 0, 0, 1, 2, 4]
    model.forward([Rows(session, tokens, parents)])
    session.keep([0, 2, 4, 5])
    one_by_one(model, plain, [tokens[i] for i in (0, 2, 4, 5)])
    assert_same_bits(one_by_one(model, session, rest), one_by_one(model, plain, rest))
    assert_same_cache(session, plain)


def other_sessions_in_the_pass_do_not_matter(model: Model) -> None:
    prompts = [random_tokens(model, n, seed=n) for n in (0, 1, 9, 17)]
    blocks = [random_tokens(model, n, seed=50 + n) for n in (5, 1, 3, 8)]
    alone = []
    for prompt, block in zip(prompts, blocks, strict=True):
        session = prefilled(model, prompt)
        logits = model.forward([Rows(session, block)]).logits.copy()
        session.keep(range(len(block)))
        alone.append((logits, session))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0]):
        sessions = [prefilled(model, prompts[i]) for i in order]
        output = model.forward([Rows(s, blocks[i]) for s, i in zip(sessions, order, strict=True)])
        for place, (i, session) in enumerate(zip(order, sessions, strict=True)):
            assert_same_bits(output.of(place).logits, alone[i][0])
            session.keep(range(len(blocks[i])))
            assert_same_cache(session, alone[i][1])


# --- keep, rollback, fork ------------------------------------------------------------


def nothing_is_committed_before_keep(model: Model) -> None:
    session = prefilled(model, random_tokens(model, 3))
    before = cache(session)
    model.forward([Rows(session, random_tokens(model, 4, seed=1))])
    assert session.length == 3
    for got, expected in zip(cache(session), before, strict=True):
        assert_same_bits(got, expected)
    session.keep(range(4))
    assert session.length == 7
    for got, expected in zip(cache(session), before, strict=True):
        assert_same_bits(np.ascontiguousarray(got[:, :, :3]), expected)


def dropped_nodes_leave_no_trace(model: Model) -> None:
    prompt, tokens = random_tokens(model, 5), random_tokens(model, 4, seed=1)
    garbage = random_tokens(model, 9, seed=2)
    plain = prefilled(model, prompt)
    expected = one_by_one(model, plain, tokens)
    never_kept, dropped, cut = (prefilled(model, prompt) for _ in range(3))
    model.forward([Rows(never_kept, garbage)])
    model.forward([Rows(dropped, garbage)])
    dropped.keep([])
    model.forward([Rows(cut, [*tokens[:2], *garbage])])
    cut.keep([0, 1])
    for session, done in ((never_kept, 0), (dropped, 0), (cut, 2)):
        logits = model.forward([Rows(session, tokens[done:])]).logits
        assert_same_bits(logits, expected[done:])
        session.keep(range(4 - done))
        assert_same_cache(session, plain)


def rollback_is_exact(model: Model) -> None:
    tokens = random_tokens(model, 21)
    for n in (0, 1, 4, 15, 16, 17, 21):
        session = prefilled(model, tokens)
        session.rollback(n)
        plain = prefilled(model, tokens[: 21 - n])
        assert_same_cache(session, plain)
        rest = random_tokens(model, 6, seed=n)
        assert_same_bits(one_by_one(model, session, rest), one_by_one(model, plain, rest))
        assert_same_cache(session, plain)


def rollback_drops_speculative_nodes(model: Model) -> None:
    session = prefilled(model, random_tokens(model, 4))
    for n in (0, 1):
        model.forward([Rows(session, random_tokens(model, 3))])
        session.rollback(n)
        with pytest.raises(InputError):
            session.keep([0])


def rollback_refuses_what_is_not_there(model: Model) -> None:
    session = prefilled(model, random_tokens(model, 4))
    before = cache(session)
    for n in (-1, 5, 100):
        with pytest.raises(InputError):
            session.rollback(n)
    assert session.length == 4
    for got, expected in zip(cache(session), before, strict=True):
        assert_same_bits(got, expected)


def forks_go_their_own_ways(model: Model) -> None:
    prompt = random_tokens(model, 10)
    session = prefilled(model, prompt)
    model.forward([Rows(session, prompt)])
    fork = session.fork()
    second = fork.fork()
    with pytest.raises(InputError):
        fork.keep([0])  # speculative nodes stay with the session they were run for
    session.keep(range(len(prompt)))
    ways = [(session, [*prompt, *prompt]), (fork, list(prompt)), (second, list(prompt))]
    for seed, (one, tokens) in enumerate(ways):  # interleaved writes after rollbacks
        one.rollback(seed + 1)
        del tokens[len(tokens) - seed - 1 :]
        more = random_tokens(model, 5, seed=30 + seed)
        one_by_one(model, one, more)
        tokens.extend(more)
    for one, tokens in ways:
        assert_same_cache(one, prefilled(model, tokens))
    rows = [Rows(one, random_tokens(model, 3, seed=7)) for one, _ in ways]
    together = model.forward(rows)
    for place, (_, tokens) in enumerate(ways):
        alone = model.forward([Rows(prefilled(model, tokens), rows[place].tokens)])
        assert_same_bits(together.of(place).logits, alone.logits)


def keep_takes_one_path_from_the_root(model: Model) -> None:
    session = prefilled(model, random_tokens(model, 2))
    with pytest.raises(InputError):
        session.keep([0])  # a pass that was kept is over
    tree = model.capabilities.tree
    parents = [-1, 0, 0, 1] if tree else None
    tokens = random_tokens(model, 4)
    model.forward([Rows(session, tokens, parents)])
    bad: list[list[int]] = [[4], [-1], [0, 0], [1], [0, 3], [0, 1, 0], [1, 0], [0, -1]]
    if tree:
        bad += [[0, 2, 3], [0, 1, 2], [3]]
    for nodes in bad:
        with pytest.raises(InputError):
            session.keep(nodes)
    assert session.length == 2
    session.keep([0, 1, 3] if tree else [0, 1, 2])  # still there after all those errors
    expected = [tokens[i] for i in ([0, 1, 3] if tree else [0, 1, 2])]
    assert_same_cache(session, prefilled(model, [*random_tokens(model, 2), *expected]))
    with pytest.raises(InputError):
        session.keep([0])


# --- Errors and limits ---------------------------------------------------------------


def a_refused_pass_changes_nothing(model: Model) -> None:
    good, session = prefilled(model, [0, 1]), prefilled(model, [1, 2, 3])
    block = random_tokens(model, 4)
    expected = [prefilled(model, [0, 1, *block]), prefilled(model, [1, 2, 3, *block])]
    model.forward([Rows(good, block), Rows(session, block)])
    foreign = TableModel.random(model.vocab_size, order=1).new_session()
    too_long = [0] * (model.max_length + 1 - session.length)
    refused = [
        Rows(session, [model.vocab_size]),
        Rows(session, [0, -1]),
        Rows(session, []),
        Rows(session, [0.5]),  # type: ignore[list-item]
        Rows(session, [True]),
        Rows(session, [[0, 1]]),  # type: ignore[list-item]
        Rows(session, [0, 1], parents=[-1]),
        Rows(session, [0, 1], parents=[-1, 1]),
        Rows(session, [0, 1], parents=[-2, 0]),
        Rows(session, [0, 1], parents=[0, 0]),
        Rows(session, [0], logits="some"),  # type: ignore[arg-type]
        Rows(good, [0]),  # named twice
        Rows(foreign, [0]),
        Rows(session, too_long, logits="none"),
    ]
    for part in refused:
        with pytest.raises(InputError):
            model.forward([Rows(good, [1, 1]), part])
    good.keep(range(4))
    session.keep(range(4))
    assert_same_cache(good, expected[0])
    assert_same_cache(session, expected[1])
    assert foreign.length == 0


def the_context_ends_exactly_at_max_length(model: Model) -> None:
    tokens = random_tokens(model, model.max_length)
    session = prefilled(model, tokens[:-3])
    with pytest.raises(ContextLengthError, match=str(model.max_length)):
        model.forward([Rows(session, [0, 0, 0, 0])])
    output = model.forward([Rows(session, tokens[-3:])])
    session.keep(range(3))
    assert session.length == model.max_length
    with pytest.raises(ContextLengthError, match=str(model.max_length)):
        model.forward([Rows(session, [0])])
    session.rollback(2)
    assert_same_bits(model.forward([Rows(session, tokens[-2:])]).logits, output.logits[1:])


def a_trees_depth_counts_against_the_context(model: Model) -> None:
    if not model.capabilities.tree:
        pytest.skip("the model verifies no trees")
    tokens = random_tokens(model, model.max_length)
    session = prefilled(model, tokens[:-2])
    with pytest.raises(ContextLengthError):
        model.forward([Rows(session, [0, 1, 2], parents=[-1, 0, 1])])
    wide = model.forward([Rows(session, [0, 1, 2, 3, 4], parents=[-1, 0, 0, 0, 0])])
    chain = model.forward([Rows(prefilled(model, tokens[:-2]), [0, 3])])
    assert_same_bits(wide.logits[3], chain.logits[1])
    session.keep([0, 3])
    assert_same_cache(session, prefilled(model, [*tokens[:-2], 0, 3]))


def missing_capabilities_are_refused_by_name(model: Model) -> None:
    session = prefilled(model, [0, 1])
    if not model.capabilities.hidden_states:
        with pytest.raises(CapabilityError, match="hidden_states"):
            model.forward([Rows(session, [0], hidden=(0,))])
    if not model.capabilities.tree:
        with pytest.raises(CapabilityError, match="tree"):
            model.forward([Rows(session, [0, 1, 2], parents=[-1, 0, 0])])
        model.forward([Rows(session, [0, 1, 2], parents=[-1, 0, 1])])
    assert session.length == 2


CHECKS: tuple[Check, ...] = (
    a_new_session_is_empty,
    logits_are_those_asked_for,
    outputs_come_in_the_order_of_their_rows,
    an_output_outlives_the_next_pass,
    tokens_come_in_any_sequence,
    chunks_do_not_matter,
    a_pass_of_any_length_equals_single_steps,
    an_explicit_chain_is_a_chain,
    every_node_of_a_tree_equals_plain_decoding_of_its_path,
    generation_goes_on_after_a_kept_branch,
    other_sessions_in_the_pass_do_not_matter,
    nothing_is_committed_before_keep,
    dropped_nodes_leave_no_trace,
    rollback_is_exact,
    rollback_drops_speculative_nodes,
    rollback_refuses_what_is_not_there,
    forks_go_their_own_ways,
    keep_takes_one_path_from_the_root,
    a_refused_pass_changes_nothing,
    the_context_ends_exactly_at_max_length,
    a_trees_depth_counts_against_the_context,
    missing_capabilities_are_refused_by_name,
)
