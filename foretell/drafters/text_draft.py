"""Drafts with a smaller model of another vocabulary, by way of text."""

from __future__ import annotations

from collections.abc import Sequence

from foretell._draft import Draft, Drafter
from foretell._model import Model, Rows, Session
from foretell._tokenizer import Tokenizer

_TAIL = 8  # tokens in front of new ones that are decoded or encoded with them
_BROKEN = "\ufffd"  # what half a character decodes to


class TextDraft(Drafter):
    """The draft model's own continuation of the text, in the target's tokens.

    The context is decoded and encoded anew in the draft model's vocabulary, whose cache keeps the
    longest common beginning; its greedy continuation goes back the same way. Where the target's
    tokenizer would merge the new text with the context's last token, it is encoded by itself. A
    wrong guess of where tokens end costs time, never a token: nothing is drawn here, and whatever
    is proposed is verified.
    """

    name = "draft_model"

    def __init__(self, model: Model, tokenizer: Tokenizer, target: Tokenizer) -> None:
        model.capabilities.require("rollback")
        self._model, self._tokenizer, self._target = model, tokenizer, target
        self._known = min(model.vocab_size, tokenizer.vocab_size)
        self._session: Session | None = None
        self._cached: list[int] = []

    def spawn(self) -> TextDraft:
        return TextDraft(self._model, self._tokenizer, self._target)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        text = self._target.decode(list(context), skip_special_tokens=False)
        if not text or text.endswith(_BROKEN):
            return Draft.empty()
        ids = self._tokenizer.encode(text, add_special_tokens=True)
        if not ids or max(ids) >= self._model.vocab_size:
            return Draft.empty()
        new = self._continue(ids, limit)
        if not new:
            return Draft.empty()
        tail = ids[-_TAIL:]
        before = self._tokenizer.decode(tail, skip_special_tokens=True)
        after = self._tokenizer.decode([*tail, *new], skip_special_tokens=True)
        added = after.removeprefix(before).rstrip(_BROKEN) if after.startswith(before) else ""
        return Draft.one_hot(self._in_target(context, added)[:limit]) if added else Draft.empty()

    def _continue(self, ids: list[int], limit: int) -> list[int]:
        """At most ``limit`` tokens that the draft model says after ``ids``."""
        limit = min(limit, self._model.max_length - len(ids) + 1)
        if limit < 1:
            return []
        if self._session is None:
            self._session = self._model.new_session()
        session, common = self._session, 0
        longest = min(len(self._cached), len(ids) - 1)
        while common < longest and self._cached[common] == ids[common]:
            common += 1
        session.rollback(session.length - common)
        del self._cached[common:]
        new: list[int] = []
        feed = ids[common:]
        while True:
            output = self._model.forward([Rows(session, feed, logits="last")])
            session.keep(range(len(feed)))
            self._cached += feed
            token = int(output.logits[0, : self._known].argmax())
            if token in self._model.eos_token_ids:
                return new
            new.append(token)
            if len(new) == limit:
                return new
            feed = [token]

    def _in_target(self, context: Sequence[int], added: str) -> list[int]:
        """The target's tokens for text behind the context."""
        tail = list(context[-_TAIL:])
        text = self._target.decode(tail, skip_special_tokens=False)
        together = self._target.encode(text + added, add_special_tokens=False)
        if together[: len(tail)] == tail:
            return together[len(tail) :]
        return self._target.encode(added, add_special_tokens=False)
