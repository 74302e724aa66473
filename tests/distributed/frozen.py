"""The last import of a server of forks. What it has imported is taken out of the collector's sight, and with that out of
its forks' too: they would look at a million objects whenever they collect, and each of them at its end; and a page that
is looked at is a page that is copied. It cost a fork more than all that it does.
"""

import gc

gc.collect()
gc.freeze()
