"""The tool that makes mutants: which code it changes, which it leaves alone, and that mutants are
caught."""

from __future__ import annotations

from functools import cache

import pytest

from mutation.accepted import ACCEPTED
from mutation.mutants import PACKAGE, Mutant, draw, every_mutant, is_valid, mutants_of
from mutation.reach import imports, scripts_with, sends, simulate, uses

PYTHON = '''"""A docstring, with 1 number."""

LIMIT = 3  # a comment, with 2 numbers
__slots__ = ("one", "two")


async def wait(self, left: tuple[int, float]) -> bool:
    """Another docstring."""
    await self.port.sleep(left, self.rate)
    self.state = self.next
    while left <= 0.5 and not self.over:
        try:
            left = max(left - 1, key=min)
        except (KeyError, OSError):
            continue
    if left is None:
        raise ValueError(f"{left - 1} is left of {self.name}")
    return self.state in self.known
'''

LUA = """-- if a == 1 then
local holder = call('GET', KEYS[1])
if holder and left <= 250 then
  call('DEL', lock)
  call('SET', lock, token, 'NX', 'PX', ARGV[2])
end
return '1' .. serial
"""


@cache
def changed(file: str, text: str) -> frozenset[str]:
    """Return every line that a mutant has in place of another one."""
    found = [mutant.diff.splitlines() for mutant in mutants_of(file, text) if is_valid(mutant)]
    lines = (line for diff in found for line in diff if line.startswith("+"))
    return frozenset(line.removeprefix("+ ") for line in lines)


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    """Every mutant of the package."""
    return every_mutant()


@pytest.mark.parametrize(
    "line",
    [
        "LIMIT = 4  # a comment, with 2 numbers",
        "await self.port.sleep(self.rate, left)",
        "pass",
        "while left < 0.5 and not self.over:",
        "while left <= 0.0 and not self.over:",
        "while left <= 0.5 or not self.over:",
        "while left <= 0.5 and (self.over):",
        "while ((left <= 0.5)):",
        "while True:",
        "left = min(left - 1, key=min)",
        "left = max(left + 1, key=min)",
        "left = max(left - 2, key=min)",
        "left = max(left - 1, )",
        "except (KeyError,):",
        "break",
        "if left is not None:",
        "if False:",
        "return self.state not in self.known",
        "return None",
    ],
)
def test_python_is_changed_by_each_operator(line: str) -> None:
    assert line in changed("core/sample.py", PYTHON)


def test_docstrings_annotations_comments_and_messages_are_not_changed() -> None:
    for line in changed("core/sample.py", PYTHON):
        assert not any(text in line for text in ("docstring", "__slots__", "async def", "raise"))
        assert "#" not in line or line.endswith("# a comment, with 2 numbers")


@pytest.mark.parametrize(
    "line",
    [
        "local holder = nil",
        "local holder = call('GET', KEYS[2])",
        "if holder or left <= 250 then",
        "if holder and left < 250 then",
        "if holder and left <= 0 then",
        "if not (holder and left <= 250) then",
        "if false then",
        "call('SET', lock, token, 'PX', ARGV[2])",
        "call('SET', lock, token, 'NX', 'PX', ARGV[3])",
        "return '0' .. serial",
    ],
)
def test_lua_is_changed_by_each_operator(line: str) -> None:
    assert line in changed("scripts/sample.lua", LUA)


def test_two_statements_of_a_script_are_swapped() -> None:
    (mutant,) = (
        each
        for each in mutants_of("scripts/sample.lua", LUA)
        if each.change.operator == "swap two statements"
    )
    assert mutant.new.index("'SET'") < mutant.new.index("'DEL'")


def test_a_comment_has_no_mutant() -> None:
    assert mutants_of("scripts/sample.lua", "-- if a == 1 then\n  --:include _fence\n") == []
    assert mutants_of("core/sample.py", "# 1\n'''2'''\n") == []


def test_a_script_that_does_not_compile_is_discarded() -> None:
    script = "local left = 1 -1\n"
    found = mutants_of("scripts/sample.lua", script)
    broken = found[0]._replace(change=found[0].change._replace(new="= = nil"))
    assert is_valid(found[0])
    assert not is_valid(broken)
    assert list(draw([broken, found[0]], 2, seed=1)) == [found[0]]


def test_the_same_seed_draws_the_same_sample(mutants: list[Mutant]) -> None:
    assert {mutant.file.split("/")[0] for mutant in mutants} == {"core", "scripts"}
    sample = [mutant.key for mutant in draw(mutants, 20, seed=1)]
    assert sample == [mutant.key for mutant in draw(mutants, 20, seed=1)]
    assert len(set(sample)) == 20
    assert sample != [mutant.key for mutant in draw(mutants, 20, seed=2)]


def test_a_result_is_kept_while_its_function_stays_the_same() -> None:
    def keys(text: str) -> list[str]:
        return [mutant.key for mutant in mutants_of("core/sample.py", text)]

    below = PYTHON + "\n\ndef more() -> int:\n    return 1\n"
    assert set(keys(PYTHON)) <= set(keys(below.replace("LIMIT = 3", "\nLIMIT = 3")))
    assert not set(keys(PYTHON)[5:]) & set(keys(PYTHON.replace("self.next", "self.last")))


def test_an_included_file_is_tested_through_each_script_that_includes_it() -> None:
    assert scripts_with("release") == ["release", "resign"]
    assert scripts_with("acquire") == ["acquire", "campaign", "claim", "start"]
    assert {"acquire", "release"} <= set(scripts_with("_hand_over"))
    assert set(scripts_with("_hand_over")) <= set(scripts_with("_notify"))


def test_tests_that_send_a_script_are_run_for_its_mutants() -> None:
    assert sends("tests/test_scripts_release.py", ["RELEASE", "EVICT"])
    assert not sends("tests/test_scripts_release.py", ["VOTE"])
    assert not sends("tests/test_evict.py", ["EVICT"])  # sends it through a client


def test_tests_that_import_a_module_are_run_for_its_mutants() -> None:
    assert imports("tests/test_waiter_channel.py", "core/waiter_channel.py")
    assert not imports("tests/test_waiter_channel.py", "core/lease_state.py")


def test_uses_of_a_name_include_uses_of_names_that_depend_on_it() -> None:
    assert "core/lease_state.py" in {file for file, _ in uses("RENEW")}
    assert "core/server_acquire.py" in {file for file, _ in uses("ACQUIRE")}, (
        "through LockSpec.acquire_script"
    )


def test_each_accepted_survivor_is_still_a_mutant(mutants: list[Mutant]) -> None:
    """If this fails, the code has changed: update the entry in tests/mutation/accepted.py or remove
    it."""
    names = {mutant.name for mutant in mutants}
    assert [accepted for accepted in ACCEPTED if accepted[:-1] not in names] == []


def planted(file: str, function: str, line: str) -> Mutant:
    (mutant,) = (
        each
        for each in mutants_of(file, (PACKAGE / file).read_text())
        if each.change.place.function == function and f"\n+ {line}" in each.diff
    )
    return mutant


@pytest.mark.parametrize(
    ("file", "function", "line"),
    [
        ("core/lease_state.py", "LeaseState.is_valid", "return None"),
        pytest.param(
            "scripts/release.lua",
            "",
            "was_held = not over and mode ~= 'leave' or has_hold(holder, token)",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_simulator_detects_a_planted_mutant(file: str, function: str, line: str) -> None:
    mutant = planted(file, function, line)
    work = {"file": file, "old": mutant.old, "seeds": list(range(300)), "replay": True}
    assert simulate({**work, "new": mutant.new})["check"]
    assert not simulate({**work, "new": mutant.old, "seeds": [0, 1]})["check"]
