"""Run `holdfast` as `python -m holdfast.cli`."""

from __future__ import annotations

from holdfast.cli import main

if __name__ == "__main__":  # worker processes import this file under another name
    main()
