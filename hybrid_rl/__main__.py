"""`python -m hybrid_rl` is `hybrid-rl`."""

import sys

from hybrid_rl.cli import main

sys.exit(main())
