"""`python -m lipscope` is `lipscope`."""

import sys

from lipscope.cli import main

sys.exit(main())
