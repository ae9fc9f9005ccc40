"""``python -m distman``."""

import sys

from distman._cli import main

sys.exit(main())
