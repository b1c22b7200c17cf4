"""Connections to SQLite and PostgreSQL, of every kind that the SQL guard accepts.

A test is written once for `Database`, and run with each kind.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import django  # type: ignore[import-untyped]  # it has no types
import psycopg
import psycopg2  # type: ignore[import-untyped]  # it has no types
import sqlalchemy
import sqlalchemy.orm
from django.conf import settings  # type: ignore[import-untyped]  # the same
from django.db import connection as django_connection  # type: ignore[import-untyped]  # the same
from django.db import connections, transaction
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.postgres import Postgres


class Database(ABC):
    """One database, to which every call opens a new connection."""

    @abstractmethod
    def begin(self) -> Any:
        """Return a context manager with a connection in a transaction.

        The end of the block commits, and an exception rolls back.
        """

    @abstractmethod
    def autocommit(self) -> Any:
        """Return a context manager with a connection without a transaction."""

    def execute(self, connection: Any, statement: str) -> list[Any]:
        """Run a statement and return its rows."""
        with closing(connection.cursor()) as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    def rows(self, statement: str) -> list[Any]:
        """Run a statement in a separate transaction and return its rows."""
        with self.begin() as connection:
            return self.execute(connection, statement)


class Sqlite3(Database):
    """The module of the standard library."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def begin(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            yield connection

    @contextmanager
    def autocommit(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            yield connection


class Psycopg(Database):
    """psycopg 3."""

    def __init__(self, postgres: Postgres) -> None:
        self.conninfo = postgres.conninfo

    @contextmanager
    def begin(self) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self.conninfo) as connection:
            yield connection

    @contextmanager
    def autocommit(self) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            yield connection


class Psycopg2(Database):
    """psycopg 2."""

    def __init__(self, postgres: Postgres) -> None:
        self.conninfo = postgres.conninfo

    @contextmanager
    def begin(self) -> Iterator[Any]:
        with closing(psycopg2.connect(self.conninfo)) as connection, connection:
            yield connection

    @contextmanager
    def autocommit(self) -> Iterator[Any]:
        with closing(psycopg2.connect(self.conninfo)) as connection:
            connection.autocommit = True
            yield connection


class SQLAlchemy(Database):
    """Connections of SQLAlchemy."""

    def __init__(self, url: str) -> None:
        self.engine = sqlalchemy.create_engine(url, poolclass=NullPool)

    @contextmanager
    def begin(self) -> Iterator[Any]:
        with self.engine.begin() as connection:
            yield connection

    @contextmanager
    def autocommit(self) -> Iterator[Any]:
        with self.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            yield connection

    def execute(self, connection: Any, statement: str) -> list[Any]:
        result = connection.execute(sqlalchemy.text(statement))
        return [tuple(row) for row in result] if result.returns_rows else []


class SQLAlchemySession(SQLAlchemy):
    """Sessions of SQLAlchemy's ORM."""

    @contextmanager
    def begin(self) -> Iterator[Any]:
        with sqlalchemy.orm.Session(self.engine) as session, session.begin():
            yield session

    @contextmanager
    def autocommit(self) -> Iterator[Any]:
        engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        with sqlalchemy.orm.Session(engine) as session:
            yield session


class Django(Database):
    """The connection of django.db, which is a proxy."""

    def __init__(self, **database: Any) -> None:
        if not settings.configured:
            settings.configure(DATABASES={"default": {}}, LOGGING_CONFIG=None)
            django.setup()
        self.database = database

    @contextmanager
    def autocommit(self) -> Iterator[Any]:
        connections.settings["default"].update(self.database)
        connections["default"] = connections.create_connection("default")
        try:
            yield django_connection
        finally:
            django_connection.close()

    @contextmanager
    def begin(self) -> Iterator[Any]:
        with self.autocommit() as connection, transaction.atomic():
            yield connection


SQLITE: dict[str, Callable[[Path], Database]] = {
    "sqlite3": Sqlite3,
    "sqlalchemy on sqlite": lambda path: SQLAlchemy(f"sqlite:///{path}"),
    "sqlalchemy session on sqlite": lambda path: SQLAlchemySession(f"sqlite:///{path}"),
    "django on sqlite": lambda path: Django(ENGINE="django.db.backends.sqlite3", NAME=str(path)),
}
"""Each kind of connection to the SQLite database in a file."""


def url_of(postgres: Postgres, driver: str) -> str:
    """Return the URL of SQLAlchemy for a driver."""
    return f"postgresql+{driver}://postgres@/postgres?host={postgres.folder}"


def _django_on_postgres(postgres: Postgres) -> Django:
    host, name = str(postgres.folder), postgres.settings["dbname"]
    return Django(
        ENGINE="django.db.backends.postgresql",
        HOST=host,
        NAME=name,
        USER=postgres.settings["user"],
    )


POSTGRES: dict[str, Callable[[Postgres], Database]] = {
    "psycopg": Psycopg,
    "psycopg2": Psycopg2,
    "sqlalchemy on psycopg": lambda postgres: SQLAlchemy(url_of(postgres, "psycopg")),
    "sqlalchemy on psycopg2": lambda postgres: SQLAlchemy(url_of(postgres, "psycopg2")),
    "sqlalchemy session on psycopg": lambda p: SQLAlchemySession(url_of(p, "psycopg")),
    "django on psycopg": _django_on_postgres,
}
"""Each kind of connection to a PostgreSQL server."""
