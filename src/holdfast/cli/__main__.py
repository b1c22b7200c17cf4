"""`python -m holdfast.cli` is `holdfast`."""

from __future__ import annotations

from holdfast.cli import main

if __name__ == "__main__":  # worker processes import it under another name
    main()
