"""guards.SQL: late writes are refused in SQLite and in PostgreSQL, by every kind of connection."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import sys
import threading
from contextlib import closing
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import aiosqlite
import psycopg
import psycopg.rows
import psycopg2  # type: ignore[import-untyped]  # it has no types
import psycopg2.extras  # type: ignore[import-untyped]  # the same
import pytest
import sqlalchemy
import sqlalchemy.orm
from django.db import transaction  # type: ignore[import-untyped]  # it has no types
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

import holdfast
from holdfast.guards import SQL
from kit import postgres as postgresql
from kit.databases import POSTGRES, SQLITE, Database, Django, Sqlite3, url_of
from kit.postgres import Postgres
from kit.processes import Process
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers import Server

GUARD = SQL("holdfast_fences")
QUICK = {"sqlite3", "psycopg", "sqlalchemy on psycopg2"}
"""The kinds of connection with which `make test` runs every test; `make long` runs the others."""
GREATEST = 2**53 - 1
FENCES = "SELECT name, fence FROM holdfast_fences"
TOTAL = "SELECT total FROM invoice"


class ALease(NamedTuple):
    """What a guard needs of a lease."""

    name: str
    fence: int


OLDER, NEWER = (
    ALease("invoice:42", 1_800_000_000_000_000),
    ALease("invoice:42", 1_800_000_000_000_001),
)


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[Postgres]:
    """A PostgreSQL server shared by all tests of one pytest worker."""
    if reason := postgresql.missing():
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture
def postgres(shared_postgres: Postgres) -> Postgres:
    """The shared PostgreSQL server, with an invoice and without a fence."""
    with psycopg.connect(shared_postgres.conninfo) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        connection.execute("CREATE TABLE invoice (total INTEGER)")
        connection.execute("INSERT INTO invoice VALUES (0)")
        GUARD.create_table(connection)
    return shared_postgres


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Path:
    """A SQLite database, with an invoice and without a fence."""
    path = tmp_path / "invoices.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE invoice (total INTEGER)")
        connection.execute("INSERT INTO invoice VALUES (0)")
        GUARD.create_table(connection)
    return path


@pytest.fixture(
    params=[
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.long)
        for kind in (*SQLITE, *POSTGRES)
    ]
)
def database(request: pytest.FixtureRequest) -> Database:
    """A database with an invoice, used through one kind of connection."""
    return _database(request)


@pytest.fixture(params=[*SQLITE, *POSTGRES])
def each_database(request: pytest.FixtureRequest) -> Database:
    """The same. `make test` runs the test with every kind, not only with the `QUICK` ones."""
    return _database(request)


def _database(request: pytest.FixtureRequest) -> Database:
    if request.param in SQLITE:
        return SQLITE[request.param](request.getfixturevalue("sqlite_path"))
    return POSTGRES[request.param](request.getfixturevalue("postgres"))


def save(database: Database, total: int, lease: ALease) -> None:
    with database.begin() as connection:
        GUARD.check(connection, lease)
        database.execute(connection, f"UPDATE invoice SET total = {total}")  # noqa: S608 - a number


# Each kind of connection


def test_a_late_write_is_refused_and_the_newest_lease_writes_many_times(
    each_database: Database,
) -> None:
    save(each_database, 1, OLDER)
    save(each_database, 2, OLDER)
    save(each_database, 3, NEWER)
    with pytest.raises(holdfast.StaleFence) as refused:
        save(each_database, 4, OLDER)
    save(each_database, 5, NEWER)
    assert each_database.rows(TOTAL) == [(5,)]
    assert each_database.rows(FENCES) == [("invoice:42", NEWER.fence)]
    error = refused.value
    assert (error.lock, error.resource) == ("invoice:42", "invoice:42")
    assert (error.fence, error.newest_fence) == (OLDER.fence, NEWER.fence)
    assert "acquire the lock again" in str(error)


def test_the_fence_and_the_write_are_committed_together(database: Database) -> None:
    with database.begin() as connection:
        GUARD.check(connection, OLDER)
        database.execute(connection, "UPDATE invoice SET total = 1")
        if not isinstance(database, Django):  # it has one connection per thread
            assert database.rows(FENCES) == []
            assert database.rows(TOTAL) == [(0,)]
    assert database.rows(FENCES) == [OLDER]
    assert database.rows(TOTAL) == [(1,)]


def test_a_rollback_leaves_the_fence_unchanged(database: Database) -> None:
    save(database, 1, OLDER)
    with pytest.raises(ZeroDivisionError), database.begin() as connection:
        GUARD.check(connection, NEWER)
        _ = 1 / 0
    assert database.rows(FENCES) == [OLDER]
    save(database, 2, OLDER)
    assert database.rows(TOTAL) == [(2,)]


def test_the_greatest_fences_are_compared_exactly(database: Database) -> None:
    save(database, 1, ALease("a", GREATEST - 1))
    save(database, 2, ALease("a", GREATEST))
    with pytest.raises(holdfast.StaleFence) as refused:
        save(database, 3, ALease("a", GREATEST - 1))
    assert refused.value.newest_fence == GREATEST
    assert database.rows(FENCES) == [("a", GREATEST)]


def test_each_resource_has_its_own_fence(database: Database) -> None:
    with database.begin() as connection:
        GUARD.check(connection, NEWER)
        GUARD.check(connection, OLDER, resource="account's :name %s ?")
        GUARD.check(connection, ALease("invoice:43", 1))
    assert dict(database.rows(FENCES)) == {
        "invoice:42": NEWER.fence,
        "account's :name %s ?": OLDER.fence,
        "invoice:43": 1,
    }
    with pytest.raises(holdfast.StaleFence, match="account") as refused, database.begin() as again:
        GUARD.check(again, ALease("lock", 1), resource="account's :name %s ?")
    assert (refused.value.lock, refused.value.resource) == ("lock", "account's :name %s ?")


@pytest.mark.parametrize("lease", [OLDER, NEWER])
def test_a_check_outside_a_transaction_is_an_error(each_database: Database, lease: ALease) -> None:
    save(each_database, 1, NEWER)
    advice = "transaction.atomic" if isinstance(each_database, Django) else "BEGIN|engine.begin"
    with (
        each_database.autocommit() as connection,
        pytest.raises(
            holdfast.ConfigurationError, match=f"outside a transaction.*({advice})"
        ) as error,
    ):
        GUARD.check(connection, lease)
    assert error.value.lock == "invoice:42"
    assert each_database.rows(FENCES) == [NEWER]


def test_the_table_is_created_once_and_may_exist(database: Database) -> None:
    with database.begin() as connection:
        GUARD.create_table(connection)
        guard = SQL("other_fences")
        guard.create_table(connection)
        guard.check(connection, NEWER)
    assert database.rows("SELECT name, fence FROM other_fences") == [NEWER]
    assert database.rows(FENCES) == []


def test_a_check_without_the_table_names_create_table(database: Database) -> None:
    guard = SQL("missing_fences")
    with (
        pytest.raises(
            holdfast.ConfigurationError, match=r"guard\.create_table\(connection\)"
        ) as caught,
        database.begin() as connection,
    ):
        guard.check(connection, NEWER)
    assert caught.value.lock == NEWER.name
    assert "'missing_fences'" in str(caught.value)


def test_another_missing_table_is_not_the_table_of_the_fences(sqlite_path: Path) -> None:
    with closing(sqlite3.connect(sqlite_path)) as connection:
        connection.execute(
            "CREATE TRIGGER copy AFTER INSERT ON holdfast_fences "
            "BEGIN INSERT INTO copies VALUES (new.name); END"
        )
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            GUARD.check(connection, NEWER)


def test_swapped_arguments_of_a_check_are_named(database: Database) -> None:
    check: Any = GUARD.check
    with (
        pytest.raises(TypeError, match=r"guard\.check\(connection, lease\)"),
        database.begin() as connection,
    ):
        check(NEWER, connection)


# Row factories


class Invoice(NamedTuple):
    """What the rows of a connection become that reads nothing else."""

    total: int


@pytest.mark.parametrize(
    "row_factory",
    [
        psycopg.rows.dict_row,
        psycopg.rows.namedtuple_row,
        psycopg.rows.scalar_row,
        psycopg.rows.class_row(Invoice),
    ],
)
def test_a_late_write_is_refused_with_any_row_factory_of_psycopg(
    postgres: Postgres, row_factory: Any
) -> None:
    with psycopg.connect(postgres.conninfo, row_factory=row_factory) as connection:
        GUARD.check(connection, NEWER)
        with pytest.raises(holdfast.StaleFence) as refused:
            GUARD.check(connection, OLDER)
    assert refused.value.newest_fence == NEWER.fence


@pytest.mark.parametrize("kind", ["RealDictCursor", "DictCursor", "NamedTupleCursor"])
def test_a_late_write_is_refused_with_any_cursor_factory_of_psycopg2(
    postgres: Postgres, kind: str
) -> None:
    factory = getattr(psycopg2.extras, kind)
    with closing(psycopg2.connect(postgres.conninfo, cursor_factory=factory)) as connection:
        GUARD.check(connection, NEWER)
        with pytest.raises(holdfast.StaleFence) as refused:
            GUARD.check(connection, OLDER)
    assert refused.value.newest_fence == NEWER.fence


@pytest.mark.parametrize(
    "row_factory",
    [
        sqlite3.Row,
        lambda cursor, row: {cursor.description[0][0]: row[0]},
        lambda _, row: row[0],
        lambda _, row: SimpleNamespace(total=row[0]),
    ],
    ids=["Row", "dict", "scalar", "class"],
)
def test_a_late_write_is_refused_with_any_row_factory_of_sqlite3(
    sqlite_path: Path, row_factory: Any
) -> None:
    with closing(sqlite3.connect(sqlite_path)) as connection:
        connection.row_factory = row_factory
        GUARD.check(connection, NEWER)
        with pytest.raises(holdfast.StaleFence) as refused:
            GUARD.check(connection, OLDER)
    assert refused.value.newest_fence == NEWER.fence


# Transactions in detail


def test_an_explicit_transaction_of_an_autocommit_connection_is_accepted(
    sqlite_path: Path, postgres: Postgres
) -> None:
    with closing(sqlite3.connect(sqlite_path, isolation_level=None)) as lite:
        lite.execute("BEGIN")
        GUARD.check(lite, OLDER)
        lite.execute("COMMIT")
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        with connection.transaction():
            GUARD.check(connection, OLDER)
        with connection.pipeline(), connection.transaction():
            GUARD.check(connection, OLDER)  # the number of changed rows is not known yet


def test_a_refused_lease_is_refused_in_a_pipeline_of_psycopg(postgres: Postgres) -> None:
    with psycopg.connect(postgres.conninfo) as connection:
        GUARD.check(connection, NEWER)
        connection.commit()
        with pytest.raises(holdfast.StaleFence), connection.pipeline():
            GUARD.check(connection, OLDER)


@pytest.mark.parametrize("lease", [OLDER, NEWER])
def test_a_check_in_a_pipeline_outside_a_transaction_is_an_error(
    postgres: Postgres, lease: ALease
) -> None:
    with psycopg.connect(postgres.conninfo) as connection:
        GUARD.check(connection, NEWER)
    with (
        psycopg.connect(postgres.conninfo, autocommit=True) as connection,
        connection.pipeline(),
    ):
        for _ in range(2):  # the second one begins after a Sync
            with pytest.raises(holdfast.ConfigurationError, match="outside a transaction"):
                GUARD.check(connection, lease)


def test_a_check_in_a_pipeline_after_begin_is_accepted(postgres: Postgres) -> None:
    with (
        psycopg.connect(postgres.conninfo, autocommit=True) as connection,
        connection.pipeline(),
    ):
        connection.execute("BEGIN")
        GUARD.check(connection, NEWER)
        with psycopg.connect(postgres.conninfo) as other:
            assert other.execute(FENCES).fetchall() == []
        connection.execute("COMMIT")
        with pytest.raises(holdfast.ConfigurationError, match="outside a transaction"):
            GUARD.check(connection, NEWER)


def test_a_schema_may_be_part_of_the_table(postgres: Postgres, sqlite_path: Path) -> None:
    with psycopg.connect(postgres.conninfo) as connection:
        connection.execute("DROP SCHEMA IF EXISTS locks CASCADE")
        connection.execute("CREATE SCHEMA locks")
        guard = SQL("locks.fences")
        guard.create_table(connection)
        guard.check(connection, OLDER)
        guard.check(connection, NEWER)
        with pytest.raises(holdfast.StaleFence):
            guard.check(connection, OLDER)
    with closing(sqlite3.connect(sqlite_path)) as lite:
        guard = SQL("main.holdfast_fences")
        guard.check(lite, NEWER)
        with pytest.raises(holdfast.StaleFence):
            guard.check(lite, OLDER)


def test_a_fence_that_is_not_stored_is_an_error(sqlite_path: Path) -> None:
    with closing(sqlite3.connect(sqlite_path)) as connection:
        connection.execute(
            "CREATE TRIGGER t BEFORE INSERT ON holdfast_fences BEGIN SELECT RAISE(IGNORE); END"
        )
        with pytest.raises(holdfast.ConfigurationError, match="was not stored: check the triggers"):
            GUARD.check(connection, OLDER)


# Savepoints


def is_committed(path: Path) -> bool:
    """Whether another connection sees a fence."""
    with closing(sqlite3.connect(path)) as other:
        return other.execute(FENCES).fetchone() is not None


IN_A_SAVEPOINT = "in a savepoint that SQLite may commit.*before begin_nested"


def test_a_check_in_a_savepoint_that_sqlite_commits_is_refused(sqlite_path: Path) -> None:
    # sqlite3 sends no BEGIN before SAVEPOINT: RELEASE would commit the fence before the write.
    engine = sqlalchemy.create_engine(f"sqlite:///{sqlite_path}", poolclass=NullPool)
    with engine.begin() as connection, connection.begin_nested():
        with pytest.raises(holdfast.ConfigurationError, match=IN_A_SAVEPOINT) as refused:
            GUARD.check(connection, OLDER)
        assert refused.value.lock == OLDER.name
    with (
        sqlalchemy.orm.Session(engine) as session,
        session.begin(),
        session.begin_nested(),
        pytest.raises(holdfast.ConfigurationError, match=IN_A_SAVEPOINT),
    ):
        GUARD.check(session, OLDER)
    assert not is_committed(sqlite_path)


def test_a_check_in_a_savepoint_that_aiosqlite_commits_is_refused(sqlite_path: Path) -> None:
    async def scenario() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{sqlite_path}", poolclass=NullPool)
        async with engine.begin() as connection, connection.begin_nested():
            with pytest.raises(holdfast.ConfigurationError, match=IN_A_SAVEPOINT):
                await connection.run_sync(GUARD.check, OLDER)
        await engine.dispose()

    asyncio.run(scenario())
    assert not is_committed(sqlite_path)


def test_a_check_in_a_savepoint_that_django_commits_is_refused(sqlite_path: Path) -> None:
    database = SQLITE["django on sqlite"](sqlite_path)
    with database.autocommit() as connection:
        connection.set_autocommit(False)
        with (
            transaction.atomic(),
            pytest.raises(holdfast.ConfigurationError, match=r"remove set_autocommit\(False\)"),
        ):
            GUARD.check(connection, OLDER)
    assert not is_committed(sqlite_path)


def test_a_check_before_a_savepoint_is_accepted(sqlite_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{sqlite_path}", poolclass=NullPool)
    with engine.begin() as connection:
        GUARD.check(connection, OLDER)
        with connection.begin_nested():
            connection.execute(sqlalchemy.text("UPDATE invoice SET total = 1"))
        assert not is_committed(sqlite_path)


def test_a_check_in_a_savepoint_after_begin_is_accepted(sqlite_path: Path) -> None:
    url = f"sqlite:///{sqlite_path}"
    engine = sqlalchemy.create_engine(
        url, poolclass=NullPool, connect_args={"isolation_level": None}
    )
    sqlalchemy.event.listen(engine, "begin", lambda each: each.exec_driver_sql("BEGIN"))
    engines = [engine]
    if sys.version_info >= (3, 12):
        arguments = {"autocommit": False}
        engines.append(sqlalchemy.create_engine(url, poolclass=NullPool, connect_args=arguments))
    for each in engines:
        with each.begin() as connection:
            with connection.begin_nested():
                GUARD.check(connection, OLDER)
            assert not is_committed(sqlite_path)
            connection.rollback()
    with SQLITE["django on sqlite"](sqlite_path).begin() as connection:
        with transaction.atomic():
            GUARD.check(connection, OLDER)
        assert not is_committed(sqlite_path)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has no autocommit=")
def test_a_check_in_a_savepoint_of_aiosqlite_without_autocommit_is_accepted(
    sqlite_path: Path,
) -> None:
    async def scenario() -> None:
        engine = create_async_engine(
            f"sqlite+aiosqlite:///{sqlite_path}",
            poolclass=NullPool,
            connect_args={"autocommit": False},
        )
        async with engine.begin() as connection:
            async with connection.begin_nested():
                await connection.run_sync(GUARD.check, OLDER)
            assert not is_committed(sqlite_path)
        await engine.dispose()

    asyncio.run(scenario())


def test_a_check_in_a_savepoint_of_postgresql_is_accepted(postgres: Postgres) -> None:
    engine = sqlalchemy.create_engine(url_of(postgres, "psycopg"), poolclass=NullPool)
    with engine.begin() as connection:
        with connection.begin_nested():
            GUARD.check(connection, OLDER)
        with psycopg.connect(postgres.conninfo) as other:
            assert other.execute(FENCES).fetchall() == []


def test_after_a_rollback_to_a_savepoint_the_check_is_repeated(postgres: Postgres) -> None:
    with psycopg.connect(postgres.conninfo) as connection:
        connection.execute("SELECT 1")  # begins the transaction: what follows is a savepoint
        with pytest.raises(ZeroDivisionError), connection.transaction():
            GUARD.check(connection, OLDER)
            _ = 1 / 0
        with psycopg.connect(postgres.conninfo) as newer:
            GUARD.check(newer, NEWER)
        with pytest.raises(holdfast.StaleFence):
            GUARD.check(connection, OLDER)


# Concurrent transactions


class Late(threading.Thread):
    """A transaction in another thread, up to and including its check and its write."""

    def __init__(self, postgres: Postgres, lease: ALease, **settings: Any) -> None:
        super().__init__(daemon=True)
        self.connection = psycopg.connect(postgres.conninfo)
        for name, value in settings.items():
            setattr(self.connection, name, value)
        self.connection.execute("SELECT 1")  # with REPEATABLE READ, this takes the snapshot
        self._pid = self.connection.info.backend_pid
        self._observer = psycopg.connect(postgres.conninfo, autocommit=True)
        self._lease = lease
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with self.connection:
                GUARD.check(self.connection, self._lease)
                self.connection.execute("UPDATE invoice SET total = total + 10")
        except (holdfast.StaleFence, psycopg.Error) as error:
            self.error = error

    def wait_until_blocked(self) -> None:
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        with self._observer:
            eventually(
                lambda: self._observer.execute(waits, (self._pid,)).fetchone() == (True,),
                what="the transaction waits for the row of its resource",
            )

    def ended(self) -> Exception | None:
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.error


@pytest.mark.parametrize("row_exists", [False, True])
def test_a_late_transaction_waits_for_the_newer_one_and_is_refused(
    postgres: Postgres, row_exists: bool
) -> None:
    with psycopg.connect(postgres.conninfo) as newer:
        if row_exists:
            GUARD.check(newer, OLDER)
            newer.commit()
        GUARD.check(newer, NEWER)
        late = Late(postgres, OLDER)
        late.start()
        late.wait_until_blocked()
        newer.execute("UPDATE invoice SET total = 1")
        newer.commit()
        error = late.ended()
        assert isinstance(error, holdfast.StaleFence)
        assert error.newest_fence == NEWER.fence
        assert newer.execute(TOTAL).fetchone() == (1,)


def test_a_late_transaction_is_accepted_if_the_newer_one_is_rolled_back(postgres: Postgres) -> None:
    with psycopg.connect(postgres.conninfo) as newer:
        GUARD.check(newer, NEWER)
        late = Late(postgres, OLDER)
        late.start()
        late.wait_until_blocked()
        newer.rollback()
        assert late.ended() is None
        assert newer.execute(TOTAL).fetchone() == (10,)


def test_a_newer_transaction_reads_what_an_older_one_that_was_checked_before_it_wrote(
    postgres: Postgres,
) -> None:
    with psycopg.connect(postgres.conninfo) as older:
        GUARD.check(older, OLDER)
        newer = Late(postgres, NEWER)
        newer.start()
        newer.wait_until_blocked()
        older.execute("UPDATE invoice SET total = total + 1")
        older.commit()
        assert newer.ended() is None
        assert older.execute(TOTAL).fetchone() == (11,)


def test_with_repeatable_read_a_concurrent_transaction_must_be_repeated(postgres: Postgres) -> None:
    with psycopg.connect(postgres.conninfo) as newer:
        GUARD.check(newer, NEWER)
        late = Late(postgres, OLDER, isolation_level=psycopg.IsolationLevel.REPEATABLE_READ)
        late.start()
        late.wait_until_blocked()
        newer.commit()
        assert isinstance(late.ended(), psycopg.errors.SerializationFailure)


def test_in_sqlite_a_second_transaction_cannot_begin_after_a_check(sqlite_path: Path) -> None:
    with (
        closing(sqlite3.connect(sqlite_path)) as newer,
        closing(sqlite3.connect(sqlite_path, timeout=0)) as late,
    ):
        GUARD.check(newer, NEWER)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            GUARD.check(late, OLDER)
        newer.commit()
        with pytest.raises(holdfast.StaleFence):
            GUARD.check(late, OLDER)


LATE_HOLDER = """
    import sqlite3
    guard = holdfast.guards.SQL("holdfast_fences")
    lease = client.lock("invoice:42", ttl=1).acquire()
    with sqlite3.connect({path!r}) as connection:
        lease.check()
        print(lease.fence, flush=True)
        sys.stdin.readline()
        try:
            guard.check(connection, lease)
            connection.execute("UPDATE invoice SET total = 13")
        except holdfast.StaleFence as error:
            print(error.newest_fence, flush=True)
    sys.stdin.readline()
"""


def test_a_holder_that_is_paused_between_its_check_and_its_write_is_refused(
    sqlite_path: Path, server: Server
) -> None:
    database = Sqlite3(sqlite_path)
    with (
        Process(server, LATE_HOLDER.format(path=str(sqlite_path))) as paused,
        holdfast.Client(server.url) as client,
    ):
        fence = int(paused.read_line())
        paused.stop()
        with (
            client.lock("invoice:42", timeout=PATIENCE) as lease,
            database.begin() as connection,
        ):
            assert lease.fence > fence
            GUARD.check(connection, lease)
            connection.execute("UPDATE invoice SET total = 7")
        paused.send_line()
        paused.resume()
        assert int(paused.read_line()) == lease.fence
    assert database.rows(TOTAL) == [(7,)]


# asyncio


ASYNC_DRIVERS = ["aiosqlite", "asyncpg", "psycopg"]


@pytest.fixture(params=ASYNC_DRIVERS)
def async_url(request: pytest.FixtureRequest) -> str:
    """The URL of a database for SQLAlchemy with asyncio."""
    if request.param == "aiosqlite":
        return f"sqlite+aiosqlite:///{request.getfixturevalue('sqlite_path')}"
    return url_of(request.getfixturevalue("postgres"), request.param)


def test_connections_and_sessions_of_sqlalchemy_run_the_check_with_asyncio(async_url: str) -> None:
    async def scenario() -> None:
        engine = create_async_engine(async_url, poolclass=NullPool)
        async with engine.begin() as connection:
            await connection.run_sync(GUARD.create_table)
            await connection.run_sync(GUARD.check, NEWER)
        async with AsyncSession(engine) as session, session.begin():
            await session.run_sync(GUARD.check, NEWER)
        with pytest.raises(holdfast.StaleFence) as refused:
            async with engine.begin() as connection:
                await connection.run_sync(GUARD.check, OLDER)
        assert refused.value.newest_fence == NEWER.fence
        with pytest.raises(holdfast.StaleFence):
            async with AsyncSession(engine) as session, session.begin():
                await session.run_sync(GUARD.check, OLDER)
        autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        async with autocommit.connect() as connection:
            with pytest.raises(holdfast.ConfigurationError, match="outside a transaction"):
                await connection.run_sync(GUARD.check, NEWER)
        await engine.dispose()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "connection",
    [
        object.__new__(AsyncConnection),
        object.__new__(psycopg.AsyncConnection),
        AsyncSession(),
        aiosqlite.connect(":memory:"),
    ],
    ids=lambda connection: type(connection).__module__,
)
def test_the_error_for_an_asyncio_connection_names_run_sync(connection: Any) -> None:
    with pytest.raises(holdfast.ConfigurationError, match=r"await connection\.run_sync"):
        GUARD.check(connection, OLDER)


# Arguments


@pytest.mark.parametrize(
    "table", ["", "a b", "a.b.c", "1a", 'a"', "a;", ".a", "a.", "ä", "a\n", None]
)
def test_a_table_that_is_no_plain_name_is_an_error(table: Any) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="give letters, digits and underscores"):
        SQL(table)


@pytest.mark.parametrize("fence", [None, 0, -1, 2**53, True, 1.5, "7"])
def test_a_lease_without_a_valid_fence_is_an_error(fence: Any, sqlite_path: Path) -> None:
    with (
        closing(sqlite3.connect(sqlite_path)) as connection,
        pytest.raises(holdfast.ConfigurationError, match="no valid fence"),
    ):
        GUARD.check(connection, ALease("a", fence))


@pytest.mark.parametrize("resource", ["", 7])
def test_a_resource_that_is_no_string_is_refused(resource: Any, sqlite_path: Path) -> None:
    with (
        closing(sqlite3.connect(sqlite_path)) as connection,
        pytest.raises(holdfast.ConfigurationError, match=re.escape(f"resource={resource!r}")),
    ):
        GUARD.check(connection, OLDER, resource=resource)


@pytest.mark.parametrize(
    "connection",
    [
        SimpleNamespace(in_atomic_block=True, vendor="mysql"),
        SimpleNamespace(in_atomic_block=True, vendor="microsoft"),
        SimpleNamespace(exec_driver_sql=None, dialect=SimpleNamespace(name="mariadb")),
        SimpleNamespace(exec_driver_sql=None, dialect=SimpleNamespace(name="oracle")),
        type("Connection", (), {"__module__": "MySQLdb.connections"})(),
        type("Connection", (), {"__module__": "oracledb.connection"})(),
    ],
)
def test_a_database_without_on_conflict_is_an_error(connection: Any) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="has no INSERT … ON CONFLICT"):
        GUARD.check(connection, OLDER)


@pytest.mark.parametrize("connection", [None, 7, "sqlite:///x", sqlalchemy.create_mock_engine])
def test_an_unsupported_connection_is_refused(connection: Any) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="give a DB-API connection"):
        GUARD.check(connection, OLDER)


def test_an_engine_is_refused(sqlite_path: Path) -> None:
    engine: Any = sqlalchemy.create_engine(f"sqlite:///{sqlite_path}")
    with pytest.raises(holdfast.ConfigurationError, match="give a DB-API connection"):
        GUARD.check(engine, OLDER)


def test_a_scoped_session_is_accepted(sqlite_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{sqlite_path}", poolclass=NullPool)
    session = sqlalchemy.orm.scoped_session(sqlalchemy.orm.sessionmaker(engine))
    GUARD.check(session, NEWER)
    session.commit()
    with pytest.raises(holdfast.StaleFence):
        GUARD.check(session, OLDER)
    session.remove()


class Recorder:
    """A connection of a driver that reports neither its transactions nor the rows it changed."""

    rowcount = -1

    def __init__(self) -> None:
        self.statements: list[tuple[str, Any]] = []

    def cursor(self) -> Recorder:
        return self

    def execute(self, statement: str, values: Any) -> None:
        self.statements.append((statement, values))

    def fetchone(self) -> tuple[int]:
        return (NEWER.fence,)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("paramstyle", "insert", "select"),
    [
        ("qmark", "VALUES (?, ?)", "name = ?"),
        ("numeric", "VALUES (:1, :2)", "name = :1"),
        ("named", "VALUES (:name, :fence)", "name = :name"),
        ("format", "VALUES (%s, %s)", "name = %s"),
        ("pyformat", "VALUES (%(name)s, %(fence)s)", "name = %(name)s"),
    ],
)
def test_statements_use_the_paramstyle_of_the_driver(
    paramstyle: str, insert: str, select: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = ModuleType("a_driver")
    driver.paramstyle = paramstyle
    monkeypatch.setitem(__import__("sys").modules, "a_driver", driver)
    base = type("Connection", (Recorder,), {"__module__": "a_driver.connections"})
    connection = type("OurConnection", (base,), {})()
    GUARD.check(connection, NEWER)  # the fence that is read is the lease's own: it was accepted
    (first, values), (second, name) = connection.statements
    assert insert in first
    assert second.endswith(select)
    if paramstyle in ("named", "pyformat"):
        assert (values, name) == (NEWER._asdict(), {"name": NEWER.name})
    else:
        assert (values, name) == (tuple(NEWER), (NEWER.name,))
    with pytest.raises(holdfast.StaleFence):
        GUARD.check(connection, OLDER)
