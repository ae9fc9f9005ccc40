"""``python -m distman``."""

import sys

from distman.cli import main

sys.exit(main())
