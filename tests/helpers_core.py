"""Models, drafters and tokenizers for the tests of the core."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tokenizers
from families import write_tokenizer

from foretell import Draft, Drafter, Engine, Generation, Tokenizer
from foretell._costs import PassCosts
from foretell.backends.table import TableModel, TableSession

# --- Models --------------------------------------------------------------------------


class RecordingTable(TableModel):
    """A table model that remembers its sessions, so that a test can look at a final cache."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sessions: list[TableSession] = []

    def new_session(self) -> TableSession:
        self.sessions.append(super().new_session())
        return self.sessions[-1]


class CountingTable(TableModel):
    """A table model that counts the positions it ran."""

    num_rows = 0

    def forward(self, rows):
        output = super().forward(rows)
        self.num_rows += sum(len(part.tokens) for part in rows)
        return output


def random_table(vocab_size: int, order: int, seed: int, **options) -> RecordingTable:
    rng = np.random.default_rng(seed)
    return RecordingTable(rng.normal(size=(vocab_size,) * (order + 1)), **options)


def successor_table(successors: Sequence[int], **options) -> RecordingTable:
    """A model that says ``successors[t]`` after t."""
    return RecordingTable(np.eye(len(successors))[list(successors)], **options)


def always_wrong(target: TableModel) -> TableModel:
    """A draft model that never says what the target says."""
    return TableModel(-target.table, max_length=target.max_length)


def next_token(model: TableModel, tokens: Sequence[int]) -> int:
    """The target's choice, from its table alone."""
    key = tuple([0] * model.order + list(tokens))[-model.order :]
    return int(np.argmax(model.table[key]))


def continuation(model: TableModel, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(model, tokens))
    return tokens[len(prompt) :]


# --- Costs ---------------------------------------------------------------------------


class GivenCosts(PassCosts):
    """Costs that a test sets: a pass of k rows takes ``one + (k - 1) * more`` seconds."""

    def __init__(self, one: float = 1.0, more: float = 0.0) -> None:
        super().__init__()
        self.one, self.more = one, more
        self.observed: list[tuple[int, float]] = []

    known = True

    def seconds(self, rows, context):
        return self.one + (rows - 1) * self.more

    def curve(self, first, count, context):
        return [self.seconds(rows, context) for rows in range(first, first + count)]

    def age(self, rows):
        return 0.0

    def observe(self, rows, context, seconds):
        self.observed.append((rows, context))


def with_costs(engine: Engine, one: float = 1.0, more: float = 0.0) -> Engine:
    """The engine, deciding by these costs instead of the times of a model that takes none."""
    engine._experience.costs = GivenCosts(one, more)
    return engine


# --- Drafters ------------------------------------------------------------------------


class Scripted(Drafter):
    """Proposes what a function says: ``script(context, limit)``."""

    name = "scripted"

    def __init__(self, script: Callable[[Sequence[int], int], Draft]) -> None:
        self.script = script
        self.observed: list[tuple] = []

    def spawn(self) -> Scripted:
        return Scripted(self.script)

    def propose(self, context, limit):
        return self.script(context, limit)


class Fickle(Drafter):
    """Random trees or chains, of any length from none on, right about as often as wrong.

    It asks the target's table for the right tokens and its own dice for the wrong ones; asked
    twice about the same context, it says different things.
    """

    name = "fickle"

    def __init__(self, target: TableModel, seed: int, *, trees: bool = True) -> None:
        self.target, self.seed, self.trees = target, seed, trees
        self.rng = np.random.default_rng(seed)

    def spawn(self) -> Fickle:
        return Fickle(self.target, self.seed, trees=self.trees)

    def propose(self, context, limit):
        paths: list[list[int]] = [list(context)]
        parents, tokens = [-1], []
        for _ in range(int(self.rng.integers(0, limit + 1))):
            parent = int(self.rng.integers(0, len(paths))) if self.trees else len(tokens)
            path = paths[parent]
            right = self.rng.random() < 0.7
            token = int(self.rng.integers(self.target.vocab_size))
            token = next_token(self.target, path) if right else token
            if [*path, token] in paths:
                continue
            tokens.append(token)
            parents.append(parent)
            paths.append([*path, token])
        return Draft.one_hot(tuple(tokens), tuple(parents) if self.trees else None)


# --- Tokenizers ----------------------------------------------------------------------


def _stand_ins() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(256, 512))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def tokenizer_of(
    pieces: Sequence[bytes],
    special: Sequence[str] = (),
    merges: Sequence[tuple[str, str]] = (),
) -> Tokenizer:
    """A byte-level tokenizer whose token i is ``pieces[i]``; ``special`` tokens come after them.

    Without ``merges`` of ASCII it is for prompts given as ids: it encodes no more than its pieces
    of one byte.
    """
    stand_ins = _stand_ins()
    vocab = {"".join(stand_ins[b] for b in piece): i for i, piece in enumerate(pieces)}
    assert len(vocab) == len(pieces)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=list(merges)))
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    return Tokenizer(inner)


def chat_tokenizer(vocab_size: int = 131) -> Tokenizer:
    """ASCII with <|im_start|> (1) and <|im_end|> (2), and a chat template."""
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab_size)
        return Tokenizer.from_file(Path(folder))


# --- Speculation against plain decoding ----------------------------------------------


def outcome(engine: Engine, prompt: Sequence[int], **options) -> tuple:
    """Everything that speculation must not change: tokens, reason, text, the final cache."""
    engine.model.sessions.clear()
    events = list(engine.stream(prompt, **options))
    result = events[-1].result
    check_events(events, result)
    check_stats(result)
    return (
        result.token_ids,
        result.finish_reason,
        result.text,
        engine.model.sessions[0].keys_values()[0].ravel().tolist(),
    )


def check_events(events, result: Generation) -> None:
    assert [e.token_id for e in events[:-1]] == result.token_ids
    assert [e.origin for e in events[:-1]] == result.origins
    assert "".join(e.text for e in events) == result.text
    assert all(e.result is None and e.finish_reason is None for e in events[:-1])
    assert events[-1].token_id is None
    assert events[-1].finish_reason is result.finish_reason
    steps = [e.step for e in events]
    assert steps == sorted(steps)


def check_stats(result: Generation) -> None:
    """What holds between the numbers of any finished generation."""
    stats, origins = result.stats, result.origins
    assert stats.num_decode_tokens == max(len(result.token_ids) - 1, 0)
    assert stats.num_accepted_tokens == origins.count("draft")
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert stats.num_accepted_tokens_per_pos == sorted(
        stats.num_accepted_tokens_per_pos, reverse=True
    )
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_drafts <= min(stats.num_steps, stats.num_draft_tokens)
    if result.finish_reason != "cancelled":
        assert stats.num_steps <= stats.num_decode_tokens
    assert origins[:1] in ([], ["plain"])


# --- Threads -------------------------------------------------------------------------


@contextmanager
def held_elsewhere(lock: AbstractContextManager[object]) -> Iterator[None]:
    """Another thread holds the lock meanwhile."""
    taken, free = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            free.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    try:
        yield
    finally:
        free.set()
        holder.join()
