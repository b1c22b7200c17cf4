"""The guard for SQL databases: a table with the newest fence of each resource.

Rules:

- The check and the caller's write are in one transaction, which the caller begins and commits.
- The check is one upsert. It locks the row of its resource until the transaction ends. So two
  transactions with the same resource run one after the other, and the second one sees the fence of
  the first: in PostgreSQL it waits, in SQLite it waits or fails with "database is locked".
- The guard commits nothing, and rolls nothing back.
- A rollback to an earlier savepoint undoes the check. The caller then checks again before writing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.guards.connections import database_of, is_outside_transaction, means_missing_table
from holdfast.guards.fence import fence_of, has_fence, stale

if TYPE_CHECKING:
    from holdfast.guards.connections import Connection
    from holdfast.guards.fence import HasFence

_TABLE = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)?", re.ASCII | re.IGNORECASE)


class SQL:
    """Refuses late writes to a database that has INSERT … ON CONFLICT: PostgreSQL, SQLite.

    Example:
        guard = holdfast.guards.SQL("holdfast_fences")

        with client.lock("invoice:42") as lease, engine.begin() as connection:
            guard.check(connection, lease)
            connection.execute(update(invoice).where(invoice.c.id == 42).values(total=100))

    A guard has no state: one for the whole program is enough, and threads may share it.

    Args:
        table: the table of the fences, with its schema if necessary. `create_table` creates it.

    Raises:
        ConfigurationError: `table` is not a plain name.
    """

    def __init__(self, table: str) -> None:
        if not isinstance(table, str) or not _TABLE.fullmatch(table):
            raise ConfigurationError(
                f"table={table!r}: give letters, digits and underscores, e.g. 'holdfast_fences' or "
                "'my_schema.holdfast_fences'"
            )
        self._table = table
        self._create = (
            f"CREATE TABLE IF NOT EXISTS {table} "
            "(name TEXT NOT NULL PRIMARY KEY, fence BIGINT NOT NULL)"
        )
        self._raise_fence = (
            f"INSERT INTO {table} AS seen (name, fence) VALUES (:name, :fence) "  # noqa: S608 - checked
            "ON CONFLICT (name) DO UPDATE SET fence = excluded.fence "
            "WHERE seen.fence <= excluded.fence"
        )
        self._read_fence = f"SELECT fence FROM {table} WHERE name = :name"  # noqa: S608 - checked

    def create_table(self, connection: Connection) -> None:
        """Create the table of the fences unless it exists. The caller commits.

        Args:
            connection: as for `check`.

        Raises:
            ConfigurationError: the guard cannot use this connection or its database.
        """
        database_of(connection).run(self._create, {})

    def check(
        self, connection: Connection, lease: HasFence, *, resource: str | None = None
    ) -> None:
        """Refuse a lease if a newer one has used the resource; otherwise record its fence.

        Call it first in a transaction, before you read, and write in the same transaction. Older
        leases are refused from its commit on. After an error, or if the call is interrupted, roll
        the transaction back.

        Args:
            connection: a DB-API connection, a connection or session of SQLAlchemy, or a connection
                of Django. With SQLAlchemy and asyncio, write
                `await connection.run_sync(guard.check, lease)`.
            lease: the lease, or anything with its name and its fence.
            resource: what the lock protects; None for the lock's name. Use one lock for one
                resource: the fences of different locks cannot be compared.

        Raises:
            StaleFence: a newer lease has used the resource. Roll back, and acquire the lock again.
            ConfigurationError: no transaction is open, or only a savepoint that SQLite commits, or
                the table does not exist, or the guard cannot use this connection or its database.
            TypeError: the arguments are swapped.
        """
        if not has_fence(lease) and has_fence(connection):
            raise TypeError("the arguments are swapped: write guard.check(connection, lease)")
        fence = fence_of(lease)
        name = lease.name if resource is None else resource
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"resource={name!r}: give a string that is not empty")
        database = database_of(connection)
        if advice := database.unsafe_savepoint():
            raise ConfigurationError(
                f"the fence of {name!r} would be checked in a savepoint that SQLite may commit "
                f"before the write that follows: {advice}",
                lock=lease.name,
            )
        try:
            changed = database.run(self._raise_fence, {"name": name, "fence": fence}).rowcount
            is_outside = is_outside_transaction(database.driver_connection())
        except Exception as error:
            if not means_missing_table(error, self._table):
                raise
            raise ConfigurationError(
                f"the fence of {name!r} was not checked, because the table {self._table!r} does "
                "not exist: call guard.create_table(connection) once, and commit, for example in "
                "a migration",
                lock=lease.name,
            ) from error
        if is_outside:
            raise ConfigurationError(
                f"the fence of {name!r} was checked outside a transaction, and would not protect "
                f"the write that follows: {database.advice}",
                lock=lease.name,
            )
        if changed == 1:
            return
        row = database.run(self._read_fence, {"name": name}, fetch=True).row
        if row is None:
            raise ConfigurationError(
                f"the fence of {name!r} was not stored: check the triggers and the row-level "
                "security of the table of the fences",
                lock=lease.name,
            )
        if row[0] != fence:  # equal if the driver does not report the number of rows
            raise stale(lease, name, row[0])
