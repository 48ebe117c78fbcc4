"""The table model keeps the contract of a Model; and the contract notices broken ones."""

from __future__ import annotations

import inspect

import model_contract
import numpy as np
import pytest

from foretell import Capabilities, CapabilityError, InputError, Output, Rows
from foretell.backends.table import TableModel, TableSession


@pytest.mark.parametrize("check", model_contract.CHECKS, ids=model_contract.name)
@pytest.mark.parametrize("order", [1, 3])
def test_table_model(check, order):
    check(TableModel.random(5, order, max_length=48))


@pytest.mark.parametrize("check", model_contract.CHECKS, ids=model_contract.name)
def test_table_model_that_verifies_no_trees(check):
    table = TableModel.random(5, 2).table
    check(TableModel(table, max_length=48, capabilities=Capabilities(tree=False)))


def test_every_check_is_listed():
    defined = [
        check
        for name, check in inspect.getmembers(model_contract, inspect.isfunction)
        if list(inspect.signature(check).parameters) == ["model"]
    ]
    assert set(defined) == set(model_contract.CHECKS)


def test_check_contract_runs_them_all():
    model_contract.check_contract(lambda: TableModel.random(5, 2, max_length=48))


# Each of these breaks one promise, and the named check must notice.


class RowsDependOnTheirNumber(TableModel):
    def forward(self, rows):
        output = super().forward(rows)
        if len(output.logits) == 4:
            return Output(np.nextafter(output.logits, np.float32(9)), bounds=output.bounds)
        return output


class KeepsEverything(TableModel):
    def new_session(self):
        return SessionThatKeepsEverything(self)


class SessionThatKeepsEverything(TableSession):
    def keep(self, nodes):
        super().keep(nodes if len(nodes) == 0 else range(len(self.pending)))


class RunsBeforeItChecks(TableModel):
    def forward(self, rows):
        for part in rows:
            if isinstance(part.session, TableSession) and part.session.model is self:
                part.session.append(part.tokens, None)
        return super().forward(rows)


class ForksAreTheSameSession(TableModel):
    def new_session(self):
        return SessionThatForksToItself(self)


class SessionThatForksToItself(TableSession):
    def fork(self):
        return self


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (RowsDependOnTheirNumber, model_contract.a_pass_of_any_length_equals_single_steps),
        (KeepsEverything, model_contract.dropped_nodes_leave_no_trace),
        (RunsBeforeItChecks, model_contract.a_refused_pass_changes_nothing),
        (ForksAreTheSameSession, model_contract.forks_go_their_own_ways),
    ],
)
def test_a_broken_model_is_noticed(broken, check):
    with pytest.raises((AssertionError, InputError, pytest.fail.Exception)):
        check(broken(TableModel.random(5, 2).table, max_length=48))


def test_without_rollback_nothing_can_be_dropped():
    model = TableModel(TableModel.random(5, 1).table, capabilities=Capabilities(rollback=False))
    session = model.new_session()
    model.forward([Rows(session, [0, 1, 2])])
    with pytest.raises(CapabilityError, match="rollback"):
        session.keep([0])
    session.keep([0, 1, 2])
    with pytest.raises(CapabilityError, match="rollback"):
        session.rollback(1)
    session.rollback(0)
    assert session.length == 3
