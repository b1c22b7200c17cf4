"""The simulator finds bugs: each safeguard, taken out of the shipped code, is missed by a check."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kit.mutants import CONTROL, MUTANTS, NO_CHANGE, SEEDS, Mutant, Worlds, hunt, places

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = {json.dumps(mutant.worlds, sort_keys=True): mutant.worlds for mutant in MUTANTS}


def test_mutants_are_many_and_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    assert places(mutant) == 1, "the code has changed: say anew what to take out of it"
    found = hunt(mutant, mutant.worlds, SEEDS)
    assert found.check, f"it survived {found.worlds} worlds"
    assert found.check in mutant.by.split(), found
    row = f"{mutant.name:52} {mutant.file:24} {found.check:5} after {found.worlds} worlds"
    record_property("mutant", row)


@pytest.mark.parametrize("worlds", KINDS.values(), ids=KINDS)
def test_the_code_as_it_is_survives_the_same_worlds(worlds: Worlds) -> None:
    assert hunt(NO_CHANGE, worlds, CONTROL).check == ""
