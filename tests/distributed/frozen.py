"""The last import of a server of forks: what it has imported is taken out of the collector's sight, and of its forks'.

They would look at a million objects whenever they collect, and at each of them when they end; and a page that is looked
at is a page that is copied. That cost a fork more than all that it does.
"""

import gc

gc.collect()
gc.freeze()
