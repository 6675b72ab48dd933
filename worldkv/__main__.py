"""`python -m worldkv` is `worldkv`."""

from __future__ import annotations

import sys

from worldkv.cli.main import main

sys.exit(main())
