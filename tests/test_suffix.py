"""The suffix drafter: what it finds, what it says of it, and what it keeps of whom."""

from __future__ import annotations

import hashlib
import json
import threading
from heapq import heappop, heappush
from itertools import chain, product

import numpy as np
import pytest
from helpers_core import random_table
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import Engine, InputError, OptionError
from foretell import _occurrences as kernel
from foretell._occurrences import LONGEST_MATCH, MOST_NODES, MOST_PLACES, NGRAMS
from foretell.drafters.suffix import SMALLEST_CHARGE, NgramIndex, Suffix, SuffixMemory

few_tokens = st.lists(st.integers(0, 2), max_size=60)


def filled(*texts, owner="", max_tokens=4096):
    memory = SuffixMemory(max_tokens)
    for text in texts:
        memory.add(text, owner)
    return memory


def suggest(context, limit=8, memory=None, owner=""):
    drafter = Suffix(memory, owner)
    drafter.start(context)
    return drafter.suggest(context, limit)


def paths(proposal):
    """Every path from the root to a leaf, as tokens."""
    found = []

    def walk(node, path):
        following = proposal.children[node]
        if not following and path:
            found.append(path)
        for position in following:
            walk(position + 1, [*path, proposal.tokens[position]])

    walk(0, [])
    return found


# --- Where n-grams occur -------------------------------------------------------------


def naive_places(tokens, tail):
    """Look at every place: (match, next), as the index promises to find them."""
    occurrences = {}
    for n in NGRAMS:
        ends = [
            end
            for end in range(n - 1, len(tokens) - 1)
            if len(tail) >= n and tokens[end + 1 - n : end + 1] == tail[-n:]
        ]
        for end in ends[::-1][:MOST_PLACES]:
            if tokens[end + 1] == kernel.SEPARATOR:
                continue
            match = 0
            while match < min(len(tail), end + 1, LONGEST_MATCH):
                if tokens[end - match] != tail[-1 - match]:
                    break
                match += 1
            occurrences.setdefault(end, match)
        if len(occurrences) >= MOST_PLACES:
            break
    found = sorted(occurrences.items(), key=lambda item: -item[1])
    return [(match, end + 1) for end, match in found][:MOST_PLACES]


ROOM = 1 << 16  # enough for the n-grams of three tokens to have hashes of their own


def table_of(tokens, room=0):
    index = NgramIndex(room)
    index.extend(tokens)
    return index


def places(tail, index):
    """What the drafter's inner part finds in the index for the end of ``tail``, uncompiled."""
    matches, starts = [np.empty(MOST_PLACES + 1, np.int64) for _ in range(2)]
    count = kernel._find(table_of(tail).table, index.table, matches, starts)
    return list(zip(matches[:count].tolist(), starts[:count].tolist(), strict=True))


def test_no_two_ngrams_of_three_tokens_share_a_hash_in_the_next_test():
    index = table_of([], ROOM)
    buckets = int(index.table[2])
    for n in NGRAMS:
        hashes = set()
        for ngram in product(range(3), repeat=n):
            hashes.add(kernel._bucket(table_of(ngram).table, n - 1, n, buckets))
        assert len(hashes) == 3**n


@settings(deadline=None)
@given(few_tokens, st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_the_index_finds_what_looking_everywhere_finds(tokens, tail):
    assert places(tail, table_of(tokens, ROOM)) == naive_places(tokens, tail[-LONGEST_MATCH:])


@settings(deadline=None)
@given(few_tokens.filter(bool))
def test_ngrams_that_share_a_hash_are_told_apart(tokens):
    for match, start in places(tokens, table_of(tokens)):
        assert start < len(tokens)
        assert tokens[start - match : start] == tokens[-match:]


@settings(deadline=None)
@given(few_tokens, st.lists(st.integers(1, 9), max_size=20), st.integers(60, 300))
def test_an_index_that_grew_token_by_token_equals_one_made_at_once(tokens, steps, room):
    grown, whole = NgramIndex(room), NgramIndex(room)
    done = 0
    for step in [*steps, len(tokens)]:
        grown.extend(tokens[done : done + step])
        done = min(done + step, len(tokens))
    whole.extend(tokens)
    assert grown.tokens.tolist() == whole.tokens.tolist() == tokens
    assert places(tokens, grown) == places(tokens, whole)


def test_tables_that_grow_lose_nothing():
    tokens = [token % 37 for token in range(4000)]
    index = NgramIndex()
    for token in tokens:
        index.extend([token])
    assert places(tokens, index) == [
        (LONGEST_MATCH, 4000 - 37 * i) for i in range(1, MOST_PLACES + 1)
    ]


@given(st.integers(0, 3000))
def test_memory_is_what_was_stated(count):
    index = NgramIndex()
    index.extend(range(count))
    assert index.num_bytes <= 4 * 3 * 64 + 40 * count


# --- What follows ---------------------------------------------------------------------


def naive_follow(places, limit):
    """The tree by its definition, with dictionaries: (token, parent, evidence, probability)."""
    nodes, heap, arrivals = [], [], 0
    path, ahead = -1.0, 0
    while True:
        groups = {}
        for match, text, start in places:
            if start + ahead < len(text) and text[start + ahead] >= 0:
                groups.setdefault(text[start + ahead], []).append((match, text, start))
        total = sum(2.0**match for group in groups.values() for match, _, _ in group)
        found = []
        for token, group in groups.items():
            length = kernel.LENGTH_CLASS[min(group[0][0] + ahead, LONGEST_MATCH)]
            share = sum(2.0**match for match, _, _ in group) / total
            row = 3 if share > 0.99 else 2 if share > 0.5 else 1 if share > 0.2 else 0
            found.append((token, group, 8 * length + 2 * row + (len(group) > 1)))
        most = 0.0
        for _, _, evidence in found:
            most += float(kernel.ESTIMATES[evidence])
        for token, group, evidence in found:
            chance = float(kernel.ESTIMATES[evidence]) / max(1.0, most)
            if path * chance <= -kernel.LEAST_PATH_PROBABILITY:
                arrivals += 1
                node = (token, len(nodes), evidence, chance)
                heappush(heap, (path * chance, arrivals, ahead + 1, node, group))
        if not heap or len(nodes) >= limit:
            return nodes
        path, _, ahead, node, places = heappop(heap)
        nodes.append(node)


def naive_suggest(own, theirs, limit):
    found = [(match, own, start) for match, start in naive_places(own, own[-LONGEST_MATCH:])]
    found += [(match, theirs, start) for match, start in naive_places(theirs, own[-LONGEST_MATCH:])]
    found.sort(key=lambda place: -place[0])
    return naive_follow(found[:MOST_PLACES], limit)


def suggested(function, own, theirs, limit):
    """What the compiled or the uncompiled function says, and the table it leaves."""
    index = NgramIndex(ROOM)
    index.write(own)
    nodes, chances = np.empty(1 + 3 * MOST_NODES, np.int32), np.empty(MOST_NODES)
    count = function(index.table, theirs.table, len(own), limit, nodes, chances)
    found = nodes[1 : 1 + 3 * count].reshape(-1, 3).tolist()
    return (
        [(*node, chance) for node, chance in zip(found, chances[:count].tolist(), strict=True)],
        index.table.tolist(),
        int(nodes[0]),
    )


repetitive = st.lists(few_tokens, max_size=4).flatmap(
    lambda parts: (
        st.lists(st.sampled_from(parts), max_size=12).map(lambda some: [*chain(*some)])
        if parts
        else st.just([])
    )
)


@settings(deadline=None)
@given(repetitive | few_tokens, repetitive | few_tokens, st.integers(0, 40))
def test_compiled_uncompiled_and_by_definition_it_says_the_same(own, theirs, limit):
    memory = [*theirs, -1, *theirs[:5], -1] if theirs else []
    there = table_of(memory, ROOM)
    compiled = suggested(kernel.compiled(), own, there, limit)
    assert compiled == suggested(kernel.suggest, own, there, limit)
    assert compiled[0] == naive_suggest(own, memory, limit)


def test_a_long_text_with_quotations_is_no_other_matter():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 300, 3000).tolist()
    while len(text) < 4000:
        start, length = int(rng.integers(len(text) - 40)), int(rng.integers(3, 40))
        text += text[start : start + length]
    nothing = NgramIndex()
    drafted = 0
    for length in range(3000, 4000, 97):
        compiled = suggested(kernel.compiled(), text[:length], nothing, 16)
        assert compiled == suggested(kernel.suggest, text[:length], nothing, 16)
        drafted += len(compiled[0])
    assert drafted > 20


def test_no_draft_is_longer_than_there_is_room_for():
    texts = [[*range(20), *range(100 * part, 100 * part + 400)] for part in range(1, 9)]
    proposal = suggest([*chain(*texts), *texts[0][:20]], 10**9)
    assert 50 < len(proposal) <= MOST_NODES


# --- Drafts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [[3, 4, 9, 1, 2]]),
        ([1, 2, 3, 4], []),
        ([7], []),
        ([5, 5], [[5]]),
    ],
)
def test_it_continues_as_it_went_on_before(context, expected):
    assert paths(suggest(context)) == expected


def test_where_the_text_went_on_in_two_ways_the_draft_is_a_tree():
    proposal = suggest([1, 2, 3, 8, 1, 2, 4, 9, 1, 2])
    assert sorted(path[0] for path in paths(proposal)) == [3, 4]


def test_a_longer_match_outvotes_several_shorter_ones():
    proposal = suggest([1, 2, 3, 4, 7, 9, 4, 8, 9, 4, 8, 1, 2, 3, 4])
    assert proposal.tokens[0] == 7
    assert proposal.kinds[0] == "4 tokens match, mostly so, once"


def test_agreement_of_all_places_is_evidence():
    proposal = suggest([1, 2, 9, 1, 2, 9, 1, 2])
    assert proposal.tokens[:1] == (9,)
    assert proposal.kinds[0] == "5-6 tokens match, always so"
    once = suggest([1, 2, 9, 1, 2])
    assert once.kinds[0] == "2 tokens match, always so, once"
    assert once.probabilities[0] < proposal.probabilities[0]


@settings(deadline=None)
@given(few_tokens.filter(bool), few_tokens, st.integers(0, 12))
def test_proposals_are_valid_and_keep_to_the_limit(context, earlier, limit):
    memory = filled(earlier)
    proposal = suggest(context, limit, memory)  # checks its own shape and probabilities
    assert len(proposal) <= limit
    draft = proposal.draft()
    assert draft.tokens == proposal.tokens
    assert all(token in context + earlier for token in draft.tokens)
    for following in proposal.children:
        assert sum(proposal.probabilities[i] for i in following) <= 1 + 1e-9


@settings(deadline=None)
@given(few_tokens.filter(bool), st.lists(st.integers(1, 5), min_size=1, max_size=10))
def test_a_drafter_that_followed_along_says_what_a_new_one_says(tokens, steps):
    drafter = Suffix()
    drafter.start(tokens[:1])
    length = 1
    for step in steps:
        followed = drafter.suggest(tokens[:length], 6)
        fresh = Suffix()
        fresh.start(tokens[:1])
        assert followed == fresh.suggest(tokens[:length], 6)
        length += step


def test_the_output_is_that_of_plain_decoding():
    engine = Engine(random_table(6, 2, seed=3), drafters=[Suffix(filled([1, 2, 3, 4]))])
    plain = engine.generate([1, 2], num_draft_tokens=0, max_tokens=60)
    result = engine.generate([1, 2], num_draft_tokens=6, max_tokens=60)
    assert result.token_ids == plain.token_ids
    assert result.stats.num_accepted_tokens > 10  # a table repeats itself


def test_a_new_request_begins_with_nothing():
    drafter = Suffix()
    drafter.start([1, 2, 3, 1, 2])
    drafter.suggest([1, 2, 3, 1, 2], 4)
    drafter.start([1, 2])
    assert len(drafter.suggest([1, 2], 4)) == 0
    assert len(drafter.spawn().suggest([1, 2], 4)) == 0


# --- Earlier outputs -----------------------------------------------------------------


def test_what_was_said_to_the_same_owner_is_drafted_again():
    memory = SuffixMemory()
    drafter = Suffix(memory, "ann")
    drafter.start([1, 2])
    drafter.finish([1, 2, 5, 6, 7, 8])
    assert memory.texts("ann") == [[5, 6, 7, 8]]
    assert paths(suggest([9, 5, 6], memory=memory, owner="ann")) == [[7, 8]]


def test_nothing_is_drafted_from_another_owners_texts():
    memory = filled([5, 6, 7, 8], owner="ann")
    assert len(suggest([9, 5, 6], memory=memory, owner="bob")) == 0
    assert len(suggest([9, 5, 6], memory=memory)) == 0
    assert len(Suffix(memory, "ann").for_owner("bob").suggest([9, 5, 6], 4)) == 0
    assert memory.texts("bob") == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), few_tokens), max_size=12), few_tokens)
def test_an_owner_sees_the_same_whoever_else_there_is(texts, context):
    both, alone = SuffixMemory(), SuffixMemory()
    for owner, text in texts:
        both.add([token + 10 * (owner == "b") for token in text], owner)
        if owner == "a":
            alone.add(text, owner)
    context = [*context, 1]
    assert suggest(context, memory=both, owner="a") == suggest(context, memory=alone, owner="a")


def test_a_draft_does_not_run_from_one_text_into_the_next():
    memory = filled([1, 2, 3], [4, 5, 6])
    assert paths(suggest([1, 2], memory=memory)) == [[3]]
    assert len(suggest([2, 3], memory=memory)) == 0
    assert len(suggest([9, 3, 4], memory=filled([3], [4, 5]))) == 1  # 4 alone matches


def test_the_text_not_used_for_longest_goes_first():
    memory = SuffixMemory(4 * 100)
    for name in range(4):
        memory.add([name] * 100, "ann")
    assert len(suggest([7, 0], memory=memory, owner="ann")) > 0  # uses the oldest
    memory.add([4] * 100, "bob")
    assert [text[0] for text in memory.texts("ann")] == [2, 3, 0]
    assert [text[0] for text in memory.texts("bob")] == [4]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400), st.booleans()), max_size=40),
    st.integers(SMALLEST_CHARGE, 900),
)
def test_memory_is_bounded_and_holds_the_last_texts_whole(steps, max_tokens):
    memory = SuffixMemory(max_tokens)
    expected = []  # (owner, text), used last at the end
    for number, (owner, length, look) in enumerate(steps):
        if look:
            mine = [text for text in expected if text[0] == owner]
            if mine and suggest([99999, mine[0][1][0]], memory=memory, owner=owner):
                expected.remove(mine[0])
                expected.append(mine[0])
        text = list(range(1000 * number, 1000 * number + length))[-max_tokens:]
        memory.add(text, owner)
        if text:
            expected.append((owner, text))
        while sum(max(len(text), SMALLEST_CHARGE) for _, text in expected) > max_tokens:
            expected.pop(0)
        for name in "abc":
            assert memory.texts(name) == [text for of, text in expected if of == name]
        assert memory.num_tokens == sum(len(text) for _, text in expected)
        assert memory.num_bytes <= 100 * max_tokens


def test_looking_up_and_adding_from_many_threads():
    memory = SuffixMemory(2000)
    failures = []

    def work(name):
        try:
            base = 100 * ord(name)
            for turn in range(60):
                memory.add([base + i % 50 for i in range(turn, turn + 90)], name)
                proposal = suggest([base + 3, base + 4], memory=memory, owner=name)
                assert all(token // 100 == ord(name) for token in proposal.tokens)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("tokens", [[-1], [3, -2, 4]])
def test_only_real_tokens_are_remembered(tokens):
    with pytest.raises(InputError, match="is negative"):
        SuffixMemory().add(tokens)


def test_a_memory_too_small_for_any_text_is_refused():
    with pytest.raises(OptionError, match="use 64 or more"):
        SuffixMemory(10)


# --- On disk -------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.text(max_size=3), few_tokens), max_size=8))
def test_a_saved_memory_comes_back_as_it_was(tmp_path_factory, texts):
    memory = SuffixMemory(model="demo")
    for owner, text in texts:
        memory.add(text, owner)
    path = tmp_path_factory.mktemp("memory") / "suffix.json"
    memory.save(path)
    again = SuffixMemory.load(path, model="demo")
    for owner, _ in texts:
        assert again.texts(owner) == memory.texts(owner)
    assert list(path.parent.iterdir()) == [path]
    again.save(path.with_name("again"))
    assert path.with_name("again").read_bytes() == path.read_bytes()


def test_with_less_room_the_texts_used_last_are_loaded(tmp_path):
    filled([1] * 70, [2] * 70, [3] * 70).save(tmp_path / "m")
    assert SuffixMemory.load(tmp_path / "m", 140).texts() == [[2] * 70, [3] * 70]


def test_any_damage_is_noticed(tmp_path):
    path = tmp_path / "m"
    filled([1, 2, 3], [4, 5]).save(path)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole) - 1, 7)]
    damaged += [
        whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :] for at in range(len(whole) - 1)
    ]
    for content in [*damaged, b"\xff\xfe\x00", b"{}", b"hello\n"]:
        path.write_bytes(content)
        with pytest.raises(InputError, match="damaged or not a saved suffix memory; delete it"):
            SuffixMemory.load(path)


def test_tokens_of_another_model_are_not_loaded(tmp_path):
    SuffixMemory(model="small").save(tmp_path / "m")
    with pytest.raises(InputError, match="of the model 'small', not of 'large'"):
        SuffixMemory.load(tmp_path / "m", model="large")


def test_another_format_is_not_guessed_at(tmp_path):
    body = json.dumps({"format": "something else 2"})
    digest = hashlib.sha256(body.encode()).hexdigest()
    (tmp_path / "m").write_text(f"{digest}\n{body}\n")
    with pytest.raises(InputError, match="another format"):
        SuffixMemory.load(tmp_path / "m")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m"
    filled([1, 2]).save(path)
    monkeypatch.setattr("pathlib.Path.replace", lambda self, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        filled([3, 4]).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert SuffixMemory.load(path).texts() == [[1, 2]]
