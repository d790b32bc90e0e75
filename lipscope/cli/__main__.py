"""`python -m lipscope.cli` is `lipscope`."""

import sys

from lipscope.cli import main

sys.exit(main())
