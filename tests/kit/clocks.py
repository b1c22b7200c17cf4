"""Servers whose wall clock can be set. Needs a C compiler: see `clock.c`."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

from kit.servers import Server

COMPILER = shutil.which("cc")


class ClockedServer(Server):
    """A server with an adjustable wall clock."""

    def __init__(self, program: str, extra_args: tuple[str, ...]) -> None:
        super().__init__(program, extra_args)
        library, self._offset = self.folder / "clock.so", self.folder / "offset"
        self.step(0)
        assert COMPILER is not None
        source = Path(__file__).with_name("clock.c")
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", "-O", "-o", library, source, "-ldl"], check=True
        )
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}

    def step(self, seconds: int) -> None:
        """Set the clock's offset from the machine's clock."""
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(struct.pack("q", seconds))
