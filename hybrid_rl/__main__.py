"""`python -m hybrid_rl`, the same command as `hybrid-rl`."""

import sys

from hybrid_rl.cli import main

sys.exit(main())
