"""LOSS: a lease is `after_loss` exactly if a lease before it ended without a release.

The checks follow the holders in the lock's keys, and know which leases a user has had. On several
nodes a loss may be reported twice, after a fault; it is never missed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.fence import is_after_loss
from holdfast.core.lease_state import LOST, RELEASED
from holdfast.sim.checks.record import is_joined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.core.lease_state import LeaseState
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun


class LossCheck:
    """How the last lease of one lock ended, on one server."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._lost: bool | None = False
        """The next lease is `after_loss`. None: either is right (see `_keeps_loss`)."""
        self._fence = 0
        """That of the last lease; 0 if it is not known."""

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script. Check the fence that it granted."""
        after = run.after
        if run.before.fence is None:  # nothing is known about earlier leases
            self._lost = run.before.holder is not None
            self._fence = 0
        if not run.changed_holder or run.script == "adopt":
            return
        if self._is_release(run):
            self._lost = _keeps_loss(self._record, run.args[0], self._fence)
        if after.holder is not None:
            self._granted(after.holder.decode(), int(after.fence or 0))

    def _is_release(self, run: ScriptRun) -> bool:
        """Whether a script released the lock, which was not lost before."""
        before, token = run.before, run.args[0].encode()
        if run.script != "release" or before.holder is None or "lost" in "".join(run.args[2:3]):
            return False
        delay_ms = int(self._record.settings.lock_delay * 1000)
        over = 0 <= before.left_ms <= delay_ms
        if over and not delay_ms:  # in its last ms, what the client receives counts
            over = (run.reply if isinstance(run.reply, list) else [run.reply])[:1] != [1]
        return not over and (before.holder == token or is_joined(before.holder, token))

    def _granted(self, token: str, fence: int) -> None:
        self._fence = fence
        if self._lost is not None:
            _check(self._record, fence, token, lost=self._lost)
        self._lost = True


class SharedLossCheck:
    """How the leases of a semaphore or an rwlock have ended since the last grant."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._lost: bool | None = False
        """As that of a lock."""
        self._holders: dict[str, int] = {}
        """The tokens with permits, and the first fence of each lease; 0 if it is not known."""

    def ran(self, run: ScriptRun, fences: Sequence[tuple[int, str]]) -> None:
        """A server ran a script, which granted these fences. Check them."""
        before, after = _names(run.before.permits), _names(run.after.permits)
        if run.before.fence is None:
            self._lost, self._holders = False, dict.fromkeys(before, 0)
        for token in [each for each in self._holders if each not in before]:
            del self._holders[token]
            self._lost = True
        for token in before - after:
            self._ended(run, token)
        for fence, token in sorted(fences):
            if token in self._holders:  # a retry or a confirmation
                _check(self._record, fence, token, lost=is_after_loss(self._holders[token]))
            elif token in after:
                if self._lost is not None:
                    _check(self._record, fence, token, lost=self._lost)
                self._lost, self._holders[token] = False, fence

    def _ended(self, run: ScriptRun, token: str) -> None:
        fence = self._holders.pop(token, 0)
        if run.script == "downgrade":
            self._holders[run.args[0]] = fence
        elif run.script != "release" or "lost" in "".join(run.args[2:3]):
            self._lost = True
        elif not self._lost:
            kept = _keeps_loss(self._record, token, fence)
            if kept or self._lost is not None:
                self._lost = kept


class QuorumLossCheck:
    """The last lease of a lock on several nodes."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._last: LeaseState | None = None
        self._any_lost = False
        """A lease was lost. A node that missed the release of the next one may report it again."""

    def granted(self, lease: LeaseState) -> None:
        """A lease begins. Check that it reports the loss of the last one."""
        record, last = self._record, self._last
        if last is not None and last.fence >= lease.fence:
            return
        self._last = lease
        record.reached["a lease after a loss"] += lease.after_loss
        if last is None or record.untrusted or record.settings.wipe:
            return
        if last not in record.releasing and not lease.after_loss:
            record.fail("LOSS", f"{lease.token} does not know that {last.token} was lost")
        exact = record.settings.calm and not self._any_lost
        self._any_lost = self._any_lost or last.state is not RELEASED
        if last.state is RELEASED and exact and lease.after_loss:
            record.fail("LOSS", f"{lease.token} is after a loss, and {last.token} was released")


def _names(permits: Mapping[bytes, int]) -> set[str]:
    return {token.decode() for token in permits}


def _keeps_loss(record: Record, token: str, fence: int) -> bool | None:
    """Whether the next lease is after a loss, although this one is released on the server.

    Its client has reported it as lost, or no user has had it, and it is after a loss itself.

    None: a late request was granted the lock to a token of which a user has had an earlier lease.
    The release depends on what that lease has reported, so the loss is kept or not.
    """
    _, lease = record.last_leases.get(token, (None, None))
    if lease is not None and lease.state is LOST and lease.fence >= fence:
        return True
    if not is_after_loss(fence):
        return False
    if not record.was_seen(token):
        record.reached["a loss that no user has seen, kept"] += 1
        return True
    return False if record.last_leases[token][1].fence >= fence else None


def _check(record: Record, fence: int, token: str, *, lost: bool) -> None:
    record.reached["a lease after a loss"] += lost
    if is_after_loss(fence) != lost and not record.may_have_lost_writes:
        which = "was" if lost else "was not"
        record.fail("LOSS", f"fence {fence} of {token}: the lease before it {which} lost")
