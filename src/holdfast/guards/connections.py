"""How statements are run on the connections that the SQL guard accepts.

There are three kinds: DB-API connections, connections and sessions of SQLAlchemy, and connections
of Django. They are recognised by their attributes, so that no driver is imported here. This module
also detects databases that lack the guard's statement, and connections without a transaction.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple, Protocol, TypeAlias

from holdfast.errors import ConfigurationError


class HasCursor(Protocol):
    """A DB-API connection, or a connection of Django."""

    def cursor(self) -> Any: ...  # noqa: ANN401, D102 - a class of the driver


class HasExecDriverSQL(Protocol):
    """A connection of SQLAlchemy."""

    def exec_driver_sql(self, statement: str, /) -> Any: ...  # noqa: ANN401, D102 - of SQLAlchemy


class HasConnection(Protocol):
    """A session of SQLAlchemy."""

    def connection(self) -> Any: ...  # noqa: ANN401, D102 - a class of SQLAlchemy


Connection: TypeAlias = HasCursor | HasExecDriverSQL | HasConnection
"""A DB-API connection, a connection or session of SQLAlchemy, or a connection of Django."""


class Result(NamedTuple):
    """The result of a statement."""

    rowcount: int
    """How many rows were changed; -1 if the driver does not report it."""
    row: Any
    """The first row as a sequence, if rows were requested and there is one."""


class Database(Protocol):
    """One connection. Statements have the placeholders `:name` and `:fence`."""

    advice: str
    """How to begin a transaction on this connection."""

    def run(self, statement: str, values: dict[str, Any], *, fetch: bool = False) -> Result:
        """Run a statement; with `fetch`, return its first row."""

    def driver_connection(self) -> object:
        """Return the connection of the driver, once a statement has been run."""

    def unsafe_savepoint(self) -> str | None:
        """Return advice if a savepoint is open that may be the transaction of SQLite itself."""


class DBAPI:
    """A connection of a driver that follows PEP 249."""

    advice = "execute BEGIN before the check, or connect without autocommit"

    def __init__(self, connection: Any, paramstyle: str) -> None:  # noqa: ANN401 - of the driver
        self._connection = connection
        self._paramstyle = paramstyle

    def run(self, statement: str, values: dict[str, Any], *, fetch: bool = False) -> Result:
        """Run a statement with the driver's style of placeholders."""
        names = list(values)
        for number, name in enumerate(names, 1):
            written = _PLACEHOLDERS[self._paramstyle].format(name=name, number=number)
            statement = statement.replace(f":{name}", written)
        by_name = self._paramstyle in {"named", "pyformat"}
        with closing(self._connection.cursor()) as cursor:
            if hasattr(self._connection, "row_factory"):  # psycopg and sqlite3
                cursor.row_factory = _tuple_rows
            cursor.execute(statement, values if by_name else tuple(values.values()))
            row = cursor.fetchone() if fetch else None
            if isinstance(row, Mapping):  # psycopg2 with RealDictCursor
                row = tuple(row.values())
            return Result(cursor.rowcount, row)

    def driver_connection(self) -> object:
        """Return the connection itself."""
        return self._connection

    def unsafe_savepoint(self) -> str | None:
        """Return None: a driver does not report its savepoints."""
        return None


def _tuple_rows(_: object, row: Any = None) -> Any:  # noqa: ANN401 - of any driver
    """Return a row of sqlite3 as it is; for psycopg, return what makes rows."""
    return tuple if row is None else row


_PLACEHOLDERS = {
    "qmark": "?",
    "numeric": ":{number}",
    "named": ":{name}",
    "format": "%s",
    "pyformat": "%({name})s",
}
"""The placeholders of PEP 249. The statements use their values in order, and each once."""


class Django(DBAPI):
    """A connection from `django.db`. Its cursors take the placeholder %s for every database."""

    advice = "write 'with transaction.atomic():' around the check and the write"

    def __init__(self, connection: Any) -> None:  # noqa: ANN401 - a class of Django
        super().__init__(connection, "format")

    def driver_connection(self) -> object:
        """Return the connection that Django has opened."""
        opened: object = self._connection.connection
        return opened

    def unsafe_savepoint(self) -> str | None:
        """Return advice if atomic() sent a SAVEPOINT without a BEGIN."""
        if any(self._connection.savepoint_ids) and _sends_no_begin(self.driver_connection()):
            return "remove set_autocommit(False), so that atomic() sends BEGIN"
        return None


class SQLAlchemy:
    """A connection of SQLAlchemy."""

    advice = "write 'with engine.begin() as connection:', and remove isolation_level='AUTOCOMMIT'"

    def __init__(self, connection: Any) -> None:  # noqa: ANN401 - a class of SQLAlchemy
        self._connection = connection

    def run(self, statement: str, values: dict[str, Any], *, fetch: bool = False) -> Result:
        """Run a statement."""
        from sqlalchemy import text  # noqa: PLC0415 - installed, if there is such a connection

        result = self._connection.execute(text(statement), values)
        return Result(result.rowcount, result.first() if fetch else None)

    def driver_connection(self) -> object:
        """Return the connection of the driver, which may be one for asyncio."""
        raw: object = self._connection.connection.driver_connection
        return raw

    def unsafe_savepoint(self) -> str | None:
        """Return advice if begin_nested() may have sent a SAVEPOINT without a BEGIN."""
        if self._connection.in_nested_transaction() and _sends_no_begin(self.driver_connection()):
            return "call check before begin_nested(), or connect with autocommit=False"
        return None


def database_of(connection: Any) -> Database:  # noqa: ANN401 - of any driver
    """Return how statements are run on a connection.

    Raises:
        ConfigurationError: the connection is of another kind, or its database has no ON CONFLICT.
    """
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    if inspect.iscoroutinefunction(getattr(connection, "commit", None)):
        raise ConfigurationError(
            f"{kind} is for asyncio: use a connection or session of sqlalchemy.ext.asyncio, and "
            "write 'await connection.run_sync(guard.check, lease)'"
        )
    if hasattr(connection, "scalars") and callable(getattr(connection, "connection", None)):
        connection = connection.connection()  # the connection of a session in its transaction
    if hasattr(connection, "exec_driver_sql"):
        _require_on_conflict(connection.dialect.name)
        return SQLAlchemy(connection)
    if hasattr(connection, "in_atomic_block"):
        _require_on_conflict(connection.vendor)
        return Django(connection)
    _require_on_conflict(kind.partition(".")[0])
    paramstyle = _paramstyle_of(type(connection))
    if paramstyle is not None and hasattr(connection, "cursor"):
        return DBAPI(connection, paramstyle)
    raise ConfigurationError(
        f"{kind} is no connection that guards.SQL can use: give a DB-API connection, a connection "
        "or session of SQLAlchemy, or a connection of django.db"
    )


_WITHOUT_ON_CONFLICT = {
    *("mysql", "mariadb", "mysqldb", "pymysql", "aiomysql", "asyncmy"),
    *("mssql", "microsoft", "pymssql", "oracle", "oracledb", "cx_oracle"),
}
"""SQLAlchemy's dialects, Django's vendors, and drivers, in lower case."""


def _require_on_conflict(database: str) -> None:
    if database.lower() in _WITHOUT_ON_CONFLICT:
        raise ConfigurationError(
            f"guards.SQL does not work with {database}, which has no INSERT … ON CONFLICT: compare "
            "a fence column in each UPDATE instead, with WHERE fence <= lease.fence"
        )


def _paramstyle_of(kind: type) -> str | None:
    """Return the `paramstyle` of the driver's module; None if there is no driver.

    The connection may be of a subclass, and the class may be in a submodule of the driver.
    """
    for each in kind.__mro__:
        module = each.__module__
        while module:
            paramstyle = getattr(sys.modules.get(module), "paramstyle", None)
            if paramstyle in _PLACEHOLDERS:
                return str(paramstyle)
            module = module.rpartition(".")[0]
    return None


_UNDEFINED_TABLE = "42P01"
"""PostgreSQL's SQLSTATE."""


def means_missing_table(error: BaseException, table: str) -> bool:
    """Whether a driver reports that this table does not exist.

    SQLAlchemy and Django wrap the error of the driver.
    """
    cause = getattr(error, "orig", None) or error.__cause__ or error
    codes = {getattr(each, "sqlstate", None) for each in (error, cause)}
    codes |= {getattr(each, "pgcode", None) for each in (error, cause)}
    missing = _UNDEFINED_TABLE in codes or "no such table" in str(cause)
    return missing and table.rpartition(".")[2].lower() in str(cause).lower()


_LEGACY = -1  # sqlite3.LEGACY_TRANSACTION_CONTROL, since Python 3.12


def _sends_no_begin(driver_connection: Any) -> bool:  # noqa: ANN401 - of any driver
    """Whether the driver sends no BEGIN before a SAVEPOINT: sqlite3 and aiosqlite in legacy mode.

    They send it before an INSERT, UPDATE or DELETE only. A SAVEPOINT before that is the transaction
    itself, and its RELEASE commits. With `isolation_level=None` the caller sends BEGIN.
    """
    raw = getattr(driver_connection, "_conn", driver_connection)  # aiosqlite hides `autocommit`
    return (
        isinstance(getattr(raw, "in_transaction", None), bool)
        and getattr(raw, "isolation_level", None) is not None
        and getattr(raw, "autocommit", _LEGACY) == _LEGACY
    )


_ACTIVE, _IN_TRANSACTION = 1, 2  # libpq: PQTRANS_ACTIVE, PQTRANS_INTRANS


def is_outside_transaction(driver_connection: Any) -> bool:  # noqa: ANN401 - of any driver
    """Whether no transaction is open after a statement was run. Unknown drivers return False."""
    if isinstance(getattr(driver_connection, "in_transaction", None), bool):  # sqlite3, aiosqlite
        return not driver_connection.in_transaction
    if hasattr(driver_connection, "is_in_transaction"):  # asyncpg
        return not driver_connection.is_in_transaction()
    status = _libpq_status(driver_connection)  # psycopg, psycopg2
    if status == _ACTIVE and _has_pipeline(driver_connection):
        # In a pipeline the server reports the transaction only after a Sync. Without one, psycopg
        # reports ACTIVE until a result is fetched, and then what was true at the last Sync.
        with driver_connection.pipeline():  # a nested block sends Sync
            pass
        status = _libpq_status(driver_connection)
    return status is not None and status != _IN_TRANSACTION


def _libpq_status(driver_connection: Any) -> Any:  # noqa: ANN401 - of any driver
    return getattr(getattr(driver_connection, "info", None), "transaction_status", None)


def _has_pipeline(driver_connection: Any) -> bool:  # noqa: ANN401 - of any driver
    commit = getattr(driver_connection, "commit", None)
    return hasattr(driver_connection, "pipeline") and not inspect.iscoroutinefunction(commit)
